# SPDX-License-Identifier: Apache-2.0
"""The prior of the latent variables of an implicit site: its density and its draws."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.distributions.score_parts import ScoreParts
from pyro.distributions.util import sum_rightmost
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import biject_to

from pyro_implicit.density.policy import RUNS
from pyro_implicit.infer.engine.implicit_sites import PARTICLE_PLATE, ImplicitSite
from pyro_implicit.infer.engine.traces import Particles
from pyro_implicit.infer.policy import ELBOS
from pyro_implicit.runtime.sites import is_flat

__all__ = ["PriorMemory", "SitePrior"]


class SitePrior:
    """The prior of the latent variables of one implicit site: its density and its draws.

    Points are in unconstrained space, with all latent variables concatenated in one dimension.

    :param site: the implicit site.
    :param particles: the model at the draws of the latent variables.
    :param model_trace: the trace of its run, with log-probabilities.
    :param memory: what is kept from step to step.
    """

    def __init__(
        self, site: ImplicitSite, particles: Particles, model_trace: Trace, memory: PriorMemory
    ) -> None:
        self.site, self.particles, self.model_trace = site, particles, model_trace
        self.memory = memory
        self._alone: Trace | None = None

    def log_prob(self) -> Tensor:
        """Return the log-density at the draw, without scales and masks: ``site.batch_shape``."""
        shape = self.site.batch_shape
        is_whole = self._is_whole()
        total = torch.zeros(())
        for name in self.site.latents:
            term = self._model_site(name)["unscaled_log_prob"]
            if name != self.site.name:  # a Delta with the change of variables
                delta = self.particles.guide_trace.nodes[name]
                term = term - delta["fn"].log_prob(delta["value"])
            if is_whole:
                batch_ndim = int(self.particles.num_particles > 1)
                term = sum_rightmost(term, term.dim() - batch_ndim)
                term = term.reshape(term.shape + (1,) * (len(shape) - batch_ndim))
            total = total.to(term) + term
        return total.expand(shape)

    def score_parts(self, log_ratio: Tensor) -> ScoreParts:
        r"""Return the site's score parts, given the log-ratio of q to this prior.

        The gradient of :math:`\log q = \log p + \log(q / p)` passes through the draw only, so that
        the gradient of the prior's own parameters does not cancel.

        :param log_ratio: broadcasts to ``site.batch_shape``.
        """
        log_prior, draw = self.log_prob(), self.site.draw
        # The log-determinant leads back from the site's value to that of its distribution.
        entropy_term = log_ratio.expand(log_prior.shape) + self.site.log_abs_det
        log_prob = log_prior.detach() + entropy_term.detach()
        if log_prior.requires_grad and draw.requires_grad:
            (slope,) = torch.autograd.grad(
                log_prior.sum(), draw, retain_graph=True, allow_unused=True
            )
            if slope is not None:
                path = slope * draw
                entropy_term = entropy_term + sum_rightmost(path, path.dim() - log_prior.dim())
        return ScoreParts(log_prob, 0, entropy_term)

    @torch.no_grad()
    def sample(self, num: int) -> Tensor:
        """Draw the latent variables from the prior.

        Priors without parents are sampled directly; others need runs of the model
        that stop after the site's latent variables.

        :returns: ``(*plates, num, m)``, or ``(num_particles, *plates, num, m)`` if the prior
            depends on latent variables of other sites.
        :raises ValueError: for a prior that cannot be sampled, naming the site and the cure.
        """
        self._is_whole()  # raises for sites that the model lacks
        if self.memory.depends is None:
            self._find_parents()
        self._refuse_flat()
        values = self.particles.particle(0)
        if not self.memory.depends:
            draws = {name: self._fn(name).sample((num,)) for name in self.site.latents}
            return self._lay_out(
                {name: draw.reshape((num,) + values[name].shape) for name, draw in draws.items()}
            )
        if not self.memory.on_others or self.particles.num_particles == 1:
            return self._draw(num, values)
        particles = [self.particles.particle(k) for k in range(self.particles.num_particles)]
        return torch.stack([self._draw(num, values) for values in particles])

    def unconstrain(self, values: Tensor) -> Tensor:
        """Map values of the site's implicit distribution to unconstrained space.

        :param values: ``(*batch, *event_shape)``.
        :returns: ``(*batch, m)``.
        """
        values = self.site.push(values)
        event_ndim = self.site.draw.dim() - len(self.site.batch_shape)
        batch = values.shape[: values.dim() - event_ndim]
        if self.site.latents == (self.site.name,):
            values = biject_to(self._fn(self.site.name).support).inv(values)
        return values.reshape(batch + (-1,))

    def _model_site(self, name: str) -> dict[str, Any]:
        try:
            return self.model_trace.nodes[name]
        except KeyError:
            discrete = self.particles.discrete
            if discrete is not None and name in self.site.latents:
                names = ", ".join(f"'{one}'" for one in sorted(discrete.names))
                raise ValueError(
                    f"the prior of site '{name}' depends on the discrete latents {names}, which "
                    "are summed out, so that it has no density. Cure: "
                    'contrast="adaptive"'
                ) from None
            raise ValueError(
                f"site '{self.site.name}' of the guide represents '{name}', which the model does "
                "not sample. Cure: name the model's sites by pyro.sample(..., infer={'latents': "
                "[...]})"
            ) from None

    def _fn(self, name: str) -> Any:
        if self._alone is None:
            self._model_site(name)  # raises for a site that the model lacks
            with torch.enable_grad():
                self._alone = self._up_to_latents(self.particles.particle(0))
        return self._alone.nodes[name]["fn"]

    def _is_whole(self) -> bool:
        """Tell whether one draw has the latent variables of whole plates, as in an autoguide."""
        for name in self.site.latents:
            frames = self._model_site(name)["cond_indep_stack"]
            plates = {frame.name for frame in frames if frame.vectorized} - {PARTICLE_PLATE}
            if plates != self.site.plates:
                if not self.site.plates:
                    return True
                raise ValueError(
                    f"site '{self.site.name}' of the guide is drawn in plates "
                    f"{sorted(self.site.plates)} and '{name}' of the model in {sorted(plates)}, so "
                    'their prior cannot be the contrast. Cure: contrast="adaptive"'
                )
        return False

    def _refuse_flat(self) -> None:
        for name in self.site.latents:
            if is_flat(self._fn(name)):
                raise ValueError(
                    f"the prior of site '{name}' (ImproperUniform) is flat and cannot be sampled. "
                    'Cure: contrast="adaptive", which needs no prior draws'
                )

    def _draw(self, num: int, values: dict[str, Tensor]) -> Tensor:
        try:
            return self._lay_out(self._draw_given(num, values))
        except (ValueError, RuntimeError) as error:
            latents = ", ".join(f"'{name}'" for name in self.site.latents)
            raise ValueError(
                f"the model cannot run at draws of the prior of {latents}: {error}. Cure: a prior "
                'without such draws, or contrast="adaptive", which needs none'
            ) from error

    def _lay_out(self, draws: dict[str, Tensor]) -> Tensor:
        """Arrange constrained draws ``(num, *site_shape)`` as points ``(*plates, num, m)``."""
        parts = []
        for name, draw in draws.items():
            fn = self._fn(name)
            batch_ndim = 1 if self._is_whole() else draw.dim() - fn.event_dim
            free = biject_to(fn.support).inv(draw)
            parts.append(free.reshape(free.shape[:batch_ndim] + (-1,)))
        points = torch.cat(parts, -1).movedim(0, -2)
        plates = self.site.batch_shape[int(self.particles.num_particles > 1) :]
        return points.expand(plates + points.shape[-2:])

    def _up_to_latents(self, fixed: Values, num: int | None = None) -> Trace:
        """Run the model up to the latent variables, and draw (``num`` times) those not fixed."""
        replayed = Trace()
        for name, site in self.particles.replayed.nodes.items():
            if name in fixed or site_is_subsample(site):
                replayed.add_node(name, **{**site, "value": fixed.get(name, site["value"])})
        model = poutine.replay(self.particles.model, trace=replayed)
        with poutine.block():
            if num is not None:
                dim = -self.particles.max_plate_nesting - 1
                model = pyro.plate("_prior_draws", num, dim=dim)(model)
            with poutine.trace() as tracer, _StopAfter(self.site.latents):
                try:
                    model(*self.particles.args, **self.particles.kwargs)
                except _Reached:
                    pass
        return tracer.trace

    def _find_parents(self) -> None:
        """Find out whether the prior depends on latent variables, by moving them."""
        values = self.particles.particle(0)
        trace = self._up_to_latents(values)
        moved = {}
        for name, site in trace.nodes.items():
            if site["type"] == "sample" and name in values:
                transform = biject_to(site["fn"].support)
                free = transform.inv(values[name])
                moved[name] = transform(free + RUNS.nearby * (1 + torch.rand_like(free)))

        def moves_with(names: set[str]) -> bool:
            other = self._up_to_latents({n: (moved if n in names else values)[n] for n in moved})
            densities = [
                [t.nodes[name]["fn"].log_prob(values[name]) for name in self.site.latents]
                for t in (trace, other)
            ]
            return not all(a.equal(b) for a, b in zip(*densities, strict=True))

        self.memory.depends = moves_with(set(moved))
        self.memory.on_others = moves_with(set(moved) - set(self.site.latents))

    def _draw_given(self, num: int, values: Values) -> Values:
        """Return draws ``(num, *site_shape)`` by site, given the other latent variables.

        A model that broadcasts draws in a plate, others draw one at a time. Then most draws are
        kept for the next call, unless the prior has parameters.
        """
        fixed = {n: value for n, value in values.items() if n not in self.site.latents}
        if self.memory.parallel is not False:
            try:
                trace = self._up_to_latents(fixed, num)
                draws = {name: trace.nodes[name]["value"] for name in self.site.latents}
                if self.memory.parallel is None:
                    self.memory.parallel = self._agrees(trace, fixed, values)
            except (RuntimeError, ValueError, IndexError):
                self.memory.parallel = False
            if self.memory.parallel:
                return {n: d.reshape((num,) + values[n].shape) for n, d in draws.items()}
        return self._one_by_one(num, fixed)

    def _agrees(self, trace: Trace, fixed: Values, values: Values) -> bool:
        """Tell whether the last draw in a plate has the prior of a plain run."""
        nodes = {name: trace.nodes[name] for name in self.site.latents}
        last = {}
        for name, node in nodes.items():
            if node["value"][-1].numel() != values[name].numel():
                return False
            last[name] = node["value"][-1].reshape(values[name].shape)
        alone = self._up_to_latents({**fixed, **last})
        for name, node in nodes.items():
            together = node["fn"].log_prob(node["value"])[-1].sum()
            by_itself = alone.nodes[name]["fn"].log_prob(last[name]).sum()
            if not torch.isclose(together, by_itself, rtol=ELBOS.prior_tolerance):
                return False
        return True

    def _one_by_one(self, num: int, fixed: Values) -> Values:
        memory = self.memory
        arguments = [*self.particles.args, *self.particles.kwargs.values()]
        is_same = memory.arguments is None or _same(arguments, memory.arguments)
        pool = memory.pool if is_same and not memory.on_others else {}
        if pool and len(pool[self.site.latents[0]]) != num:
            pool = {}
        renewed = max(1, int(num * ELBOS.renewed_prior_draws))
        traces = [self._up_to_latents(fixed) for _ in range(renewed if pool else num)]
        draws = {}
        for name in self.site.latents:
            new = torch.stack([trace.nodes[name]["value"] for trace in traces])
            draws[name] = torch.cat([new, pool[name]])[:num] if pool else new
        is_learnt = any(site["type"] == "param" for site in traces[0].nodes.values())
        memory.pool, memory.arguments = ({}, []) if is_learnt else (draws, arguments)
        return draws


Values = dict[str, Tensor]


@dataclass
class PriorMemory:
    """Properties of the prior of some latent variables, and a pool of expensive draws.

    ``depends``: its parameters depend on latent variables; ``on_others``: on other ones than these;
    ``parallel``: the model can draw many values at once in a plate.
    """

    depends: bool | None = None
    on_others: bool = False
    parallel: bool | None = None
    pool: Values = field(default_factory=dict)
    arguments: list[Any] | None = field(default_factory=list)

    def __getstate__(self) -> dict[str, Any]:
        # The pool belongs to these arguments; another process uses it with its next ones.
        return {**self.__dict__, "arguments": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> PriorMemory:
        return replace(self, pool=dict(self.pool), arguments=None)


class _Reached(Exception):
    """The model has sampled all requested latent variables."""


class _StopAfter(Messenger):
    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.missing = set(names)

    def _pyro_post_sample(self, msg: Any) -> None:
        self.missing.discard(msg["name"])
        if not self.missing:
            raise _Reached


def _same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))
