# SPDX-License-Identifier: Apache-2.0
"""Draws of any guide in the coordinates of a target, and stored draws as a guide."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro.poutine.indep_messenger import CondIndepStackFrame
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_implicit.density.policy import RUNS
from pyro_implicit.density.target import Target
from pyro_implicit.distributions import IntractableDensityError
from pyro_implicit.guides.posterior_draws import draw, name_of, refuse_missing_sites
from pyro_implicit.runtime.messages import warn_user
from pyro_implicit.runtime.sites import is_latent

__all__ = ["NOWHERE", "Guide", "Sampler", "SitePlates", "StoredDraw", "StoredDraws"]


Guide = Callable[..., Any] | Mapping[str, Tensor]
NOWHERE = "the model's log-density or its gradient is finite at none of"


class Sampler:
    """Draws of a guide, or given draws, as unconstrained vectors of a target.

    The guide is called with the arguments of the target's model.

    **Example:**

    >>> import pyro, pyro.distributions as dist
    >>> from pyro.infer.autoguide import AutoNormal
    >>> def model():
    ...     pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    >>> target = Target(model)
    >>> Sampler(target, AutoNormal(model)).draw(5).shape
    torch.Size([5, 1])
    >>> Sampler(target, {"scale": torch.ones(2)}).draw(3).flatten()
    tensor([0., 0., 0.])

    :param target: the posterior whose coordinates the draws have.
    :param guide: a guide of the same model, or constrained draws by site,
        ``(num_draws, *site_shape)``.
    """

    def __init__(self, target: Target, guide: Guide) -> None:
        self.target = target
        self.guide: Any = guide

    @property
    def num_given(self) -> int | None:
        """The number of given draws; None for a guide."""
        if not isinstance(self.guide, Mapping):
            return None
        self._check(self.guide)
        return len(self.guide[next(iter(self.target.shapes))])

    @property
    def source(self) -> str:
        """The source of the draws, for messages."""
        if isinstance(self.guide, Mapping):
            return "given draws"
        return f"draws of the guide {name_of(self.guide)}"

    @torch.no_grad()
    def draw(self, num_draws: int) -> Tensor:
        """Draw vectors ``(num_draws, latent_dim)``; rows outside of a support are NaN.

        Given draws are taken in turn. If there are fewer than ``num_draws``, some repeat.

        :raises ValueError: if the draws are not of the target's sites, or if every draw lies
            outside of the supports or on their boundary.
        """
        if isinstance(self.guide, Mapping):
            draws = dict(self.guide)
        else:
            draws = draw(self.guide, num_draws, *self.target.args, **self.target.kwargs)
        self._check(draws)
        extra = sorted(set(draws) - set(self.target.shapes))
        if extra:
            warn_user(f"{self._who_has} {extra}, which the model does not sample: left out")
        like = self.target.init_loc
        draws = {name: draws[name].detach().to(like) for name in self.target.shapes}
        vectors = self._unconstrained(draws)
        if not vectors.isfinite().all(-1).any():
            raise ValueError(
                f"{NOWHERE} {len(vectors)} {self.source}: {self._outside(draws, vectors)}. Cure: "
                "finite draws inside of the latents' supports"
            )
        return vectors[torch.arange(num_draws, device=like.device) % len(vectors)]

    def wrong_shape(
        self, name: str, shape: tuple[int | str, ...], wanted: tuple[int, ...]
    ) -> ValueError:
        """Return the error for draws whose shape is not that of the model's site.

        :param name: the site.
        :param shape: the shape of the draws; their number comes first.
        :param wanted: the shape of the model's site.
        """
        needs = f"but the model needs {('num_draws', *wanted)}"
        if not isinstance(self.guide, Mapping):
            return ValueError(
                f"{self._who_has} draws of shape {shape} at site '{name}', {needs}. "
                "Cure: a guide of this model, called with the same data"
            )
        cure = "draws of this model, with the same data"
        if shape == wanted:
            cure = ".unsqueeze(0), if it is a single draw"
        elif shape == (0, *wanted):
            cure = "at least one draw"
        return ValueError(
            f"the given draws of site '{name}' have shape {shape}, {needs}. Cure: {cure}"
        )

    def _check(self, draws: Mapping[str, Tensor]) -> None:
        shapes = self.target.shapes
        what = "draws" if isinstance(self.guide, Mapping) else "a guide"
        refuse_missing_sites(self._who_has, shapes, draws, what)
        expected = self.target.constrain(self.target.init_loc.unsqueeze(0))
        for name in shapes:
            shape, wanted = tuple(draws[name].shape), tuple(expected[name].shape[1:])
            if len(shape) == 0 or shape[1:] != wanted or shape[0] == 0:
                raise self.wrong_shape(name, shape, wanted)
        counts = {name: len(draws[name]) for name in shapes}
        if len(set(counts.values())) > 1:
            found = ", ".join(f"{count} of '{name}'" for name, count in counts.items())
            raise ValueError(
                f"{self._who_has} different numbers of draws by site: {found}. Cure: one joint "
                "draw of all sites in each row"
            )

    @property
    def _who_has(self) -> str:
        if isinstance(self.guide, Mapping):
            return "the given draws have"
        return f"the guide {name_of(self.guide)} has"

    def _unconstrained(self, draws: dict[str, Tensor]) -> Tensor:
        """Vectors; NaN where a transform clamped a draw that lies outside of its support."""
        vectors = self.target.unconstrain(draws)
        back = self.target.constrain(vectors)
        moved = []
        for name, part in self.target.split(vectors).items():
            far = (back[name] - draws[name]).abs() > RUNS.tolerance * (1 + draws[name].abs())
            width = part[0].numel()
            moved.append(far.reshape(len(far), -1).any(-1, keepdim=True).expand(-1, width))
        return vectors.masked_fill(torch.cat(moved, -1) & vectors.isfinite(), math.nan)

    def _outside(self, draws: dict[str, Tensor], vectors: Tensor) -> str:
        clauses = []
        for name, part in self.target.split(vectors).items():
            lost = ~part.isfinite().reshape(len(part), -1).all(-1)
            if not lost.any():
                continue
            value = draws[name][lost]
            where = "outside of its support"
            if not value.isfinite().all():
                where = "not finite"
            elif not part.isnan().any():
                where = "on the boundary of its support"
            if value.isfinite().all() and value.unique().numel() == 1:
                where = f"{value.flatten()[0].item():.3g}, {where}"
            clauses.append(f"those of '{name}' are {where} ({int(lost.sum())} of them)")
        return "; ".join(clauses)


class StoredDraw(dist.Delta):
    """One of the draws, without the density of a Delta, which would give wrong weights."""

    def log_prob(self, x: Tensor) -> Tensor:
        raise IntractableDensityError(
            "stored draws have no density, hence no importance weights and no ELBO. Cure: the "
            "guide that they came from, if it has a density: result.guide of a result of fit, "
            "unless it is an AutoSemiImplicit; to predict by a class of Pyro that computes their "
            "density only to validate it, such as Forecaster, pyro.validation_enabled(False)"
        )


class SitePlates(NamedTuple):
    """The plates of a site, and the number of dimensions of its events."""

    event_dim: int
    frames: tuple[CondIndepStackFrame, ...]

    @staticmethod
    def of(trace: Trace) -> dict[str, SitePlates]:
        """Return the plates of the latent variables in a model's trace, by site."""
        return {
            name: SitePlates(
                site["fn"].event_dim,
                tuple(frame for frame in site["cond_indep_stack"] if frame.vectorized),
            )
            for name, site in trace.nodes.items()
            if is_latent(site)
        }


class StoredDraws:
    """A guide of stored draws: of chains, particles or another library.

    Each call selects one draw for all sites, so that ``Predictive`` and
    :func:`~pyro_implicit.diagnose` accept it as a guide. Inside plates that are not the model's, as
    in ``Predictive(parallel=True)``, each of their elements has its own draw. It has no density: an
    ELBO or Pyro's ``WeighedPredictive`` raises an
    :class:`~pyro_implicit.distributions.IntractableDensityError`.

    **Example:**

    >>> guide = StoredDraws({"x": torch.arange(4.0)})
    >>> guide.sample_posterior(4)["x"].sort().values
    tensor([0., 1., 2., 3.])
    >>> guide()["x"].shape
    torch.Size([])

    :param samples: constrained values by site, ``(num_draws, *site_shape)``.
    :param settled: whether converged chains or reliable importance weights support the draws, which
        can then be trusted without a density.
    :param modes_weighed: whether separate modes have their correct shares of the draws.
    :param doubts: known problems of the chains, each in a few words.
    :param drift: the :class:`~pyro_implicit.mcmc.stopping.Drift` of the chains, from which
        :func:`~pyro_implicit.diagnose` judges chains that have not converged.
    :param num_independent: the number of independent draws that they are worth; by default all.
    :param num_chains: the number of chains, whose draws follow each other; 1 if unknown.
    :param plates: the plates of the sites in the model, by site. Draws of sites without them cannot
        be made inside plates.
    :raises ValueError: for no draws, or sites with different numbers of draws; when called inside a
        plate, for sites of unknown plates.
    """

    def __init__(
        self,
        samples: Mapping[str, Tensor],
        settled: bool = False,
        modes_weighed: bool = False,
        doubts: Sequence[str] = (),
        drift: Any = None,
        num_independent: float = math.inf,
        num_chains: int = 1,
        plates: Mapping[str, SitePlates] | None = None,
    ) -> None:
        lengths = {len(value) for value in samples.values()}
        if len(lengths) != 1 or lengths == {0}:
            found = {name: len(value) for name, value in samples.items()}
            raise ValueError(
                f"all sites must have the same number of draws, at least one, but got {found}. "
                "Cure: a dict of tensors (num_draws, *site_shape), as MCMC.get_samples() gives it"
            )
        self.samples, self.settled, self.modes_weighed = dict(samples), settled, modes_weighed
        self.doubts, self.drift = tuple(doubts), drift
        self.num_draws = lengths.pop()
        self.num_independent = int(min(self.num_draws, num_independent))
        self.num_chains = num_chains
        self.plates = dict(plates or {})

    def __repr__(self) -> str:
        return f"StoredDraws({self.num_draws} draws of {', '.join(self.samples)})"

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Select one draw, or one for each element of the plates around the call.

        The model's arguments are ignored.
        """
        infer = {"is_auxiliary": True}
        place = pyro.sample("_StoredDraws_place", dist.Uniform(0.0, 1.0), infer=infer)
        index = (place * self.num_draws).long().clamp(max=self.num_draws - 1).cpu()
        made: dict[str, pyro.plate] = {}
        values = {}
        for name, samples in self.samples.items():
            value, plates = self._select(name, samples, index)
            with ExitStack() as stack:
                for frame in plates.frames:
                    if frame.name not in made:
                        size = value.shape[frame.dim - plates.event_dim]
                        made[frame.name] = pyro.plate(frame.name, size, dim=frame.dim)
                    stack.enter_context(made[frame.name])
                values[name] = pyro.sample(name, StoredDraw(value, event_dim=plates.event_dim))
        return values

    def _select(self, name: str, samples: Tensor, index: Tensor) -> tuple[Tensor, SitePlates]:
        """Return draws with the dimensions of the plates of ``index`` on the left."""
        plates = self.plates.get(name)
        if plates is None and index.dim():
            raise ValueError(
                f"the draws of site '{name}' cannot be selected inside a plate, as its plates in "
                "the model are not known. Cure: result.posterior of a result of fit, or draws "
                "outside of the plate, as by Predictive(parallel=False)"
            )
        if plates is None:
            return samples[index], SitePlates(samples.dim() - 1, ())
        num_inner = samples.dim() - 1 - plates.event_dim
        outer = index.shape[: max(0, index.dim() - num_inner)]
        if index.shape[len(outer) :].numel() > 1:
            raise ValueError(
                f"a plate around the guide has the dimension of a plate of site '{name}'. Cure: "
                f"dim={-1 - num_inner} or further to the left"
            )
        return samples[index.reshape(outer)], plates

    def sample_posterior(self, num_samples: int, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Select draws in random order, without replacement until all are used.

        Fewer draws than there are, are evenly spaced, because neighbours of a chain are correlated.

        :param num_samples: number of draws.
        :returns: by site, ``(num_samples, *site_shape)``.
        """
        rounds, rest = divmod(num_samples, self.num_draws)
        places = (torch.arange(rest) + torch.rand(())) * (self.num_draws / max(rest, 1))
        spaced = places.long().clamp(max=self.num_draws - 1)
        index = [torch.randperm(self.num_draws) for _ in range(rounds)]
        chosen = torch.cat([*index, spaced[torch.randperm(rest)]])
        return {name: value[chosen] for name, value in self.samples.items()}
