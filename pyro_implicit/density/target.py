# SPDX-License-Identifier: Apache-2.0
"""A model's log-density as a function of its unconstrained latent variables."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, TypeVar

import pyro
import torch
from pyro import poutine
from pyro.distributions import Unit
from pyro.distributions.util import sum_rightmost
from pyro.infer.autoguide import init_to_median, init_to_sample
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import prune_subsample_sites, site_is_subsample
from torch import Tensor
from torch.distributions import biject_to, constraints

from pyro_implicit.density.batched_runs import BatchedRuns
from pyro_implicit.density.bijections import on_one_turn, turns_of, with_small_shares
from pyro_implicit.density.checks import (
    refuse_moving_sites,
    refuse_moving_supports,
    refuse_unfit_sites,
)
from pyro_implicit.density.checks.observations import (
    explain,
    refuse_missing_data,
    warn_of_missing_data,
)
from pyro_implicit.density.cost import FusedDensity, nearby, seconds_near, suits_one_thread
from pyro_implicit.density.discrete import (
    Elements,
    SizeLimit,
    coordinates_of,
    elements_of,
    refuse_coupled,
    refuse_improper_prior,
    sites_to_sample,
    with_values,
)
from pyro_implicit.density.model import (
    IMPOSSIBLE,
    DiscreteSum,
    Model,
    SubsampledError,
    compute_log_prob,
    converted,
    refuse_subsampling,
    restore_priors,
    subsampled_plate,
    total_log_prob,
    varying_site,
)
from pyro_implicit.density.policy import MAX_DENSE_DIM, ROUNDING, RUNS, SEARCH
from pyro_implicit.density.run_mode import RunMode
from pyro_implicit.ops.ensemble_hmc import score_of
from pyro_implicit.ops.jacobian import hessian_products
from pyro_implicit.runtime.messages import first_line
from pyro_implicit.runtime.sites import (
    FlatPriorStart,
    Site,
    example_tensor,
    innermost,
    innermost_support,
    is_data,
    is_discrete_latent,
    is_flat,
    is_latent,
    joined_parts,
    site_parts,
    unplated_dims,
    without_sequential_plates,
)

__all__ = ["Target"]

T = TypeVar("T")


class Target:
    r"""The posterior of a model as an unnormalised log-density on :math:`R^d`.

    With u the unconstrained coordinates of the latent variables and :math:`\theta(u)` their values,

    .. math:: \log p(x, \theta(u)) + \log |\det \theta'(u)|.

    All sites lie in one vector, in the order in which the model samples them, as in Pyro's
    :class:`~pyro.infer.autoguide.AutoContinuous`. Many vectors are evaluated at once, by
    ``torch.func.vmap``, or one after the other if ``vmap`` cannot run the model.

    **Example:**

    >>> import pyro.distributions as dist
    >>> def model():
    ...     pyro.sample("x", dist.LogNormal(0.0, 1.0))
    >>> target = Target(model)
    >>> target.log_prob(torch.zeros(3, 1))
    tensor([-0.9189, -0.9189, -0.9189])

    :param model: a model of fixed structure, with all its data: nothing is subsampled (see
        :meth:`of_minibatches`). Discrete latent variables that Pyro can enumerate are summed out,
        as in Pyro's NUTS.
    :param args: positional arguments of the model; ``kwargs`` are keyword arguments.
    :param init_loc_fn: determines ``init_loc``, see Pyro's :ref:`autoguide-initialization`. Flat
        priors that it cannot initialise get 0. If the model raises an error there, ``init_loc`` is
        a draw of the prior.
    :param model_kwargs: more keyword arguments of the model, whatever their names.
    :param sample_discrete: whether discrete latent variables get coordinates if Pyro cannot
        enumerate them, their joint enumeration is too large, or all latent variables are discrete.
        These coordinates are integers, the last of the vector (``discrete_dim`` of them), and have
        the gradient 0.
    :raises SubsampledError: for a subsampled plate.
    :raises ValueError: for a discrete latent variable that cannot be summed out (or sampled, with
        ``sample_discrete``), one whose support changes with others, one that only some runs of the
        model have (as far as the first runs tell), or an observation that broadcasting repeats, or
        that is NaN or outside its support.
    :raises RuntimeError: for a model without latent variables, or without continuous ones.
    :raises TypeError: for an observation of a type for which its distribution has no density, and
        for a model that cannot run on the NumPy arrays or lists that it is given.
    :warns UserWarning: for latent variables whose elements are masked, and if observations
        seem to be missing.
    """

    #: Whether a minibatch may have latents of single rows; None refuses minibatches.
    _allow_local: bool | None = None

    def __init__(
        self,
        model: Callable[..., Any],
        *args: Any,
        init_loc_fn: Callable[[dict[str, Any]], Tensor] = init_to_median,
        model_kwargs: dict[str, Any] | None = None,
        sample_discrete: bool = False,
        **kwargs: Any,
    ) -> None:
        kwargs = {**kwargs, **(model_kwargs or {})}
        self.model, self.args, self.kwargs = model, args, kwargs
        #: Name, rows in the first minibatch, and rows in total of the subsampled plate, if any.
        self.subsampled: tuple[str, int, int] | None = None
        #: Whether the model scales the likelihood of its minibatch.
        self.scaled = False
        #: Whether the model draws the rows of its minibatch itself.
        self.draws_rows = False
        self._seed = 0
        self._like = example_tensor(model, args, kwargs)
        trace = self._first_run(init_loc_fn)
        #: By site, the middle of the turn in which its angles lie.
        self.turns: dict[str, Tensor] = turns_of(trace)
        if self.turns:
            model = self.model = on_one_turn(model, self.turns)
            trace = self._first_run(init_loc_fn)
        if self._allow_local is None:
            refuse_subsampling(trace, "the log-density")
        else:
            self._read_subsampling(trace, self._allow_local)
        sampled = sites_to_sample(trace) if sample_discrete else frozenset[str]()
        refuse_unfit_sites(trace, sampled)
        discrete = DiscreteSum.of(trace, given=sampled)
        #: Why discrete latent variables that Pyro can enumerate are not summed out; else empty.
        self.unsummed = ""
        if discrete is not None and sample_discrete:
            self.unsummed = self._why_not_summed(discrete)
            if self.unsummed:
                sampled, discrete = sampled | discrete.names, None
        #: Batch dimensions outside of plates, by site.
        self.unplated = unplated_dims(trace)
        warn_of_missing_data(model, trace, args, kwargs)
        #: By site, the shape of its unconstrained coordinates.
        self.shapes: dict[str, torch.Size] = {}
        #: By site, the bijection from unconstrained coordinates to values.
        self.transforms: dict[str, Any] = {}
        latents, parts = Trace(), []
        names = [name for name, site in trace.nodes.items() if is_latent(site)]
        for name in sorted(names, key=sampled.__contains__):  # the discrete ones last
            site = trace.nodes[name]
            if is_discrete_latent(site) and name not in sampled:
                continue
            latents.add_node(name, **site)
            if name in sampled:
                self.transforms[name] = coordinates_of(name, site)
            else:
                self.transforms[name] = with_small_shares(biject_to(site["fn"].support))
            part = self.transforms[name].inv(site["value"].detach())
            self.shapes[name] = part.shape
            parts.append(part.reshape(-1))
        self.init_loc: Tensor = torch.cat(parts)
        self.latent_dim: int = len(self.init_loc)
        #: The discrete latent variables that have coordinates.
        self.sampled: tuple[str, ...] = tuple(name for name in self.shapes if name in sampled)
        #: Those of them that Pyro cannot enumerate.
        self.not_enumerable: tuple[str, ...] = tuple(
            name for name in self.sampled if not trace.nodes[name]["fn"].has_enumerate_support
        )
        #: Number of their coordinates, the last of the vector.
        self.discrete_dim: int = sum(self.shapes[name].numel() for name in self.sampled)
        #: The observed sites of the first run; None if runs may have others.
        self._observed: set[str] | None = _observed(trace)
        #: The discrete latent variables that are summed out.
        self.summed_out: frozenset[str] = frozenset() if discrete is None else discrete.names
        self._model = Model(model, args, kwargs, latents, discrete)
        self._runs = BatchedRuns(type(self).__name__, refuses_random=self._allow_local is None)
        #: Runs models with long loops; other minibatches would need other recordings.
        self._fused: FusedDensity | None = None
        if self._allow_local is None and not sampled:
            self._fused = FusedDensity(self._by_model, self._of_one)
        if discrete is not None and not sample_discrete:
            self._try(discrete)
        refuse_moving_supports(model, args, kwargs, latents)
        #: Bounds of the discrete elements.
        self.elements: Elements | None = self._elements_of(trace) if sampled else None

    @classmethod
    def of_minibatches(
        cls,
        model: Callable[..., Any],
        *args: Any,
        batch: tuple,
        allow_local: bool = False,
        init_loc_fn: Callable[[dict[str, Any]], Tensor] = init_to_median,
        model_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Target:
        r"""Build the log-density of a model that is given, or draws, one minibatch at a time.

        With B of N rows, and the likelihood scaled by the model's own plate, it is

        .. math:: \log p(\theta(u)) + \frac NB \sum_{i \in \text{batch}} \log p(x_i | \theta(u))
            + \log |\det \theta'(u)|,

        whose mean over random minibatches is the log-density of all data. :meth:`on` gives the
        same posterior with another minibatch.

        **Example:**

        >>> import pyro
        >>> import pyro.distributions as dist
        >>> def model(y):
        ...     x = pyro.sample("x", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("rows", 100, subsample_size=len(y)):
        ...         pyro.sample("y", dist.Normal(x, 1.0), obs=y)
        >>> target = Target.of_minibatches(model, batch=(torch.zeros(5),))
        >>> target.on((torch.ones(5),)).score(torch.zeros(1, 1))[1]
        tensor([[100.]])

        :param model: a model of continuous latent variables and fixed structure that scales the
            likelihood of a minibatch to all data. It may draw random numbers of its own. Discrete
            latent variables, also of single rows, are summed out.
        :param args: the first positional arguments of the model, which all minibatches share.
        :param batch: the further positional arguments of the model: one minibatch.
        :param allow_local: whether latent variables may belong to single rows. The log-density is
            then that of the latent variables of one minibatch.
        :param init_loc_fn: as in the constructor.
        :param model_kwargs: as in the constructor, as ``kwargs``.
        :raises SubsampledError: for a continuous latent variable in a subsampled plate, unless
            ``allow_local``. Other errors are those of the constructor.
        """
        target = cls.__new__(cls)
        target._allow_local = allow_local
        kwargs = {**kwargs, **(model_kwargs or {})}
        cls.__init__(target, model, *args, *batch, init_loc_fn=init_loc_fn, model_kwargs=kwargs)
        return target

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.latent_dim} latents of {', '.join(self.shapes)})"

    def _first_run(self, init_loc_fn: Callable[[dict[str, Any]], Tensor]) -> Trace:
        first_error = None
        for init in (init_loc_fn, *(init_to_sample,) * RUNS.max_retries):
            start = FlatPriorStart(init, like=self._like)
            try:
                with (
                    poutine.block(),
                    InitMessenger(start),
                    poutine.block(hide_fn=_is_drawn),
                ):
                    model = poutine.trace(without_sequential_plates(self.model))
                    return restore_priors(model.get_trace(*self.args, **self.kwargs))
            except Exception as error:
                first_error = first_error or error
        assert first_error is not None
        found = explain(first_error, self.model, self.args, self.kwargs)
        raise found from (None if found is first_error else first_error)

    def _read_subsampling(self, trace: Trace, allow_local: bool) -> None:
        """Read how the model subsamples and scales its data; refuse latents of single rows."""
        for name, site in trace.nodes.items():
            if site["type"] != "sample":
                continue
            if site_is_subsample(site):
                self.draws_rows |= len(site["value"]) < site["fn"].size
            elif not site["is_observed"]:
                if not allow_local and not is_discrete_latent(site):
                    _refuse_local(name, site)
            elif is_data(site):
                scale = torch.as_tensor(site["scale"])
                # A factor of data may scale itself.
                is_factor = isinstance(site["fn"], Unit) and not site["infer"].get("is_prior")
                self.scaled |= is_factor or bool((scale != 1).any())
                frame = subsampled_plate(site)
                if frame is not None:
                    self.subsampled = (frame.name, frame.size, frame.full_size)

    def _why_not_summed(self, discrete: DiscreteSum) -> str:
        """Return why an enumerated run fails, is wrong, or too large; empty if it is none."""
        try:
            with poutine.block(), pyro.validation_enabled(False), torch.no_grad():
                with SizeLimit() as plain:
                    trace = self._possible_run()
                model = poutine.replay(
                    discrete.enumerate(self.model),
                    trace=with_values(trace, dict.fromkeys(discrete.names)),
                )
                with SizeLimit.beyond(plain.largest):
                    found = poutine.trace(model).get_trace(*self.args, **self.kwargs)
                    discrete.collapse(found)
            self._refuse_coupled(discrete)
        except Exception as error:
            return first_line(error)
        return ""

    def _possible_run(self) -> Trace:
        """Return a plain run at a draw of the prior, with log-probabilities."""
        for attempt in range(RUNS.max_retries + 1):
            try:
                trace = self._prior_run()
                compute_log_prob(trace)
                break
            except IMPOSSIBLE:  # at a draw of the prior
                if attempt == RUNS.max_retries:
                    raise
        return trace

    def _refuse_coupled(self, discrete: DiscreteSum) -> None:
        trace = None
        with suppress(*IMPOSSIBLE), poutine.block(), pyro.validation_enabled(False):
            with torch.no_grad():
                trace = self._possible_run()
        if trace is not None:
            refuse_coupled(self.model, self.args, self.kwargs, trace, discrete.names)

    def _elements_of(self, first: Trace) -> Elements:
        others = []
        for _ in range(RUNS.num_compared_runs):
            with suppress(*IMPOSSIBLE):  # at draws of the prior
                others.append(self._prior_run())
        refuse_moving_sites(first, others, self.sampled)
        return elements_of([first, *others], self.sampled, self.init_loc)

    def _try(self, discrete: DiscreteSum) -> None:
        """Enumerate the discrete latents once, where a plain run of the model is known to work."""
        try:
            with poutine.block(), pyro.validation_enabled(False):
                self._model.run(self.constrain(self.init_loc))
        except Exception as error:
            names = ", ".join(f"'{name}'" for name in sorted(discrete.names))
            raise ValueError(
                f"the discrete latents {names} cannot be summed out, as the model raises "
                f"{first_line(error)}. Cure: write it so that it "
                "broadcasts over all their values at once (pyro.ops.indexing.Vindex, no branches), "
                "see Pyro's tutorial on enumeration"
            ) from error
        self._refuse_coupled(discrete)

    def on(self, batch: tuple, seed: int | None = None) -> Target:
        """Return the same posterior with another minibatch.

        :param batch: the last positional arguments of the model.
        :param seed: of the rows that a model draws itself; by default a random one.
        """
        target = copy.copy(self)
        target.args = (*self.args[: len(self.args) - len(batch)], *batch)
        target._use(self._model.on(target.args, self.shapes))
        if self.draws_rows:
            target._seed = int(torch.randint(2**31, ())) if seed is None else seed
        return target

    def in_double(self) -> Target:
        """Return the same posterior with its arguments, and its initial point, in float64."""
        target, model = copy.copy(self), self._model.in_double()
        target._use(model)
        target.args, target.kwargs = model.args, model.kwargs
        target.init_loc = self.init_loc.double()
        target._runs = copy.copy(self._runs)  # the conversion may fail
        return target

    def _use(self, model: Model) -> None:
        """Evaluate another model; a recording holds the data of the earlier one."""
        self._model = model
        if self._fused is not None:
            self._fused = FusedDensity(self._by_model, self._of_one)

    def refuse_missing_data(self, where: str) -> None:
        """Check that no observation of this minibatch is NaN.

        :param where: which minibatch it is, for the message.
        :raises ValueError: naming the site.
        """
        refuse_missing_data(self.trace_at(self.init_loc), f" in {where}")

    @property
    def groups(self) -> list[list[str]]:
        """The sites in model order, those of one loop together.

        Sites of one loop have names that differ in numbers only, as ``theta_0`` and ``theta_1``,
        one family and one shape.
        """
        found: dict[Any, list[str]] = {}
        for name, shape in self.shapes.items():
            family = type(innermost(self._model.replayed.nodes[name]["fn"]))
            found.setdefault((re.sub(r"\d+", "#", name), family, shape), []).append(name)
        return list(found.values())

    def refuse_improper(self) -> None:
        """Check that flat priors have data: each element, and each direction of a few elements,
        must change the density.

        :raises ValueError: naming the sites.
        """
        sites = self._model.replayed.nodes
        flat = [name for name in self.shapes if is_flat(sites[name]["fn"])]
        if not flat or self._allow_local is not None:
            return
        if self.latent_dim <= MAX_DENSE_DIM:
            found = self.split(self._endless(flat) != 0)
            names = ", ".join(f"'{name}'" for name in flat if found[name].any())
            if names:
                raise ValueError(
                    f"the posterior is improper, as far as {self.init_loc.dtype} can tell: the "
                    f"log-density does not fall along a direction of {names}, which have flat "
                    "priors. Cure: proper priors; or fewer latents, for instance one intercept "
                    "instead of two"
                )
        points = nearby(self.init_loc, 2).requires_grad_()
        try:
            with torch.enable_grad():
                density = self._by_model(points) - self.log_det(points)
                (score,) = torch.autograd.grad(density.sum(), points)
        except Exception:  # the model has no gradient there
            return
        unmoved = self.split((score == 0).all(0) & density.isfinite().all())
        for name in flat:
            support = innermost(sites[name]["fn"]).support
            number = int(unmoved[name].sum())
            if number and _is_unbounded(innermost_support(support)):
                raise ValueError(
                    f"the posterior is improper: {number} of {unmoved[name].numel()} elements of "
                    f"site '{name}' have a flat prior, and neither data nor other sites depend on "
                    "them. Cure: a proper prior; or leave these elements out, for instance the "
                    "islands of a lattice"
                )

    def _endless(self, flat: list[str]) -> Tensor:
        """Return a direction of several elements of flat priors along which the density does not
        fall.

        It is that of the smallest curvature at ``init_loc``, in conditional standard deviations,
        followed until rounding would bend it; zeros, if the density falls.
        """
        at, index = self.init_loc, self.split(torch.arange(self.latent_dim))
        columns, reach = torch.cat([index[name].flatten() for name in flat]), torch.zeros_like(at)
        resolution = torch.finfo(at.dtype).eps ** 0.5
        try:
            log_prob, _, hessian = self.derivatives(at.unsqueeze(0))
            block = -hessian[0][columns][:, columns]
            scale = block.diagonal().rsqrt()  # NaN if the density is not concave there
            vector = torch.linalg.eigh(scale.unsqueeze(-1) * block * scale).eigenvectors[:, 0]
            reach[columns] = scale * vector / resolution
            change = self.log_prob(torch.stack([at + reach, at - reach])) - log_prob
        except Exception:  # the model has no second derivative there
            return torch.zeros_like(at)
        reach[columns] *= vector.abs() > resolution
        is_endless = (change.abs() < ROUNDING.max_error).all() and reach.count_nonzero() > 1
        return reach if is_endless else torch.zeros_like(at)

    def _refuse_varying(self, trace: Trace) -> None:
        found = {name for name, site in trace.nodes.items() if is_latent(site)}
        varying = found.difference(self.shapes)
        if self._model.discrete is None:
            varying |= self.shapes.keys() - found
        else:  # a sum may have replaced those that depend on it
            varying -= self._model.discrete.names
        for name in sorted(varying):
            raise varying_site(name)

    # Coordinates

    def split(self, latent: Tensor) -> dict[str, Tensor]:
        """Return the part of each site, ``(*batch, *unconstrained_shape)``.

        :param latent: ``(*batch, latent_dim)``.
        """
        return site_parts(latent, self.shapes)

    def constrain(self, latent: Tensor) -> dict[str, Tensor]:
        """Return the values of all sites.

        :param latent: ``(*batch, latent_dim)``.
        :returns: by site, ``(*batch, *site_shape)``.
        """
        return {name: self.transforms[name](part) for name, part in self.split(latent).items()}

    def unconstrain(self, draws: dict[str, Tensor]) -> Tensor:
        """Return the unconstrained vectors of draws.

        :param draws: by site, ``(num_draws, *site_shape)``; further sites are ignored.
        :returns: ``(num_draws, latent_dim)``.
        """
        return joined_parts(self.transforms[name].inv(draws[name]) for name in self.shapes)

    # Log-density and derivatives

    def log_prob(self, latent: Tensor) -> Tensor:
        """Return the log-density, differentiable.

        It is -inf, with gradient 0, where the model raises an error or its log-density is NaN, for
        instance for a covariance without a Cholesky factor.

        :param latent: ``(num_draws, latent_dim)``.
        :returns: ``(num_draws,)``, of the dtype of ``latent``.
        :raises ValueError: for a latent variable that only some runs of the model have, and at the
            first call for a model that is random beyond its latent variables.
        """
        if not self.draws_rows:
            return self._log_prob(latent)
        outside = torch.get_rng_state()
        torch.default_generator.manual_seed(self._seed)  # of the CPU alone, where plates draw
        try:
            return self._log_prob(latent)
        finally:
            torch.set_rng_state(outside)

    def _log_prob(self, latent: Tensor) -> Tensor:
        if len(latent) == 0:
            return latent.sum(-1)
        impossible = torch.zeros(len(latent), dtype=torch.bool, device=latent.device)
        if latent.requires_grad:
            # A tensor of its own, as another gradient may pass through the same vectors.
            latent = latent.view_as(latent)
            latent.register_hook(
                lambda grad: grad if grad is None else grad.masked_fill(impossible[:, None], 0.0)
            )
        is_vectorized = self._runs.checked and self._runs.mode == "vmap"
        evaluate = (is_vectorized and self._fused) or self._by_model
        log_prob = evaluate(latent)
        log_prob = log_prob.to(latent.dtype)  # the data may be of another
        impossible |= ~log_prob.detach().isfinite()
        if not log_prob.requires_grad:  # every run raised an error
            log_prob = log_prob + 0 * latent.nan_to_num().sum(-1)
        return log_prob.masked_fill(log_prob.isnan(), -math.inf)

    def log_prob_by_site(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the log-density, differentiable, at coordinates that are given by site.

        A gradient by some sites then does not pass through functions of the others, such as the
        factor of their covariance.

        **Example:**

        >>> import pyro.distributions as dist
        >>> def model():
        ...     scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        ...     pyro.sample("x", dist.Normal(0.0, scale))
        >>> Target(model).log_prob_by_site({"scale": torch.zeros(2), "x": torch.ones(2)})
        tensor([-2.3379, -2.3379])

        :param parts: by site, ``(num_draws, *unconstrained_shape)``.
        :returns: ``(num_draws,)``, as :meth:`log_prob`; but gradients may be NaN where it is -inf.
        """
        ordered = {name: parts[name] for name in self.shapes}
        if self._fused is not None and self._fused.refusal is None:
            flat = [part.reshape(len(part), -1) for part in ordered.values()]
            return self.log_prob(torch.cat(flat, -1))
        log_prob = self._by_parts(ordered)
        return log_prob.masked_fill(log_prob.isnan(), -math.inf)

    def _by_model(self, latent: Tensor) -> Tensor:
        return self._by_parts(self.split(latent))

    def _by_parts(self, parts: Mapping[str, Tensor]) -> Tensor:
        def total(trace: Trace) -> Tensor:
            return self._terms_of(trace).sum() if self.sampled else total_log_prob(trace)

        values, log_det = self._values(parts)
        return self._map(values, total, otherwise=log_det.new_full((), -math.inf)) + log_det

    def terms(self, latent: Tensor) -> Tensor:
        """Return the log-density term by term: an element of a site's log-density each.

        The log-determinants of the bijections are left out, because discrete latent variables,
        which need the terms, do not change them. Where the model raises an error all terms are NaN.

        **Example:**

        >>> import pyro.distributions as dist
        >>> def model():
        ...     with pyro.plate("rows", 2):
        ...         n = pyro.sample("n", dist.Poisson(1.0))
        ...     pyro.sample("y", dist.Normal(n.sum(-1), 1.0), obs=torch.tensor(0.0))
        >>> Target(model, sample_discrete=True).terms(torch.tensor([[1.0, 0.0]]))
        tensor([[-1.0000, -1.0000, -1.4189]])

        :param latent: ``(num_draws, latent_dim)``.
        :returns: ``(num_draws, num_terms)``.
        """
        return self._map(self.constrain(latent), self._terms_of)

    def log_det(self, latent: Tensor) -> Tensor:
        """Return the log-determinants of the bijections, ``(num_draws,)``.

        **Example:**

        >>> import pyro.distributions as dist
        >>> def model():
        ...     pyro.sample("x", dist.LogNormal(0.0, 1.0).expand([2]).to_event(1))
        >>> Target(model).log_det(torch.tensor([[1.0, 0.5]]))
        tensor([1.5000])

        :param latent: ``(num_draws, latent_dim)``.
        """
        return self._values(self.split(latent))[1]

    def sites_of_terms(self) -> list[str]:
        """Return the name of the site of each of the :meth:`terms`.

        **Example:**

        >>> import pyro.distributions as dist
        >>> def model():
        ...     n = pyro.sample("n", dist.Poisson(1.0))
        ...     pyro.sample("y", dist.Normal(n, 1.0), obs=torch.zeros(2))
        >>> Target(model, sample_discrete=True).sites_of_terms()
        ['n', 'y', 'y']
        """
        found = self.read(self.init_loc.unsqueeze(0), self._parts_of)
        return [name for name, part in found.items() for _ in range(part.shape[-1])]

    def terms_at(self, values: dict[str, Tensor], names: Collection[str]) -> Tensor:
        """Return the terms of some sites at one point, for transformations of ``torch.func``.

        **Example:**

        >>> import pyro.distributions as dist
        >>> def model():
        ...     pyro.sample("n", dist.Poisson(1.0))
        >>> target = Target(model, sample_discrete=True)
        >>> torch.func.vmap(lambda n: target.terms_at({"n": n}, ["n"]))(torch.arange(2.0))
        tensor([[-1.],
                [-1.]])

        :param values: by site, of all latent variables.
        :param names: of the sites.
        :returns: ``(num_terms,)``.
        """
        with poutine.block(), pyro.validation_enabled(False), RunMode():
            trace = prune_subsample_sites(self._model.run(values))
            for name in [name for name in trace.nodes if name not in names]:
                trace.remove_node(name)
            return self._terms_of(trace)

    def _parts_of(self, trace: Trace) -> dict[str, Tensor]:
        compute_log_prob(trace)
        parts = {}
        for name, site in trace.nodes.items():
            if site["type"] == "sample":
                part = torch.as_tensor(site["log_prob"])
                if name in self.sampled:  # without validation, some densities go on outside
                    part = part.masked_fill(~site["fn"].support.check(site["value"]), -math.inf)
                parts[name] = part.reshape(-1)
        return parts

    def _terms_of(self, trace: Trace) -> Tensor:
        return torch.cat([*self._parts_of(trace).values()])

    def _of_one(self, latent: Tensor) -> Tensor:
        values, log_det = self._values(self.split(latent))
        with poutine.block(), pyro.validation_enabled(False), RunMode():
            return total_log_prob(prune_subsample_sites(self._model.run(values))) + log_det

    def _values(self, parts: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        values: dict[str, Tensor] = {}
        log_det: Any = 0.0
        for name, part in parts.items():
            transform = self.transforms[name]
            if self.is_wide:  # before the bijection, which loses digits near a bound
                part = part.double()
            values[name] = transform(part)
            term = transform.log_abs_det_jacobian(part, values[name])
            num_batch = part.dim() - len(self.shapes[name])
            log_det = log_det + sum_rightmost(term, term.dim() - num_batch)
        return values, log_det

    def score(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-density and its gradient, constants.

        :param latent: ``(num_draws, latent_dim)``.
        :returns: ``(num_draws,)`` and ``(num_draws, latent_dim)``.
        """
        return score_of(self.log_prob)(latent)

    def widen(self, points: Tensor) -> bool:
        """Evaluate the model in double precision from now on, if it can.

        Coordinates and results keep their dtype. Arguments of the model are converted; data that it
        closes over are not, so that a matrix product with them fails, for instance.

        **Example:**

        >>> import pyro
        >>> import pyro.distributions as dist
        >>> def model(y):
        ...     rate = pyro.sample("rate", dist.LogNormal(0.0, 5.0))
        ...     pyro.sample("y", dist.Poisson(rate), obs=y)
        >>> target = Target(model, torch.tensor(1e6))
        >>> target.widen(torch.zeros(1, 1)), target.log_prob(torch.zeros(1, 1)).dtype
        (True, torch.float32)

        :param points: where the log-density must stay finite, ``(num_points, latent_dim)``.
        :returns: whether it does; otherwise nothing changes.
        """
        if self._model.is_wide or points.dtype == torch.float64:
            return False
        wide = self.in_double()
        with torch.no_grad():
            before = self.log_prob(points)
            try:
                found = wide.log_prob(points)
            except Exception:  # of a model that mixes dtypes
                return False
        if not found[before.isfinite()].isfinite().all():
            return False
        self._use(wide._model)
        self._runs = wide._runs
        return True

    @property
    def is_wide(self) -> bool:
        """Whether the model runs in double precision whatever the coordinates; see ``widen``."""
        return self._model.is_wide

    def seconds(self, num_points: int = 1) -> float:
        """Return the estimated seconds of one core for the score of so many points.

        It counts operations and their sizes, so that it is reproducible.

        :param num_points: evaluated at once, near ``init_loc``.
        """
        return self._seconds(num_points)

    @cached_property
    def _seconds(self) -> Callable[[int], float]:
        return seconds_near(self.score, self.init_loc, not self.is_vectorized)

    @cached_property
    def is_small(self) -> bool:
        """Whether its operations are too small to be divided between threads.

        With more than 100 latent variables, or if the model fails near ``init_loc``, it is unknown,
        and the result is False.
        """
        if self.latent_dim > MAX_DENSE_DIM:
            return False
        try:
            return not self.is_vectorized or suits_one_thread(self.score, self.init_loc)
        except Exception:  # of the model; the search has other points
            return False

    @property
    def is_vectorized(self) -> bool:
        """True if ``torch.func.vmap`` runs the model, as tried near ``init_loc``."""
        if not self._runs.checked:
            with torch.no_grad():  # at two points, as a single one has a truth value
                self.log_prob(torch.stack([self.init_loc, self.init_loc + 0.01]))
        return self._runs.mode == "vmap"

    @property
    def error(self) -> Exception | None:
        """Last error that the model raised where the log-density is -inf."""
        return self._runs.error

    def derivatives(self, latent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the log-density with its first and second derivative, constants.

        Second derivatives that are NaN, as torch's of ``0 ** x``, are replaced by differences of
        the first.

        :param latent: ``(num_draws, latent_dim)``.
        :returns: ``(num_draws,)``, ``(num_draws, latent_dim)`` and
            ``(num_draws, latent_dim, latent_dim)``.
        """
        with torch.enable_grad():
            latent = latent.detach().requires_grad_()
            log_prob = self.log_prob(latent)
            (score,) = torch.autograd.grad(log_prob.sum(), latent, create_graph=True)
            basis = torch.eye(self.latent_dim).to(score)
            hessian = hessian_products(score, latent, basis).movedim(0, -2)
        is_sound = score.isfinite().all(-1)
        lost = hessian[is_sound].isnan().any(-2).any(0)
        if lost.any():
            hessian[..., lost] = self._differences(latent.detach(), basis[lost])
            hessian = torch.where(hessian.isnan(), hessian.mT, hessian)
        return log_prob.detach(), score.detach(), hessian

    def _differences(self, latent: Tensor, directions: Tensor) -> Tensor:
        size = torch.finfo(latent.dtype).eps ** (1 / 3) * latent.abs().clamp(min=1.0)
        steps = directions.unsqueeze(1) * size
        points = torch.stack([latent + steps, latent - steps])
        ahead, behind = self.score(points.flatten(0, 2))[1].unflatten(0, points.shape[:3])
        size = (directions @ size.mT).unsqueeze(-1)
        return ((ahead - behind) / (2 * size)).movedim(0, -1)

    def hessian(self, latent: Tensor) -> Tensor:
        """Return the second derivative of the log-density, constant.

        :param latent: ``(num_draws, latent_dim)``.
        :returns: ``(num_draws, latent_dim, latent_dim)``.
        """
        return self.derivatives(latent)[2]

    # Runs of the model

    def sample_prior(self, num_samples: int) -> Tensor:
        """Draw from the prior; flat priors uniformly on [-2, 2] in unconstrained space.

        Draws at which the model raises an error are left out.

        :returns: ``(num_samples, latent_dim)``, or fewer rows.
        :raises ValueError: for a latent variable that only some runs of the model have.
        """
        draws = [self.init_loc.new_empty(0, self.latent_dim)]
        for _ in range(num_samples):
            try:
                trace = self._prior_run()
            except IMPOSSIBLE as error:
                self._runs.error = error.with_traceback(None)
                continue
            self._refuse_varying(trace)
            values = {
                name: trace.nodes[name]["value"].detach().unsqueeze(0) for name in self.shapes
            }
            draws.append(self.unconstrain(values))
        return torch.cat(draws)

    def _prior_run(self) -> Trace:
        init = FlatPriorStart(init_to_sample, spread=SEARCH.near_width, like=self._like)
        with poutine.block(), InitMessenger(init), poutine.block(hide_fn=_is_drawn):
            return poutine.trace(self.model).get_trace(*self.args, **self.kwargs)

    def trace_at(self, latent: Tensor) -> Trace:
        """Return the trace of one plain run of the model at a vector, without Pyro's checks.

        :param latent: ``(latent_dim,)``.
        """
        with poutine.block(), pyro.validation_enabled(False):
            trace = self._model.run(self.constrain(latent))
        self._model.share_minibatch(trace)
        return trace

    def read(self, latent: Tensor, read: Callable[[Trace], T]) -> T:
        """Return what a function reads in the trace of the model's run at each vector, stacked.

        :param latent: ``(num_draws, latent_dim)``.
        :param read: returns tensors, alone or in dicts and lists, from a trace without
            log-probabilities.
        :returns: the same structure, each tensor ``(num_draws, *shape)``, in the dtype of
            ``latent``.
        """
        found = self.read_at(self.constrain(latent), read)
        return converted(found, latent.dtype) if self.is_wide else found

    def read_at(self, draws: Mapping[str, Tensor], read: Callable[[Trace], T]) -> T:
        """As :meth:`read`, at values of the sites, in the model's precision.

        :param draws: by site, ``(num_draws, *site_shape)``; further sites are ignored.
        """
        # The log-density finds out whether vmap runs the model; `read` alone does not tell.
        _ = self.is_vectorized
        return self._map({name: draws[name] for name in self.shapes}, read)

    @torch.no_grad()
    def log_likelihood(
        self, draws: Mapping[str, Tensor], sites: Sequence[str], scaled: bool = True
    ) -> dict[str, Tensor]:
        """Return the log-likelihood of each observation, scaled as in the log-density.

        A masked observation has the value 0, if scaled.

        **Example:**

        >>> import pyro.distributions as dist
        >>> def model(y):
        ...     x = pyro.sample("x", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("rows", len(y)):
        ...         pyro.sample("y", dist.Normal(x, 1.0), obs=y)
        >>> target = Target(model, torch.tensor([0.0, 1.0]))
        >>> target.log_likelihood({"x": torch.zeros(3)}, ["y"])["y"][0]
        tensor([-0.9189, -1.4189])

        :param draws: constrained values by site, ``(num_draws, *site_shape)``.
        :param sites: the names of observed sites.
        :param scaled: False leaves out scales and masks, also that of a minibatch to all data.
        :returns: by site, ``(num_draws, *batch_shape)``: an event is one observation.
        :raises ValueError: for sites that depend on discrete latent variables, which are summed
            out.
        """
        lost = [name for name in sites if name not in self.trace_at(self.init_loc)]
        if lost:
            raise ValueError(
                f"the log-likelihood of single observations of site '{lost[0]}' is not known, "
                "because it depends on discrete latents, which are summed out together with it. "
                "Cure: a distribution that sums them by itself, such as MixtureSameFamily, or "
                "leave out log_likelihood"
            )

        def read(trace: Trace) -> dict[str, Tensor]:
            compute_log_prob(trace)
            return {name: trace.nodes[name][key] for name in sites}

        key = "log_prob" if scaled else "unscaled_log_prob"
        parts = []
        for start in range(0, len(next(iter(draws.values()))), RUNS.draws_at_once):
            some = {k: value[start : start + RUNS.draws_at_once] for k, value in draws.items()}
            parts.append(self.read_at(some, read))
        return {name: torch.cat([part[name] for part in parts]) for name in sites}

    def _map(self, values: dict[str, Tensor], read: Callable[[Trace], T], **kwargs: T) -> T:
        varies = False

        def checked(trace: Trace) -> T:
            nonlocal varies
            self._refuse_varying(trace)
            varies |= self._observed is not None and self._observed != _observed(trace)
            return read(trace)

        with poutine.block(), pyro.validation_enabled(False):
            found = self._runs.map(self._model, values, checked, **kwargs)
        if varies and self._model.discrete is None:
            self._refuse_random_sites()
        return found

    def _refuse_random_sites(self) -> None:
        """Check that the observed sites depend on nothing but the latents."""
        first, *others = (
            _observed(self.trace_at(self.init_loc)) for _ in range(RUNS.num_compared_runs)
        )
        for other in others:
            for name in sorted(first ^ other):
                raise varying_site(name)
        self._observed = None


def _is_drawn(site: Site) -> bool:
    """Return whether a site is a discrete latent variable, which is drawn from its prior."""
    if not is_discrete_latent(site):
        return False
    if is_flat(site["fn"]):
        refuse_improper_prior(site["name"], site)
    return True


def _observed(trace: Trace) -> set[str]:
    return {name for name, site in trace.nodes.items() if is_data(site)}


def _is_unbounded(support: Any) -> bool:
    kinds = (type(constraints.real), type(constraints.positive), constraints.less_than)
    return isinstance(support, (*kinds, constraints.greater_than_eq))


def _refuse_local(name: str, site: Site) -> None:
    frame = subsampled_plate(site)
    if frame is not None:
        raise SubsampledError(
            f"latent '{name}' lies in plate '{frame.name}', and a minibatch has {frame.size} of "
            f"{frame.full_size} elements: the others could not move. Cure: fit(..., "
            "amortize='conditional'), which integrates it out; amortize='auto', which trains an "
            "encoder of the rows; or give all data at once"
        )
