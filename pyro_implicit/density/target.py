# SPDX-License-Identifier: Apache-2.0
"""A model's log-density as a function of its unconstrained latent variables."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch
from pyro.infer.autoguide import init_to_median
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_implicit.density.batched_runs import BatchedRuns
from pyro_implicit.density.bijections import InDouble
from pyro_implicit.density.checks import refuse_moving_supports
from pyro_implicit.density.checks.observations import refuse_missing_data
from pyro_implicit.density.coordinates import Coordinates
from pyro_implicit.density.cost import FusedDensity, seconds_near, suits_one_thread
from pyro_implicit.density.discrete import Elements
from pyro_implicit.density.improper import refuse_improper
from pyro_implicit.density.initial_run import InitialRun, prior_run
from pyro_implicit.density.model import (
    IMPOSSIBLE,
    Model,
    compute_log_prob,
    converted,
    log_likelihood_of,
    total_log_prob,
)
from pyro_implicit.density.model_runs import ModelRuns
from pyro_implicit.density.policy import MAX_DENSE_DIM, RUNS
from pyro_implicit.ops.ensemble_hmc import score_of
from pyro_implicit.ops.jacobian import hessian_products
from pyro_implicit.runtime.sites import (
    Site,
    innermost,
    is_interval,
    unmasked_elements,
    unplated_dims,
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

    >>> import pyro
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
        a draw of the prior, or else the origin; it is the origin, too, if medians of a vague prior
        are above 1e6.
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
    :warns UserWarning: for latent variables of which some elements are masked, and if observations
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
        first = InitialRun(model, args, kwargs, init_loc_fn, self._allow_local, sample_discrete)
        self.model, self.args, self.kwargs = first.model, args, kwargs
        #: Name, rows in the first minibatch, and rows in total of the subsampled plate, if any.
        self.subsampled: tuple[str, int, int] | None = first.subsampling.plate
        #: Whether the model scales the likelihood of its minibatch.
        self.scaled: bool = first.subsampling.scaled
        #: Whether the model draws the rows of its minibatch itself.
        self.draws_rows: bool = first.subsampling.draws_rows
        self._seed, self._like = 0, first.like
        #: By site, the middle of the turn in which its angles lie.
        self.turns: dict[str, Tensor] = first.turns
        #: Why discrete latent variables that Pyro can enumerate are not summed out; else empty.
        self.unsummed: str = first.unsummed
        #: Batch dimensions outside of plates, by site.
        self.unplated = unplated_dims(first.trace)
        latents = first.latents
        self._coordinates = Coordinates(latents, first.sampled)
        #: By site, the shape of its unconstrained coordinates.
        self.shapes: dict[str, torch.Size] = self._coordinates.shapes
        #: By site, the bijection from unconstrained coordinates to values.
        self.transforms: dict[str, Any] = self._coordinates.transforms
        #: By site, the latent variable as in the first run.
        self.sites: dict[str, Site] = {name: latents.nodes[name] for name in self.shapes}
        #: The latent variables with elements that have no prior, because a mask leaves them out.
        self.masked: tuple[str, ...] = tuple(
            name for name in self.shapes if not unmasked_elements(latents.nodes[name]).all()
        )
        self.init_loc: Tensor = self._coordinates.start
        self.latent_dim: int = len(self.init_loc)
        #: The discrete latent variables that have coordinates.
        self.sampled: tuple[str, ...] = tuple(n for n in self.shapes if n in first.sampled)
        #: Those of them that Pyro cannot enumerate.
        self.not_enumerable: tuple[str, ...] = tuple(
            name for name in self.sampled if not self.sites[name]["fn"].has_enumerate_support
        )
        #: Number of their coordinates, the last of the vector.
        self.discrete_dim: int = sum(self.shapes[name].numel() for name in self.sampled)
        #: The discrete latent variables that are summed out.
        self.summed_out: frozenset[str] = first.discrete.names if first.discrete else frozenset()
        start, takes_all = self.constrain(self.init_loc), self._allow_local is None
        self._runs = ModelRuns(
            Model(first.model, args, kwargs, latents, first.discrete),
            start,
            first.trace,
            BatchedRuns(type(self).__name__, refuses_random=takes_all),
        )
        #: Runs models with long loops; other minibatches would need other recordings.
        self._fused: FusedDensity | None = None
        if takes_all and not self.sampled:
            self._fused = FusedDensity(self._by_model, self._of_one)
        if not sample_discrete:
            first.try_sum(self._runs.model, start)
        refuse_moving_supports(self.model, args, kwargs, latents)
        #: Bounds of the discrete elements.
        self.elements: Elements | None = None
        if self.sampled:
            self.elements = first.elements(self.sampled, self.init_loc)

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

    def on(self, batch: tuple, *, seed: int | None = None) -> Target:
        """Return the same posterior with another minibatch.

        :param batch: the last positional arguments of the model.
        :param seed: of the rows that a model draws itself; by default a random one.
        """
        args = (*self.args[: len(self.args) - len(batch)], *batch)
        target = self.with_data(args, self.kwargs)
        if self.draws_rows:
            target._seed = int(torch.randint(2**31, ())) if seed is None else seed
        return target

    def with_data(self, args: tuple, kwargs: dict[str, Any]) -> Target:
        """Return the posterior of the same latent variables for other arguments of the model.

        **Example:**

        >>> import pyro
        >>> import pyro.distributions as dist
        >>> def model(y):
        ...     x = pyro.sample("x", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("rows", len(y)):
        ...         pyro.sample("y", dist.Normal(x, 1.0), obs=y)
        >>> Target(model, torch.ones(5)).with_data((torch.ones(9),), {}).score(torch.zeros(1, 1))[1]
        tensor([[9.]])

        :param args: all positional arguments.
        :param kwargs: all keyword arguments.
        """
        target = copy.copy(self)
        target.args, target.kwargs = args, kwargs
        vars(target).pop("_seconds", None)  # of other data
        target._use(self._runs.on(args, kwargs))
        return target

    def in_double(self) -> Target:
        """Return the same posterior with its arguments, and its initial point, in float64."""
        target = copy.copy(self)
        target._use(self._runs.in_double())
        target.args, target.kwargs = target._runs.model.args, target._runs.model.kwargs
        target.init_loc = self.init_loc.double()
        return target

    def _use(self, runs: ModelRuns) -> None:
        """Evaluate another model; a recording holds the data of the earlier one."""
        self._runs = runs
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
            family = type(innermost(self.sites[name]["fn"]))
            found.setdefault((re.sub(r"\d+", "#", name), family, shape), []).append(name)
        return list(found.values())

    def refuse_improper(self) -> None:
        """Check that flat and masked priors have data: each element, and each direction of a few
        elements, must change the density.

        :raises ValueError: naming the sites.
        """
        if self._allow_local is None:
            refuse_improper(self)

    # Coordinates

    def split(self, latent: Tensor) -> dict[str, Tensor]:
        """Return the part of each site, ``(*batch, *unconstrained_shape)``.

        :param latent: ``(*batch, latent_dim)``.
        """
        return self._coordinates.split(latent)

    @property
    def places(self) -> dict[str, Tensor]:
        """By site, the indices of its coordinates in the vector, ``unconstrained_shape``."""
        return self.split(torch.arange(self.latent_dim, device=self.init_loc.device))

    def constrain(self, latent: Tensor) -> dict[str, Tensor]:
        """Return the values of all sites.

        :param latent: ``(*batch, latent_dim)``.
        :returns: by site, ``(*batch, *site_shape)``.
        """
        return self._coordinates.constrain(latent)

    def unconstrain(self, draws: dict[str, Tensor]) -> Tensor:
        """Return the unconstrained vectors of draws.

        :param draws: by site, ``(num_draws, *site_shape)``; further sites are ignored.
        :returns: ``(num_draws, latent_dim)``.
        """
        return self._coordinates.unconstrain(draws)

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
        is_vectorized = self._runs.batched.checked and self._runs.batched.mode == "vmap"
        evaluate = (is_vectorized and self._fused) or self._by_model
        log_prob = evaluate(latent)
        log_prob = log_prob.to(latent.dtype)  # the data may be of another
        impossible |= ~log_prob.detach().isfinite()
        if not log_prob.requires_grad:  # every run raised an error
            log_prob = log_prob + 0 * latent.nan_to_num().sum(-1)
        return log_prob.masked_fill(log_prob.isnan(), -math.inf)

    @property
    def is_fused(self) -> bool:
        """Whether a recorded model is evaluated, for which vectors are faster than their parts."""
        return self._fused is not None and self._fused.refusal is None

    def log_prob_by_site(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the log-density, differentiable, at coordinates that are given by site.

        A gradient by some sites then does not pass through functions of the others, such as the
        factor of their covariance.

        **Example:**

        >>> import pyro
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
        if self.is_fused:
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
        return self._runs.map(values, total, log_det.new_full((), -math.inf)) + log_det

    def terms(self, latent: Tensor) -> Tensor:
        """Return the log-density term by term: an element of a site's log-density each.

        The log-determinants of the bijections are left out, because discrete latent variables,
        which need the terms, do not change them. Where the model raises an error all terms are NaN.

        **Example:**

        >>> import pyro
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
        return self._runs.map(self.constrain(latent), self._terms_of)

    def log_det(self, latent: Tensor) -> Tensor:
        """Return the log-determinants of the bijections, ``(num_draws,)``.

        **Example:**

        >>> import pyro
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

        >>> import pyro
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

        >>> import pyro
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

        def read(trace: Trace) -> Tensor:
            for name in [name for name in trace.nodes if name not in names]:
                trace.remove_node(name)
            return self._terms_of(trace)

        return self._runs.inside(values, read)

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
        return self._runs.inside(values, total_log_prob) + log_det

    def _values(self, parts: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        if self.is_wide:  # before the bijection, which loses digits near a bound
            parts = converted(parts, torch.float64)
        return self._coordinates.values(parts)

    def score(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-density and its gradient, constants.

        :param latent: ``(num_draws, latent_dim)``.
        :returns: ``(num_draws,)`` and ``(num_draws, latent_dim)``.
        """
        return score_of(self.log_prob)(latent)

    def widen(self, points: Tensor) -> bool:
        """Evaluate the model in double precision from now on, if it can.

        Coordinates and results keep their dtype, but the bijections to intervals compute in double
        precision, too. Arguments of the model are converted; data that it closes over are not, so
        that a matrix product with them fails, for instance.

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
        if self.is_wide or points.dtype == torch.float64:
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
        self._coordinates = copy.copy(self._coordinates)  # copies of this target keep theirs
        self.transforms = self._coordinates.transforms = dict(self.transforms)
        self._use(wide._runs)
        for name, site in self.sites.items():
            if is_interval(site):
                self.transforms[name] = InDouble(self.transforms[name])
        return True

    @property
    def is_wide(self) -> bool:
        """Whether the model runs in double precision whatever the coordinates; see ``widen``."""
        return self._runs.model.is_wide

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
        runs = self._runs.batched
        if not runs.checked:
            with torch.no_grad():  # at two points, as a single one has a truth value
                self.log_prob(torch.stack([self.init_loc, self.init_loc + 0.01]))
        return runs.mode == "vmap"

    @property
    def error(self) -> Exception | None:
        """Last error that the model raised where the log-density is -inf."""
        return self._runs.batched.error

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

    def secants(self, latent: Tensor, root: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        r"""Return the log-density, the mean score at points around, and the slopes between them.

        For densities with kinks, whose derivatives are blind to them. The points are
        :math:`x \pm F e_i` for each column of a matrix F, so that with a factor of a covariance
        they are as far away in all directions.

        **Example:**

        >>> import pyro
        >>> import pyro.distributions as dist
        >>> def model():
        ...     pyro.sample("x", dist.Laplace(0.0, 1.0))
        >>> root = torch.full((1, 1, 1), 2.0)
        >>> log_prob, score, hessian = Target(model).secants(torch.ones(1, 1), root)
        >>> score, hessian
        (tensor([[0.]]), tensor([[[-0.5000]]]))

        :param latent: x, ``(num_draws, latent_dim)``.
        :param root: F, ``(num_draws, latent_dim, latent_dim)``.
        :returns: as :meth:`derivatives`. Directions without a finite score have no curvature.
        """
        ahead, behind = self._scores_around(latent, root.movedim(-1, 0))
        scores = torch.cat([ahead, behind])
        score = scores.masked_fill(~scores.isfinite(), math.nan).nanmean(0)
        slopes = root.mT @ ((ahead - behind) / 2).movedim(0, -1)  # in coordinates of the root
        slopes = 0.5 * (slopes + slopes.mT).nan_to_num(0.0, 0.0, 0.0)
        inverse = torch.linalg.inv_ex(root).inverse
        return self.log_prob(latent).detach(), score, inverse.mT @ slopes @ inverse

    def _differences(self, latent: Tensor, directions: Tensor) -> Tensor:
        size = torch.finfo(latent.dtype).eps ** (1 / 3) * latent.abs().clamp(min=1.0)
        ahead, behind = self._scores_around(latent, directions.unsqueeze(1) * size)
        size = (directions @ size.mT).unsqueeze(-1)
        return ((ahead - behind) / (2 * size)).movedim(0, -1)

    def _scores_around(self, latent: Tensor, steps: Tensor) -> Tensor:
        """Return the scores at points ahead and behind, ``(2, num_steps, num_draws, dim)``."""
        points = torch.stack([latent + steps, latent - steps])
        return self.score(points.flatten(0, 2))[1].unflatten(0, points.shape[:3])

    # Runs of the model

    def sample_prior(self, num_samples: int) -> Tensor:
        """Draw from the prior; flat priors uniformly on [-2, 2] in unconstrained space.

        Draws at which the model raises an error, or without coordinates, are left out.

        :returns: ``(num_samples, latent_dim)``, or fewer rows.
        :raises ValueError: for a latent variable that only some runs of the model have.
        """
        draws = [self.init_loc.new_empty(0, self.latent_dim)]
        for _ in range(num_samples):
            try:
                trace = prior_run(self.model, self.args, self.kwargs, self._like)
            except IMPOSSIBLE as error:
                self._runs.batched.error = error.with_traceback(None)
                continue
            self._runs.refuse_varying(trace)
            values = {
                name: trace.nodes[name]["value"].detach().unsqueeze(0) for name in self.shapes
            }
            draws.append(self.unconstrain(values))
        found = torch.cat(draws)
        return found[~found.isnan().any(-1)]

    def trace_at(self, latent: Tensor) -> Trace:
        """Return the trace of one plain run of the model at a vector, without Pyro's checks.

        :param latent: ``(latent_dim,)``.
        """
        return self._runs.trace(self.constrain(latent))

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
        return self._runs.map({name: draws[name] for name in self.shapes}, read)

    def joint_sites(self, sites: Sequence[str]) -> list[str]:
        """Return the sites whose observations have no log-likelihood of their own.

        :param sites: the names of observed sites.
        """
        trace = self.trace_at(self.init_loc)
        compute_log_prob(trace)
        return [name for name in sites if log_likelihood_of(trace, name, scaled=False) is None]

    @torch.no_grad()
    def log_likelihood(
        self, draws: Mapping[str, Tensor], sites: Sequence[str], scaled: bool = True
    ) -> dict[str, Tensor]:
        """Return the log-likelihood of each observation, scaled as in the log-density.

        A masked observation has the value 0, if scaled.

        **Example:**

        >>> import pyro
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
        :raises ValueError: for a site whose observations share discrete latent variables, which are
            summed out, with each other or with those of another site.
        """
        if lost := self.joint_sites(sites):
            raise ValueError(
                f"the log-likelihood of single observations of site '{lost[0]}' is not known, "
                "because they share discrete latents, which are summed out, with each other or "
                "with another site. Cure: a discrete latent for each observation, in its plates"
            )

        def read(trace: Trace) -> dict[str, Tensor]:
            compute_log_prob(trace)
            found = {name: log_likelihood_of(trace, name, scaled) for name in sites}
            return {name: value for name, value in found.items() if value is not None}

        parts = []
        for start in range(0, len(next(iter(draws.values()))), RUNS.draws_at_once):
            some = {k: value[start : start + RUNS.draws_at_once] for k, value in draws.items()}
            parts.append(self.read_at(some, read))
        return {name: torch.cat([part[name] for part in parts]) for name in sites}
