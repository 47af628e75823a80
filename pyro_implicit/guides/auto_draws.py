# SPDX-License-Identifier: Apache-2.0
"""The base of automatic guides with draws: summaries, parameters, and names in the store."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import pyro
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoContinuous, AutoGuide, init_to_median
from pyro.ops.stats import quantile
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace
from torch import Tensor
from torch.distributions import IndependentTransform, Transform, biject_to

from pyro_implicit.density.checks import refuse_moving_supports, refuse_point, refuse_unfit_sites
from pyro_implicit.density.initial_run import initialisations
from pyro_implicit.density.model import IMPOSSIBLE, subsampled_plate, trace_model
from pyro_implicit.guides.local_sites import (
    LocalSite,
    RowNormals,
    RowStart,
    find_local_sites,
)
from pyro_implicit.guides.policy import INIT_SCALE
from pyro_implicit.runtime.global_state import seeded
from pyro_implicit.runtime.messages import refuse_counts, short_repr
from pyro_implicit.runtime.sites import (
    FlatPriorStart,
    example_tensor,
    is_discrete_latent,
    is_latent,
    site_parts,
    without_sequential_plates,
)

__all__ = [
    "AutoDraws",
    "DrawSummaries",
    "Frame",
    "forget",
    "own_names",
    "refuse_stored",
    "registered",
]


class Frame(NamedTuple):
    r"""A Gaussian in unconstrained space that defines the units of an implicit guide.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro_implicit import AutoImplicit
    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    >>> frame = Frame(torch.tensor([1900.0, 0.0]), scale=torch.tensor([30.0, 1e-3]))
    >>> guide = AutoImplicit(model, frame=frame)
    >>> guide.sample_posterior(5)["x"].shape
    torch.Size([5, 2])

    :param loc: location, ``(latent_dim,)``.
    :param scale: standard deviations, ``(latent_dim,)``, of a diagonal frame.
    :param scale_tril: lower triangular factor of the covariance, ``(latent_dim, latent_dim)``, of a
        full frame. Exactly one of ``scale`` and ``scale_tril`` must be given.
    """

    loc: Tensor
    scale: Tensor | None = None
    scale_tril: Tensor | None = None

    def __repr__(self) -> str:
        return short_repr(self)

    def check(self, latent_dim: int) -> None:
        """Check the shapes and values of the frame.

        :param latent_dim: size of the unconstrained latent vector.
        :raises ValueError: for an invalid frame.
        """
        if tuple(self.loc.shape) != (latent_dim,):
            raise ValueError(
                f"the frame's loc has shape {tuple(self.loc.shape)}, but the model has "
                f"{latent_dim} unconstrained latents. Cure: a loc of shape ({latent_dim},)"
            )
        factor = self.scale_tril if self.scale is None else self.scale
        if factor is None or (self.scale is not None and self.scale_tril is not None):
            raise ValueError(
                "a frame needs either scale or scale_tril. Cure: Frame(loc, scale=sds) or "
                "Frame(loc, scale_tril=torch.linalg.cholesky(covariance))"
            )
        shape = (latent_dim, latent_dim) if self.scale is None else (latent_dim,)
        if tuple(factor.shape) != shape:
            raise ValueError(
                f"the frame's scale{'_tril' if self.scale is None else ''} has shape "
                f"{tuple(factor.shape)}, but must have shape {shape}"
            )
        full = factor if self.scale is None else factor.diag()
        if not torch.equal(full, full.tril()) or not (full.diagonal() > 0).all():
            raise ValueError(
                "the frame's scale must be positive, and its scale_tril lower triangular with a "
                "positive diagonal. Cure: torch.linalg.cholesky(covariance)"
            )
        if not (self.loc.isfinite().all() and factor.isfinite().all()):
            raise ValueError(
                "the frame is not finite. Cure: fit its guide again with a smaller learning rate, "
                'or frame="auto"'
            )


class DrawSummaries:
    """``median`` and ``quantiles`` for guides that are modules with ``sample_posterior``.

    **Example:**

    >>> import pyro, pyro.distributions as dist
    >>> from pyro.infer.autoguide import AutoGuide
    >>> class Prior(DrawSummaries, AutoGuide):
    ...     def forward(self):
    ...         self._setup_prototype()
    ...     def sample_posterior(self, num_samples):
    ...         return {"x": self.prototype_trace.nodes["x"]["fn"].sample((num_samples,))}
    >>> guide = Prior(lambda: pyro.sample("x", dist.Exponential(1.0)))
    >>> print(f"{guide.median(num_samples=10_000)['x']:.1f}")  # log 2
    0.7
    """

    prototype_trace: Any
    sample_posterior: Callable[..., dict[str, Tensor]]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state, which has the model only before the first call.

        Pyro's method takes the model from the guide itself. A guide of a local function can be
        pickled after its first call.
        """
        parts = {
            name: part
            for name, part in vars(self)["_modules"].items()
            if isinstance(part, AutoGuide) and not isinstance(part, DrawSummaries)
        }
        # Symmetrized is no autoguide, and has no model of its own.
        guides = [one for one in (self, *parts.values()) if isinstance(one, AutoGuide)]
        kept = [(one, vars(one)["_model"], one.master) for one in guides]
        try:
            given: Any = super().__getstate__()
            state: dict[str, Any] = {**given}
            # Pickle asks the parts for their states after this method has returned.
            copies = {name: copy.copy(part) for name, part in parts.items()}
            state["_modules"] = {**state["_modules"], **copies}
        finally:
            for one, model, master in kept:
                one._model, one.master = model, master
        if isinstance(self, AutoGuide) and self.prototype_trace is None:
            state["_model"] = vars(self)["_model"]
        return state

    @torch.no_grad()
    def quantiles(
        self, quantiles: list[float] | Tensor, *args: Any, num_samples: int = 1000, **kwargs: Any
    ) -> dict[str, Tensor]:
        """Estimate posterior quantiles of each latent variable from draws.

        As in Pyro's autoguides, they are quantiles of the unconstrained latents, so that simplices
        remain simplices. They increase with the level for every support. The result is
        reproducible: the draws have a fixed seed.

        :param quantiles: levels between 0 and 1.
        :param args: the model's arguments, as ``kwargs``, if the guide reads them or was never
            called. Without them there are no latent variables of rows (``create_plates``).
        :param num_samples: number of draws; the standard error of a median is 1.25 standard
            deviations over the root of this number.
        :returns: constrained values by site, ``(len(quantiles), *site_shape)``.
        :raises ValueError: for levels outside of [0, 1].
        """
        transforms = self._transforms(args, kwargs)
        with seeded(0, self._device()):
            draws = self._unconstrained(num_samples, transforms, args, kwargs)
        like = next(iter(draws.values()))
        levels = torch.as_tensor(quantiles, dtype=like.dtype, device=like.device).reshape(-1)
        if not ((levels >= 0) & (levels <= 1)).all():
            raise ValueError(f"quantiles must be numbers between 0 and 1, but got {quantiles}")
        found = {}
        for name, values in draws.items():
            transform = transforms[name]
            rising = 1 - levels if _falls(transform) else levels
            found[name] = transform(quantile(values, rising.to(values.dtype), dim=0))
        return found

    def median(self, *args: Any, num_samples: int = 1000, **kwargs: Any) -> dict[str, Tensor]:
        """Estimate posterior medians of each latent variable, as :meth:`quantiles`.

        :param args: the model's arguments, as ``kwargs``, if the guide reads them or was never
            called. Without them there are no latent variables of rows (``create_plates``).
        :param num_samples: number of draws.
        :returns: constrained values by site, ``site_shape``.
        """
        quantiles = self.quantiles([0.5], *args, num_samples=num_samples, **kwargs)
        return {name: value.squeeze(0) for name, value in quantiles.items()}

    def _transforms(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Transform]:
        if self.prototype_trace is None:
            with torch.no_grad(), poutine.block():
                self(*args, **kwargs)  # type: ignore[operator]
        sites = self.prototype_trace.iter_stochastic_nodes()
        return {name: biject_to(site["fn"].support) for name, site in sites}

    def _unconstrained(
        self,
        num_samples: int,
        transforms: Mapping[str, Transform],
        args: tuple,
        kwargs: dict[str, Any],
    ) -> dict[str, Tensor]:
        draws = self.sample_posterior(num_samples, *args, **kwargs)
        return {name: transforms[name].inv(value) for name, value in draws.items()}

    def _device(self) -> torch.device:
        parameter = next(self.parameters(), None)  # type: ignore[attr-defined]
        return torch.device("cpu") if parameter is None else parameter.device


def _falls(transform: Transform) -> bool:
    while isinstance(transform, IndependentTransform):
        transform = transform.base_transform
    try:
        return bool((torch.as_tensor(transform.sign) < 0).all())
    except NotImplementedError:  # not monotone
        return False


AnyGuide = TypeVar("AnyGuide", bound=AutoGuide)


def own_names(guide: AnyGuide) -> AnyGuide:
    """Give a guide unique names in Pyro's parameter store.

    By default all guides of a class have the same names, and a new guide would replace the values
    of previous ones. The names are unique over processes, also for guides that are loaded or
    returned by a worker, and do not depend on random seeds.

    **Example:**

    >>> from pyro.infer.autoguide import AutoNormal
    >>> guides = [own_names(AutoNormal(lambda: None)) for _ in range(2)]
    >>> guides[0]._pyro_name == guides[1]._pyro_name
    False

    :param guide: any of Pyro's or this library's autoguides, not called yet.
    :returns: the same guide.
    """
    name = f"{type(guide).__name__}_{uuid.uuid4().hex[:16]}"
    guide._pyro_set_supermodule(name, guide._pyro_context)
    return guide


def refuse_stored(guide: AutoGuide, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that Pyro's parameter store holds no other guide's parameters under a guide's names.

    **Example:**

    >>> from pyro.infer.autoguide import AutoNormal
    >>> refuse_stored(AutoNormal(lambda: None), {"loc": (3,)})  # nothing is stored

    :param guide: that is about to make its parameters.
    :param shapes: shapes of these parameters, by the part of their names behind the guide's.
    :raises ValueError: naming one that is stored in another shape.
    """
    if pyro.settings.get("module_local_params"):
        return
    store = pyro.get_param_store()
    for name, shape in shapes.items():
        stored = f"{guide._pyro_name}.{name}"
        if stored in store and (found := tuple(store[stored].shape)) != tuple(shape):
            raise ValueError(
                f"the parameter store holds '{stored}' of another guide (shape {found}, here "
                f"{tuple(shape)}). Cure: pyro.clear_param_store(), or load that of this guide"
            )


def forget(guide: AutoGuide) -> None:
    """Remove a guide's parameters from Pyro's parameter store; the guide keeps its values.

    The next call of the guide stores them again under the same names.

    **Example:**

    >>> from pyro.infer.autoguide import AutoNormal
    >>> guide = AutoNormal(lambda: pyro.sample("x", pyro.distributions.Normal(0.0, 1.0)))
    >>> values = guide()
    >>> forget(guide)
    >>> len(pyro.get_param_store())
    0

    :param guide: any of Pyro's or this library's autoguides.
    """
    store, prefix = pyro.get_param_store(), f"{guide._pyro_name}."
    for name in list(store.keys()):
        if name.startswith(prefix):
            del store[name]
    # Pyro also keeps the tensors that were replaced by a module's parameters.
    tensors = store._param_to_name
    for tensor in [tensor for tensor, name in tensors.items() if name.startswith(prefix)]:
        del tensors[tensor]


def registered(guide: AutoGuide, name: str) -> Any:
    """Return a module of a guide, with its parameters in the store inside a call of the guide."""
    module: Any = dict(guide.named_children()).get(name)
    # With local parameters, a PyroModule announces them on access.
    is_local = module is None or pyro.settings.get("module_local_params")
    if is_local or not guide._pyro_context.active:
        return getattr(guide, name)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return module  # frozen: Pyro would warn at every call
    return pyro.module(guide._pyro_get_fullname(name), module, update_module_params=True)


class _FirstRows:
    """The latents of rows at a guide's first call.

    :param trace: of the model, for their initial values.
    :param index: of their rows, by site.
    :param minibatch: turns a model of all rows into one of these.
    """

    def __init__(
        self, trace: Trace, index: dict[str, Tensor], minibatch: Callable[[Any], Any]
    ) -> None:
        self.trace, self.index, self.minibatch = trace, index, minibatch
        #: A better start than the initial values of the trace, by site.
        self.starts: dict[str, RowStart] | None = None


class _IndexedPlates(Messenger):
    """Collects the names of plates that are created with ``subsample=``."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def _pyro_sample(self, msg: Any) -> None:
        if msg["value"] is not None:  # Pyro draws the indices of other plates
            self.names.add(msg["name"])


class AutoDraws(DrawSummaries, AutoContinuous):
    """The base of autoguides with or without a density, such as :class:`AutoImplicit`.

    A subclass implements ``get_posterior``, a distribution of the unconstrained latent vector that
    can be sampled.

    :param model: a Pyro model of fixed structure. The guide covers its continuous latent variables;
        the ELBO marginalises discrete ones that Pyro can enumerate.
    :param init_loc_fn: per-site initialisation, see Pyro's :ref:`autoguide-initialization`; sites
        with a flat prior (``ImproperUniform``) that it cannot initialise begin at 0 in
        unconstrained space.
    :param create_plates: a function of the model's arguments that returns plates, as in Pyro's
        autoguides. If it returns a plate with the ``subsample`` of a minibatch, latents in this
        plate are normal given the others, with parameters of each row of all data
        (:class:`~pyro_implicit.guides.local_sites.RowNormals`), also if the first call has all rows
        and their indices are an argument.
    :raises ValueError: at the first call, for discrete latents that cannot be enumerated, latents
        in a subsampled plate without ``create_plates`` or without unconstrained coordinates, or
        supports that depend on other latents.
    :raises RuntimeError: at the first call, for a model without latents.
    """

    prototype_trace: Any
    rows: RowNormals
    _row_sites: tuple[LocalSite, ...] = ()
    _first_rows: _FirstRows | None = None
    #: Whether guides of this class can have parameters of rows.
    _has_rows = True

    def __init__(
        self,
        model: Callable[..., Any],
        init_loc_fn: Callable[[dict[str, Any]], Tensor] = init_to_median,
        create_plates: Callable[..., Any] | None = None,
    ) -> None:
        if not callable(model):
            raise TypeError(
                f"{type(self).__name__} needs a model, but got a {type(model).__name__}. Cure, if "
                f"the class itself is the guide: SVI(model, {type(self).__name__}(model), ...)"
            )
        self._start = FlatPriorStart(init_loc_fn)
        super().__init__(without_sequential_plates(model), init_loc_fn=self._start)
        self.create_plates = create_plates

    def _prototype_hide_fn(self, msg: Any) -> bool:
        return (
            AutoContinuous._prototype_hide_fn(msg)
            or any(msg["name"] == site.name for site in self._row_sites)
            or (is_discrete_latent(msg) and msg["fn"].has_enumerate_support)
        )

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        try:
            self._start.like = example_tensor(self.model, args, kwargs)
            self._find_rows(args, kwargs)
            self._trace_prototype(args, kwargs)
            self._refuse_subsampled_latents()
            for name, site in self.prototype_trace.iter_stochastic_nodes():
                refuse_point(name, site)
            self._forget_data()
            with torch.no_grad():
                refuse_moving_supports(self.model, args, kwargs, self.prototype_trace)
            self._make_parameters(*args, **kwargs)
            if self._first_rows is not None:
                starts = self._first_rows.starts or self._initial_rows(self._first_rows.trace)
                rows = RowNormals(self._row_sites, starts, self._first_rows.index)
                shapes = {name: value.shape for name, value in rows.named_parameters()}
                refuse_stored(
                    self,
                    {f"rows.{n.removesuffix('_unconstrained')}": s for n, s in shapes.items()},
                )
                self.rows = rows
        except BaseException:
            self.prototype_trace = None  # so that the next call raises the error again
            raise
        finally:
            self._first_rows = None

    def _make_parameters(self, *args: Any, **kwargs: Any) -> None:
        """Make the parameters at the first call, when the latents are known."""

    def _initial_rows(self, trace: Trace) -> dict[str, RowStart]:
        """Return the values of ``init_loc_fn``, independent of the other latents."""
        starts = {}
        for site in self._row_sites:
            loc = biject_to(site.support).inv(trace.nodes[site.name]["value"]).detach()
            loc = loc.expand(site.shape)
            slope = loc.new_zeros(*loc.shape, self.latent_dim)
            starts[site.name] = RowStart(loc, torch.full_like(loc, INIT_SCALE), slope)
        return starts

    def _find_rows(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Find latents in subsampled plates, for which ``create_plates`` gives the rows."""
        self._row_sites = ()
        owner = self if self.master is None else self.master()  # of an AutoGuideList
        if owner is None or owner.create_plates is None:
            return
        with poutine.block(), _IndexedPlates() as indexed:
            given = self._create_plates(*args, **kwargs)
            if owner is not self:  # the plates of an AutoGuideList exist already
                owner.create_plates(*args, **kwargs)
        # As in SVI, the indices are those of the guide, also for a plate that the model has whole.
        indices = Trace()
        for name, plate in given.items():
            node = {"type": "sample", "value": plate._indices, "is_observed": False, "infer": {}}
            indices.add_node(name, name=name, **node)
        minibatch = partial(poutine.replay, trace=indices)
        trace = trace_model(minibatch(self.model), args, kwargs)
        self._row_sites = self._local_sites(trace, indexed.names)
        if not self._row_sites:
            return
        for site in self._row_sites:
            if site.rows.name not in given:
                raise ValueError(
                    f"site '{site.name}' has one latent for each row of plate "
                    f"'{site.rows.name}', but create_plates returned only {sorted(given)}. Cure: "
                    f"pyro.plate('{site.rows.name}', {site.rows.full_size}, subsample=index)"
                )
        index = {site.name: given[site.rows.name]._indices for site in self._row_sites}
        self._first_rows = _FirstRows(trace, index, minibatch)

    def _local_sites(self, trace: Trace, indexed: set[str]) -> tuple[LocalSite, ...]:
        """Return the latents of rows: of a minibatch, or of all rows if indices are given.

        :param indexed: plates of ``create_plates`` whose indices are given.
        """
        latents = [site for site in trace.nodes.values() if is_latent(site)]
        continuous = [site for site in latents if not is_discrete_latent(site)]
        rows = None
        if all(subsampled_plate(site) is None for site in continuous):
            # Later calls may have fewer rows, or in another order.
            rows = indexed
            names = [{frame.name for frame in site["cond_indep_stack"]} for site in continuous]
            num_local = sum(not rows.isdisjoint(plates) for plates in names)
            if not self._has_rows or not 0 < num_local < len(continuous):
                return ()
        found = tuple(find_local_sites(trace, row_plates=rows))
        if len(found) == len(continuous):
            raise ValueError(
                f"all latents of the model are in plate '{found[0].rows.name}' of the rows, and "
                f"{type(self).__name__} needs one outside of it. Cure: AutoAmortized(model), or "
                "AutoNormal(model, create_plates=...) of Pyro"
            )
        return found

    def _trace_prototype(self, args: tuple, kwargs: dict[str, Any]) -> None:
        given = self._start.init_loc_fn
        attempts = initialisations(given)
        try:
            for attempt, self._start.init_loc_fn in enumerate(attempts, 1):
                try:
                    super()._setup_prototype(*args, **kwargs)
                    frames = (frame for site in self._row_sites for frame in site.plates)
                    self._prototype_frames.update((frame.name, frame) for frame in frames)
                    return
                except IMPOSSIBLE:
                    if self.prototype_trace is not None:  # the model ran: its sites cause the error
                        refuse_unfit_sites(trace_model(self.model, args, kwargs))
                        raise
                    if attempt == len(attempts):
                        raise
        finally:
            self._start.init_loc_fn = given

    def _refuse_subsampled_latents(self) -> None:
        for name, frames in self._cond_indep_stacks.items():
            for frame in frames:
                if frame.full_size is not None and frame.full_size != frame.size:
                    raise ValueError(
                        f"site '{name}' has one latent for each of the {frame.full_size} elements "
                        f"of plate '{frame.name}', which subsamples {frame.size}: "
                        f"{type(self).__name__} would keep one latent per minibatch slot. Cure: "
                        "no subsample_size, if a model of all rows is not too slow; else the "
                        "indices of a minibatch as an argument of the model, with create_plates=, "
                        "batches=loader with amortize='conditional', or AutoAmortized(model)"
                    )

    def _forget_data(self) -> None:
        """Keep only the latents' shapes and supports: a saved guide contains no data."""
        trace = self.prototype_trace
        latents = {name for name, _ in trace.iter_stochastic_nodes()}
        for name in list(trace.nodes):
            if name not in latents:
                trace.remove_node(name)

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draw all latents, with latents of the rows of ``create_plates``."""
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        if not self._row_sites:
            return super().forward(*args, **kwargs)
        trace = poutine.trace(super().forward).get_trace(*args, **kwargs)
        values = dict(trace.nodes["_RETURN"]["value"])
        latent = trace.nodes[f"_{self._pyro_name}_latent"]["value"]
        for site in self._row_sites:
            with self._enter(site) as index:
                step = latent - self._centre()
                values[site.name] = pyro.sample(site.name, self.rows.posterior(site, step, index))
        return values

    def _centre(self) -> Tensor:
        """Return a point in the middle of the latent vectors, ``(latent_dim,)``, for rows."""
        raise NotImplementedError

    @contextmanager
    def _enter(self, site: LocalSite) -> Iterator[Tensor]:
        """Enter the plates of a latent of rows; return the indices of the rows."""
        with ExitStack() as stack:
            entered = {
                frame.name: stack.enter_context(self.plates[frame.name]) for frame in site.plates
            }
            yield entered[site.rows.name]

    def sample_latent(self, *args: Any, **kwargs: Any) -> Tensor:
        """Draw the unconstrained latent vector, ``(*batch, latent_dim)``."""
        infer = {"is_auxiliary": True, "latents": tuple(self._unconstrained_shapes)}
        name = f"_{self._pyro_name}_latent"
        return pyro.sample(name, self.get_posterior(*args, **kwargs), infer=infer)

    @torch.no_grad()
    def sample_posterior(self, num_samples: int, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draw all latents. A guide that was called before needs no arguments.

        :param num_samples: number of draws.
        :param args: the model's arguments, if the guide was never called or has latents of rows,
            which are those of ``create_plates(*args)``.
        :returns: constrained values by site, each ``(num_samples, *site_shape)``.
        """
        latents = self._draw(num_samples, *args, **kwargs)
        values = self._constrain(latents)
        with poutine.block(), self._pyro_context:
            for site in self._row_sites:
                self._create_plates(*args, **kwargs)
                with self._enter(site) as index:
                    num_batch = site.row_dim - site.rows.dim
                    step = latents - self._centre()
                    step = step.reshape(num_samples, *(1,) * num_batch, -1)
                    values[site.name] = self.rows.posterior(site, step, index).sample()
        return values

    @torch.no_grad()
    def _draw(self, num_samples: int, *args: Any, **kwargs: Any) -> Tensor:
        refuse_counts(num_samples=num_samples)
        with poutine.block():
            if self.prototype_trace is None:
                self(*args, **kwargs)
            with self._pyro_context:  # the parameter store's values, as in a call
                return self.get_posterior(*args, **kwargs).sample(torch.Size((num_samples,)))

    def _unconstrained(
        self,
        num_samples: int,
        transforms: Mapping[str, Transform],
        args: tuple,
        kwargs: dict[str, Any],
    ) -> dict[str, Tensor]:
        if self._row_sites and (args or kwargs):
            return super()._unconstrained(num_samples, transforms, args, kwargs)
        latents = self._draw(num_samples, *args, **kwargs)
        return site_parts(latents, self._unconstrained_shapes)

    def _transforms(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Transform]:
        found = super()._transforms(args, kwargs)
        return found | {site.name: biject_to(site.support) for site in self._row_sites}

    def _constrain(self, latents: Tensor) -> dict[str, Tensor]:
        nodes = self.prototype_trace.nodes
        parts = site_parts(latents, self._unconstrained_shapes).items()
        return {name: biject_to(nodes[name]["fn"].support)(value) for name, value in parts}

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load as in torch; the guide must have been called before, to have parameters."""
        if self.prototype_trace is None:
            raise RuntimeError(
                f"{type(self).__name__} makes its parameters at its first call: call guide(*args) "
                "once, with any arguments of the model, before load_state_dict"
            )
        return super().load_state_dict(*args, **kwargs)
