# SPDX-License-Identifier: Apache-2.0
"""A guide for models with latents of rows: amortised for these, implicit for all others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Literal

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions.util import sum_rightmost
from pyro.infer.autoguide import AutoGuide
from pyro.nn import PyroParam
from pyro.poutine.indep_messenger import CondIndepStackFrame
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn
from torch.distributions import biject_to

from pyro_implicit.density.model import DiscreteSum, trace_model
from pyro_implicit.distributions import SemiImplicit
from pyro_implicit.generators import Generator
from pyro_implicit.guides.auto_draws import DrawSummaries, registered
from pyro_implicit.guides.auto_implicit import AutoSemiImplicit
from pyro_implicit.guides.local_sites import LocalSite, find_local_sites
from pyro_implicit.guides.policy import (
    AMORTIZED_CONDITIONAL_SCALE,
    AMORTIZED_WIDTH,
    LEAST_SCALE,
    MINIBATCH_INIT_SCALE,
)
from pyro_implicit.guides.posterior_draws import draw
from pyro_implicit.runtime.messages import refuse_counts
from pyro_implicit.runtime.sites import Site

__all__ = ["AutoAmortized", "RowData"]


class AutoAmortized(DrawSummaries, AutoGuide):
    r"""Local latents by encoders of their rows, all others by an implicit guide.

    A latent :math:`z_i` in a plate of the data's rows gets :math:`q(z_i | x_i)`, Gaussian in
    unconstrained space with location and scale from an encoder of that row's data. It is therefore
    available for new rows, and can be trained by minibatches. The other latents have a separate
    guide (:class:`AutoSemiImplicit` by default), independent of the rows.

    The data of the rows are found at the first call: the tensors among the model's arguments whose
    first dimension is the size of the plate.

    The guide leaves out discrete latents that Pyro can enumerate, such as an unknown class of each
    row. The ELBOs of this library sum them out, as Pyro's ``TraceEnum_ELBO`` does with
    ``config_enumerate(model)`` if the guide has a density.

    **Example:**

    >>> import pyro.distributions as dist
    >>> def model(x):
    ...     mean = pyro.sample("mean", dist.Normal(0.0, 10.0))
    ...     with pyro.plate("rows", 1000, subsample_size=len(x)):
    ...         z = pyro.sample("z", dist.Normal(mean, 1.0))
    ...         pyro.sample("x", dist.Normal(z, 0.5), obs=x)
    >>> guide = AutoAmortized(model)
    >>> {name: tuple(value.shape) for name, value in guide(torch.randn(20)).items()}
    {'mean': (), 'z': (20,)}
    >>> guide.sample_posterior(100, torch.randn(7))["z"].shape  # of new rows
    torch.Size([100, 7])

    :param model: a Pyro model whose data are arguments, rows first.
    :param amortize: ``"auto"`` for all latents in a subsampled plate, or if there is none, in a
        plate of data, each with a small network of the row's flattened data, standardised by the
        first minibatch; or encoders by site. An encoder is called with the arguments that have
        rows, in their order, and returns location and scale in unconstrained space,
        ``(num_rows, ...)``. A generator with a context (:class:`~pyro_implicit.NoisyEncoder`)
        receives the flattened, standardised data, and makes the site implicit.
    :param rest: function from a model that hides the local latents to the guide of the others.
    :raises ValueError: at the first call, for no local latents, local latents that are not named,
        discrete latents that cannot be enumerated, or no argument with rows; later, for a missing
        argument.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        amortize: Literal["auto"] | Mapping[str, Callable[..., Any]] = "auto",
        rest: Callable[[Callable[..., Any]], AutoGuide] | None = None,
    ) -> None:
        if amortize != "auto" and not isinstance(amortize, Mapping):
            raise ValueError(f'amortize must be "auto" or a dict of encoders, but got {amortize!r}')
        super().__init__(model)
        # In tuples, so that they are not submodules.
        self._given = (dict(amortize) if isinstance(amortize, Mapping) else None,)
        self._make_rest = (rest,)
        self._sites: tuple[LocalSite, ...] = ()

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        (given,), (make_rest,) = self._given, self._make_rest
        trace = trace_model(self.model, args, kwargs)
        discrete = DiscreteSum.of(trace)
        summed = discrete.names if discrete is not None else frozenset()
        sites = find_local_sites(trace, given)
        self._rows: dict[str, RowData] = {}
        for plate in (site.rows for site in sites):
            index = trace.nodes.get(plate.name)
            # An encoder of the user may read the index of a row; it tells others nothing.
            self._rows[plate.name] = RowData(plate, index, args, kwargs, reads_index=bool(given))
        local = [site.name for site in sites]
        hidden = poutine.block(self.model, hide=[*local, *summed])
        others = [
            name
            for name, site in trace.iter_stochastic_nodes()
            if name not in (*local, *summed) and not site_is_subsample(site)
        ]
        if others and make_rest is not None:
            self.rest = make_rest(hidden)
        elif others:
            self.rest = AutoSemiImplicit(hidden, frame=None, init_scale=MINIBATCH_INIT_SCALE)
        else:
            self.rest = None
        for site in sites:
            rows = self._rows[site.rows.name].read(args, kwargs)
            self._add_encoder(site, rows, None if given is None else given[site.name])
        self._sites = tuple(sites)
        self._given = self._make_rest = (None,)
        for name in [name for name in trace.nodes if name not in (*local, *others)]:
            trace.remove_node(name)
        self._prototype_frames = {
            frame.name: frame
            for _, site in trace.iter_stochastic_nodes()
            for frame in site["cond_indep_stack"]
        }
        self.prototype_trace = trace

    def _check_prototype(self, part_trace: Any) -> None:
        """Skip Pyro's check by the guide of the others, which shares the plates."""

    def _add_encoder(self, site: LocalSite, rows: list[Tensor], given: Any) -> None:
        like = next((row for row in rows if row.is_floating_point()), torch.empty(0))
        features = _flatten(rows, like)
        scale = features.std(0, correction=0)
        key = site.key
        # Parameters, so that every way of saving keeps them; they are detached where they are used.
        setattr(self, f"loc_{key}", PyroParam(features.mean(0)))
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        setattr(self, f"scale_{key}", PyroParam(scale))
        if given is None:
            given = _Encoder(features.shape[-1], site.size).to(features)
        setattr(self, f"encoder_{key}", given)

    @property
    def is_semi_implicit(self) -> bool:
        """Whether a site has only a conditional density given the noise."""
        encoders = [getattr(self, f"encoder_{site.key}") for site in self._sites]
        kinds = (Generator, AutoSemiImplicit)
        return any(isinstance(part, kinds) for part in (self.rest, *encoders))

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draw all latents, with local latents of the rows in these arguments."""
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        read = {name: rows.read(args, kwargs) for name, rows in self._rows.items()}
        self.plates = {
            name: _plate(frame, self._rows.get(name), read, args, kwargs)
            for name, frame in self._prototype_frames.items()
        }
        values = dict(self.rest(*args, **kwargs)) if self.rest is not None else {}
        for site in self._sites:
            rows, plate = read[site.rows.name], self.plates[site.rows.name]
            if len(rows[0]) != plate.subsample_size:  # the model draws the rows
                rows = [row[plate._indices.to(row.device)] for row in rows]
            with ExitStack() as stack:
                for frame in site.plates:
                    stack.enter_context(self.plates[frame.name])
                values[site.name] = self._sample(site, rows)
        return values

    def _sample(self, site: LocalSite, rows: list[Tensor]) -> Tensor:
        posterior = self._posterior(site, rows)
        if not isinstance(posterior, SemiImplicit):
            return pyro.sample(site.name, posterior)
        infer = {"is_auxiliary": True, "latents": (site.name,)}
        latent = pyro.sample(f"_{self._pyro_name}_{site.name}_latent", posterior, infer=infer)
        latent = latent.reshape(latent.shape[:-1] + site.shape[site.row_dim + 1 :])
        transform = biject_to(site.support)
        value = transform(latent)
        log_density = transform.inv.log_abs_det_jacobian(value, latent)
        extra = log_density.dim() - (value.dim() - site.event_dim)
        log_density = sum_rightmost(log_density, extra)
        return pyro.sample(site.name, dist.Delta(value, log_density, site.event_dim))

    def _posterior(self, site: LocalSite, rows: list[Tensor]) -> dist.TorchDistribution:
        key = site.key
        encoder = registered(self, f"encoder_{key}")
        loc, scale = (getattr(self, f"{part}_{key}").detach() for part in ("loc", "scale"))
        features = (_flatten(rows, loc) - loc) / scale
        if isinstance(encoder, Generator):
            if len(site.plates) > 1:
                raise ValueError(
                    f"latent '{site.name}' lies in more plates than the plate of its rows, which a "
                    "generator does not support. Cure: an encoder that returns location and scale"
                )
            noise_dim, width = encoder.noise_dim, AMORTIZED_CONDITIONAL_SCALE
            return SemiImplicit(encoder, noise_dim, width, context=features)
        loc, scale = encoder(features) if isinstance(encoder, _Encoder) else encoder(*rows)
        loc, scale = (_in_place(part, site, len(features)) for part in (loc, scale))
        event_dim = len(site.shape) - (site.row_dim - site.rows.dim)
        base = dist.Normal(loc, scale).to_event(event_dim)
        transform = biject_to(site.support)
        return dist.TransformedDistribution(base, [transform])

    @torch.no_grad()
    def sample_posterior(self, num_samples: int, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draw all latents, with local latents of the rows in these arguments, which may be new.

        :param num_samples: number of draws.
        :param args: positional arguments of the model; ``kwargs`` are keyword arguments.
        :returns: by site, ``(num_samples, *site_shape)``.
        """
        refuse_counts(num_samples=num_samples)
        with poutine.block():
            if self.prototype_trace is None:
                self(*args, **kwargs)
            values = {}
            with self._pyro_context:
                if self.rest is not None:
                    values = draw(self.rest, num_samples, *args, **kwargs)
                for site in self._sites:
                    rows = self._rows[site.rows.name].read(args, kwargs)
                    posterior = self._posterior(site, rows)
                    value = posterior.sample(torch.Size((num_samples,)))
                    if isinstance(posterior, SemiImplicit):
                        value = value.reshape(value.shape[:-1] + site.shape[site.row_dim + 1 :])
                        value = biject_to(site.support)(value)
                    values[site.name] = value
            return values


class _Encoder(nn.Module):
    def __init__(self, num_features: int, size: int) -> None:
        super().__init__()
        width = AMORTIZED_WIDTH
        self.body = nn.Sequential(
            nn.Linear(num_features, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()
        )
        self.loc, self.raw_scale = nn.Linear(width, size), nn.Linear(width, size)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(features)
        return self.loc(hidden), LEAST_SCALE + nn.functional.softplus(self.raw_scale(hidden))


def _flatten(rows: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat([row.reshape(len(row), -1).to(like) for row in rows], -1)


def _in_place(value: Tensor, site: LocalSite, num_rows: int) -> Tensor:
    rest = [size for dim, size in enumerate(site.shape) if dim != site.row_dim]
    if value.shape[0] != num_rows or value.numel() != num_rows * site.size:
        raise ValueError(
            f"the encoder of '{site.name}' gave location or scale of shape {tuple(value.shape)} "
            f"for {num_rows} rows of {site.size} unconstrained numbers. Cure: ({num_rows}, "
            f"{site.size})"
        )
    return value.reshape(num_rows, *rest).movedim(0, site.row_dim)


def _plate(
    frame: Any, data: RowData | None, read: Mapping[str, list[Tensor]], args: tuple, kwargs: dict
) -> pyro.plate:
    if data is None:
        return pyro.plate(frame.name, frame.full_size or frame.size, dim=frame.dim)
    rows = read[frame.name][0]
    num_rows, index = len(rows), None
    if data.index_place is not None:
        index = _places(args, kwargs).get(data.index_place)
    elif data.is_counted and num_rows < data.full_size:
        index = torch.arange(num_rows, device=rows.device)
    if index is not None:
        return pyro.plate(frame.name, data.full_size, subsample=index, dim=frame.dim)
    if data.size == data.full_size:
        return pyro.plate(frame.name, num_rows, dim=frame.dim)
    size = data.size if data.drawn_by_model else num_rows
    return pyro.plate(frame.name, data.full_size, subsample_size=size, dim=frame.dim)


class RowData:
    """The arguments of a model that have one row for each element of a plate.

    ``drawn_by_model`` is whether they have all rows, of which the model subsamples some, and
    ``index_place`` the argument with the indices of the rows, None if there is none. ``is_counted``
    is whether the model numbers the rows of a call from 0 on, in a plate of more rows. A plate of
    as many rows as the first call has the size of each call: ``pyro.plate("rows", len(x))``.

    :param plate: the plate.
    :param index: the site of its indices, if it has one.
    :param args: positional arguments of the model; ``kwargs`` are keyword arguments.
    :param reads_index: whether the encoder reads the argument with the indices, too.
    :raises ValueError: if the model sets indices that are no argument, or no argument has rows.
    """

    def __init__(
        self,
        plate: CondIndepStackFrame,
        index: Site | None,
        args: tuple,
        kwargs: dict[str, Any],
        reads_index: bool = False,
    ) -> None:
        self.plate_name, self.size = plate.name, plate.size
        self.full_size = plate.full_size or plate.size
        sizes = {self.size, self.full_size}
        self.places = [
            place
            for place, value in _places(args, kwargs).items()
            if isinstance(value, Tensor) and value.dim() > 0 and len(value) in sizes
        ]
        self.index_place: int | str | None = None
        self.is_counted = False
        if index is not None and index["fn"].subsample_size is None:  # the model gives them
            self._find_index(index["value"], args, kwargs)
        if not reads_index:
            self.places = [place for place in self.places if place != self.index_place]
        if self.size < 0:
            raise ValueError(
                f"plate '{plate.name}' has no size, so that its rows are not known. Cure: "
                f"pyro.plate('{plate.name}', len(x)) with the data x"
            )
        if not self.places:
            raise ValueError(
                f"plate '{plate.name}' has {plate.size} rows, but no argument of the model is a "
                f"tensor of {plate.size} rows for the encoder (the index of the rows does not "
                "count). Cure: pass the data as arguments, with rows as first dimension"
            )
        num_rows = len(self.read(args, kwargs)[0])
        self.drawn_by_model = self.size < num_rows == self.full_size

    def _find_index(self, index: Tensor, args: tuple, kwargs: dict[str, Any]) -> None:
        for place, value in _places(args, kwargs).items():
            if isinstance(value, Tensor) and torch.equal(value, index.to(value.device)):
                self.index_place = place
        is_counted = torch.equal(index, torch.arange(len(index), device=index.device))
        self.is_counted = is_counted and self.size < self.full_size
        if self.index_place is None and not is_counted:
            raise ValueError(
                f"the model gives plate '{self.plate_name}' the indices of its rows (subsample=), "
                "but none of its arguments equals them, so that the guide cannot give them, too. "
                "Cure: pass the indices to the model as an argument"
            )

    def read(self, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
        """Return these arguments of another call.

        :raises ValueError: if an argument is missing, or the numbers of rows differ.
        """
        places = _places(args, kwargs)
        values = []
        for place in self.places:
            value = places.get(place)
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"the encoder of plate '{self.plate_name}' reads argument {place!r} of the "
                    "model, a tensor of rows, which is missing. Cure: call the guide with all "
                    "arguments of its first call; for an argument that not every minibatch has, "
                    "such as labels, a guide with an encoder of your own in place of amortize"
                )
            values.append(value)
        if len({len(value) for value in values}) > 1:
            raise ValueError(
                f"the arguments {self.places} of the model have {[len(one) for one in values]} rows"
                f", but all count as data of plate '{self.plate_name}', because they had as many "
                "rows as the plate at the first call. Cure: a first call with another number of "
                "rows than other arguments have; or keep those out of the arguments"
            )
        return values


def _places(args: tuple, kwargs: dict[str, Any]) -> dict[int | str, Any]:
    places: dict[int | str, Any] = dict(enumerate(args))
    return places | kwargs
