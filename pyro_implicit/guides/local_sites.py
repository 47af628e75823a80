# SPDX-License-Identifier: Apache-2.0
"""Latent variables of single rows: which sites they are, and normals with their own parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from pyro.nn import PyroModule, PyroParam
from pyro.poutine.indep_messenger import CondIndepStackFrame
from torch import Tensor
from torch.distributions import biject_to, constraints

from pyro_implicit.guides.policy import ROW_SLOPE
from pyro_implicit.runtime.sites import attribute_name, is_data, is_discrete_latent, is_latent

__all__ = ["LocalSite", "RowNormals", "RowStart", "find_local_sites"]


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
    def key(self) -> str:
        """The name, as part of the name of a parameter."""
        return attribute_name(self.name)

    @property
    def size(self) -> int:
        """Unconstrained numbers of each row."""
        return self.shape.numel() // self.shape[self.row_dim]


def find_local_sites(
    trace: Any, names: Collection[str] | None = None, row_plates: Collection[str] | None = None
) -> list[LocalSite]:
    """Find the continuous latents of single rows; the ELBO sums discrete ones out.

    :param trace: trace of the model.
    :param names: names of the sites; by default all in subsampled plates, or without such a plate,
        all in plates of data.
    :param row_plates: names of the plates of rows; by default the subsampled ones,
        or without any, all with data.
    :raises ValueError: for no such latents, or a name that is not a continuous latent in one plate
        of rows.
    """
    found, rows_of_data = [], _plates_of_rows(trace) if row_plates is None else row_plates
    for name, site in trace.nodes.items():
        if is_discrete_latent(site) and name in (names or ()):
            raise ValueError(
                f"amortize= names '{name}', a discrete latent, which has no encoder: it is summed "
                "out. Cure: leave it out of amortize="
            )
        if not is_latent(site) or is_discrete_latent(site):
            continue
        plates = tuple(site["cond_indep_stack"])
        of_rows = [one for one in plates if one.name in rows_of_data]
        subsampled = [one for one in of_rows if _is_subsampled(one)]
        if names is None and not of_rows:
            continue
        if names is not None and name not in names:
            if subsampled:
                raise ValueError(
                    f"latent '{name}' lies in plate '{subsampled[0].name}', which is subsampled, "
                    f"but amortize= names only {sorted(names)}. Cure: name it, too"
                )
            continue
        candidates = subsampled or (of_rows if names is None else list(plates))
        if len(candidates) != 1:
            raise ValueError(
                f"latent '{name}' lies in the plates {[one.name for one in candidates]}, but the "
                "plate of the data's rows must be unique. Cure: subsample the plate of the rows"
            )
        (rows,), fn = candidates, site["fn"]
        if rows.dim is None:
            raise ValueError(
                f"latent '{name}' lies in the sequential plate '{rows.name}'. Cure: with pyro.plate"
            )
        shape = biject_to(fn.support).inv(site["value"]).shape
        row_dim = len(fn.batch_shape) + rows.dim
        found.append(LocalSite(name, plates, rows, shape, row_dim, fn.support, fn.event_dim))
    missing = sorted(set(names or ()) - {site.name for site in found})
    if missing:
        raise ValueError(
            f"amortize= names '{missing[0]}', which is not a latent of the model. Its latents are "
            f"{[name for name in trace.stochastic_nodes]}"
        )
    if not found:
        raise ValueError(
            "amortize='auto' is for continuous latents in a plate of data, and the model has none. "
            "Cure: no amortize=, if its latents of rows are discrete; else "
            "pyro.plate(name, number_of_all_rows, subsample_size=len(x)), or name the latents"
        )
    return found


def _plates_of_rows(trace: Any) -> set[str]:
    """Return the names of the subsampled plates, or without any, of those with data.

    :param trace: trace of the model.
    """
    sites = [one for one in trace.nodes.values() if is_latent(one) or is_data(one)]
    frames = [(frame, is_data(one)) for one in sites for frame in one["cond_indep_stack"]]
    subsampled = {frame.name for frame, _ in frames if _is_subsampled(frame)}
    return subsampled or {frame.name for frame, has_data in frames if has_data}


def _is_subsampled(frame: CondIndepStackFrame) -> bool:
    return frame.full_size not in (None, frame.size)


class RowStart(NamedTuple):
    """Initial values of one site's rows of a minibatch, in unconstrained space.

    ``loc`` and ``scale`` have the shape of the site's values, ``slope`` ends in a dimension of the
    other latent variables.
    """

    loc: Tensor
    scale: Tensor
    slope: Tensor


class RowNormals(PyroModule):
    r"""Normals of latent variables of rows, given the others, with parameters of each row.

    In unconstrained space, row i has
    :math:`z_i = \mu_i + (B + \beta B_i) (u - c) + \sigma_i \epsilon_i`, where u are the other
    latent variables and c a point in their middle. Without slopes, the rows would be independent of
    the others, whose posterior would be too narrow. All rows learn B, and :math:`B_i` corrects it.
    The constant :math:`\beta` makes this correction slow: its noise in many rows would narrow the
    posterior of those latent variables that the rows hardly determine.

    :param sites: the latent variables of rows.
    :param starts: initial values of the rows of a minibatch, by site. Other rows begin at their
        mean.
    :param index: the indices of these rows, by site.
    """

    def __init__(
        self,
        sites: Collection[LocalSite],
        starts: Mapping[str, RowStart],
        index: Mapping[str, Tensor],
    ) -> None:
        super().__init__()
        for site in sites:
            loc, scale, slope = starts[site.name]
            shared = slope.mean(site.row_dim, keepdim=True)
            values = {"loc": loc, "scale": scale, "slope": (slope - shared) / ROW_SLOPE}
            for name, value in values.items():
                whole = value.mean(site.row_dim, keepdim=True)
                whole = whole.repeat_interleave(site.rows.full_size, site.row_dim)
                whole.index_copy_(site.row_dim, index[site.name].to(value.device).long(), value)
                support = constraints.positive if name == "scale" else constraints.real
                setattr(self, f"{name}_{site.key}", PyroParam(whole, support))
            setattr(self, f"shared_{site.key}", PyroParam(shared))

    def posterior(self, site: LocalSite, step: Tensor, index: Tensor) -> dist.TorchDistribution:
        """Return the distribution of some rows, in the support of the site.

        :param site: the latent variable.
        :param step: u - c, ``(*batch, latent_dim)``, with a dimension in ``batch`` for each
            dimension of the plates of the site, or none.
        :param index: index of the rows.
        """
        num_batch = site.row_dim - site.rows.dim
        names = ("loc", "scale", "slope")
        loc, scale, slope = (
            getattr(self, f"{name}_{site.key}").index_select(site.row_dim, index) for name in names
        )
        num_events = loc.dim() - num_batch
        step = step.reshape(*step.shape[:-1], *(1,) * num_events, step.shape[-1])
        slope = ROW_SLOPE * slope + getattr(self, f"shared_{site.key}")
        base = dist.Normal(loc + (slope * step).sum(-1), scale).to_event(num_events)
        return dist.TransformedDistribution(base, [biject_to(site.support)])
