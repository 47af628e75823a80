# SPDX-License-Identifier: Apache-2.0
"""Latents and arguments of a model that belong to the rows of its data."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from pyro import poutine
from pyro.poutine.indep_messenger import CondIndepStackFrame
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import biject_to

__all__ = ["LocalSite", "RowData", "find_local_sites", "trace_model"]


class LocalSite(NamedTuple):
    """A latent of each row: its plates, ``rows`` among them, the shape of its unconstrained values,
    the dimension of the rows in this shape, and its support.
    """

    name: str
    plates: tuple[CondIndepStackFrame, ...]
    rows: CondIndepStackFrame
    shape: torch.Size
    row_dim: int
    support: Any
    event_dim: int

    @property
    def size(self) -> int:
        """Unconstrained numbers of each row."""
        return self.shape.numel() // self.shape[self.row_dim]


def trace_model(model: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Trace one run of the model, hidden from outer handlers."""
    with torch.no_grad(), poutine.block():
        return poutine.trace(model).get_trace(*args, **kwargs)


def find_local_sites(trace: Any, names: Collection[str] | None = None) -> list[LocalSite]:
    """Find the latents of single rows.

    :param trace: trace of the model.
    :param names: names of the sites; by default all in subsampled plates.
    :raises ValueError: for no such latents, or a name that is not a latent in one plate of rows.
    """
    found = []
    for name, site in trace.nodes.items():
        if site["type"] != "sample" or site["is_observed"] or site_is_subsample(site):
            continue
        plates = tuple(site["cond_indep_stack"])
        subsampled = [one for one in plates if one.full_size not in (None, one.size)]
        if names is None and not subsampled:
            continue
        if names is not None and name not in names:
            if subsampled:
                raise ValueError(
                    f"latent '{name}' lies in plate '{subsampled[0].name}', which is subsampled, "
                    f"but amortize= names only {sorted(names)}. Cure: name it, too"
                )
            continue
        candidates = subsampled or list(plates)
        if len(candidates) != 1:
            raise ValueError(
                f"latent '{name}' lies in the plates {[one.name for one in candidates]}, but the "
                "plate of the data's rows must be unique. Cure: subsample the plate of the rows"
            )
        found.append(_local_site(name, site, plates, candidates[0]))
    missing = sorted(set(names or ()) - {site.name for site in found})
    if missing:
        raise ValueError(
            f"amortize= names '{missing[0]}', which is not a latent of the model. Its latents are "
            f"{[name for name in trace.stochastic_nodes]}"
        )
    if not found:
        raise ValueError(
            "amortize='auto' is for latents in a subsampled plate, and the model has none. Cure: "
            "pyro.plate(name, number_of_all_rows, subsample_size=len(x)), or name the latents"
        )
    return found


def _local_site(
    name: str, site: Any, plates: tuple[CondIndepStackFrame, ...], rows: CondIndepStackFrame
) -> LocalSite:
    fn = site["fn"]
    value = biject_to(fn.support).inv(site["value"])
    num_batch = len(fn.batch_shape)
    if rows.dim is None:
        raise ValueError(
            f"latent '{name}' lies in the sequential plate '{rows.name}'. Cure: with pyro.plate"
        )
    support = fn.support
    return LocalSite(
        name, plates, rows, value.shape, num_batch + rows.dim, support, len(fn.event_shape)
    )


class RowData:
    """The arguments of a model that have one row for each element of a plate.

    ``drawn_by_model`` is whether they have all rows, of which the model subsamples some.
    """

    def __init__(self, plate: CondIndepStackFrame, args: tuple, kwargs: dict[str, Any]) -> None:
        self.plate_name, self.size = plate.name, plate.size
        self.full_size = plate.full_size or plate.size
        sizes = {self.size, self.full_size}
        self.places = [
            place
            for place, value in _places(args, kwargs).items()
            if isinstance(value, Tensor) and value.dim() > 0 and len(value) in sizes
        ]
        if not self.places:
            raise ValueError(
                f"plate '{plate.name}' has {plate.size} rows, but no argument of the model is a "
                "tensor of so many rows for the encoder. Cure: pass the data as arguments, with "
                "rows as first dimension"
            )
        num_rows = len(self.read(args, kwargs)[0])
        self.drawn_by_model = self.size < num_rows == self.full_size

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
                    "arguments of its first call"
                )
            values.append(value)
        if len({len(value) for value in values}) > 1:
            raise ValueError(
                f"the arguments {self.places} have {[len(value) for value in values]} rows, but "
                f"the arguments of plate '{self.plate_name}' must have equal numbers"
            )
        return values


def _places(args: tuple, kwargs: dict[str, Any]) -> dict[int | str, Any]:
    places: dict[int | str, Any] = dict(enumerate(args))
    return places | kwargs
