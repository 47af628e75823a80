# SPDX-License-Identifier: Apache-2.0
"""Thirty-five posteriors of posteriordb: models, data and 10,000 reference draws each.

The files come from https://github.com/stan-dev/posteriordb (BSD-3-Clause): ``<name>.json`` has
the data, ``<name>.npz`` the draws (``draws``, one column for each of ``names``), both in the folder
``posteriordb/`` of the data folder.

**References:**

[1] `posteriordb: Testing, Benchmarking and Developing Bayesian Inference Algorithms`,
M. Magnusson et al., AISTATS 2025.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.posteriordb import designs, differential_equations, models, regressions
from pyro_implicit.density.target import Target

__all__ = ["EXTRA", "NAMES", "MissingData", "Posterior", "load"]

Draws = dict[str, Tensor]


class MissingData(Exception):
    """The files of a posterior are missing in ``--data-dir``."""


class _Entry(NamedTuple):
    """How one posterior is made from its files."""

    model: Callable[..., None]
    design: Callable[[designs.Data], tuple[Tensor, ...]]
    sites: tuple[str, ...] = ("beta", "sigma")  # as in the reference, in the model's order
    adapt: Callable[[Draws], Draws] = lambda draws: draws  # from sites of the reference to ours


def _standardise(draws: Draws) -> Draws:
    mu, tau, theta = draws["mu"], draws["tau"], draws["theta"]
    return {"mu": mu, "tau": tau, "theta_trans": (theta - mu[:, None]) / tau[:, None]}


def _normalise(draws: Draws) -> Draws:
    """Normalise rows of probabilities that were saved in single precision."""
    rows = {name: draws[name] / draws[name].sum(-1, keepdim=True) for name in ("theta1", "theta2")}
    return draws | rows


def _both_orders(draws: Draws) -> Draws:
    """Swap the components of every second draw: both orders are equally probable."""
    swap = torch.arange(len(draws["theta"])) % 2 == 1
    mu, sigma = (
        torch.where(swap[:, None], draws[name].flip(-1), draws[name]) for name in ("mu", "sigma")
    )
    theta = torch.where(swap, 1 - draws["theta"], draws["theta"])
    return {"mu": mu, "sigma": sigma, "theta": theta}


_FLAT, _CAUCHY = regressions.flat_regression, regressions.half_cauchy_regression
_SIZES = ("diam1", "diam2", "canopy_height", "total_height", "density", "group")
_SCHOOLS, _MIXTURE = ("mu", "tau", "theta"), ("mu", "sigma", "theta")


def _kidscore(*predictors: str) -> _Entry:
    return _Entry(_CAUCHY, designs.columns("kid_score", *predictors))


_ENTRIES = {
    "arK-arK": _Entry(
        regressions.autoregression, designs.autoregression, ("alpha", "beta", "sigma")
    ),
    "bball_drive_event_0-hmm_drive_0": _Entry(
        models.hmm_drive,
        designs.tensors("u", "v", "alpha"),
        ("theta1", "theta2", "phi", "lambda"),
        _normalise,
    ),
    "earnings-earn_height": _Entry(_FLAT, designs.columns("earn", "height")),
    **{
        f"earnings-{kind}": _Entry(_FLAT, designs.earnings(kind))
        for kind in (
            "log10earn_height",
            "logearn_height",
            "logearn_height_male",
            "logearn_interaction_z",
            "logearn_logheight_male",
        )
    },
    "eight_schools-eight_schools_centered": _Entry(
        models.eight_schools_centered, designs.tensors("y", "sigma"), _SCHOOLS
    ),
    "eight_schools-eight_schools_noncentered": _Entry(
        models.eight_schools_noncentered, designs.tensors("y", "sigma"), _SCHOOLS, _standardise
    ),
    "gp_pois_regr-gp_regr": _Entry(
        models.gp_regression, designs.tensors("x", "y"), ("rho", "alpha", "sigma")
    ),
    "hudson_lynx_hare-lotka_volterra": _Entry(
        differential_equations.lotka_volterra,
        designs.tensors("ts", "y_init", "y"),
        ("theta", "z_init", "sigma"),
    ),
    "kidiq-kidscore_interaction": _Entry(_CAUCHY, designs.kidscore(lambda hs, iq: (0, 0))),
    "kidiq-kidscore_momhs": _kidscore("mom_hs"),
    "kidiq-kidscore_momhsiq": _kidscore("mom_hs", "mom_iq"),
    "kidiq-kidscore_momiq": _kidscore("mom_iq"),
    "kidiq_with_mom_work-kidscore_interaction_c": _Entry(
        _FLAT, designs.kidscore(lambda hs, iq: (hs.mean(), iq.mean()))
    ),
    "kidiq_with_mom_work-kidscore_interaction_c2": _Entry(
        _FLAT, designs.kidscore(lambda hs, iq: (0.5, 100))
    ),
    "kidiq_with_mom_work-kidscore_mom_work": _Entry(_FLAT, designs.mom_work),
    "low_dim_gauss_mix-low_dim_gauss_mix": _Entry(models.gauss_mix, designs.tensors("y"), _MIXTURE),
    **{
        f"mesquite-{kind}": _Entry(_FLAT, designs.log_mesquite(kind))
        for kind in (
            "logmesquite",
            "logmesquite_logva",
            "logmesquite_logvash",
            "logmesquite_logvolume",
        )
    },
    "mesquite-mesquite": _Entry(_FLAT, designs.columns("weight", *_SIZES)),
    **{f"nes{year}-nes": _Entry(_FLAT, designs.nes) for year in range(1972, 1997, 4)},
    "one_comp_mm_elim_abs-one_comp_mm_elim_abs": _Entry(
        differential_equations.one_compartment,
        designs.tensors("times", "C_hat", "D", "V"),
        ("k_a", "K_m", "V_m", "sigma"),
    ),
    "sblrc-blr": _Entry(regressions.blr, designs.tensors("X", "y")),
    "sblri-blr": _Entry(regressions.blr, designs.tensors("X", "y")),
}
_EXTRA_ENTRIES = {
    "low_dim_gauss_mix_unordered": _Entry(
        models.gauss_mix_unordered, designs.tensors("y"), _MIXTURE, _both_orders
    )
}
_FILES = {"low_dim_gauss_mix_unordered": "low_dim_gauss_mix-low_dim_gauss_mix"}

NAMES = tuple(_ENTRIES)
EXTRA = tuple(_EXTRA_ENTRIES)


@dataclass(frozen=True)
class Posterior:
    """A model with its data, and draws of its posterior.

    :param name: one of :data:`NAMES` or :data:`EXTRA`.
    :param model: an ordinary Pyro model.
    :param args: its arguments, float64.
    :param sites: the columns of ``saved``, by the reference's sites; one number for a scalar.
    :param saved: the reference draws as saved, shape ``(10000, num_columns)``.
    :param adapt: makes the latents of the model from the sites of the reference.
    """

    name: str
    model: Callable[..., None]
    args: tuple[Tensor, ...]
    sites: dict[str, int | list[int]]
    saved: Tensor
    adapt: Callable[[Draws], Draws]

    def reference(self) -> Draws:
        """The reference draws, by latent site of the model: shape ``(10000, *site_shape)``."""
        return self.adapt({site: self.saved[:, columns] for site, columns in self.sites.items()})

    def unconstrain(self, draws: Draws) -> Tensor:
        """Convert draws of all latent sites to vectors in unconstrained space.

        :param draws: by site, ``(num_draws, *site_shape)``.
        :returns: shape ``(num_draws, dim)``, float64, in the order in which the model samples.
        """
        draws = {site: values.double() for site, values in draws.items()}
        return Target(self.model, *self.args).unconstrain(draws)


def _columns(names: list[str], site: str) -> int | list[int]:
    if site in names:
        return names.index(site)
    return [column for column, name in enumerate(names) if name.startswith(f"{site}[")]


def load(name: str, data_dir: Path | None = None) -> Posterior:
    """Read a posterior.

    :param name: one of :data:`NAMES` or :data:`EXTRA`.
    :param data_dir: the folder that contains ``posteriordb``.
    :raises MissingData: if the posterior's files are missing.
    """
    entry = {**_ENTRIES, **_EXTRA_ENTRIES}[name]
    stem = Path(data_dir or ".") / "posteriordb" / _FILES.get(name, name)
    for path in (Path(f"{stem}.json"), Path(f"{stem}.npz")):
        if not path.exists():
            raise MissingData(f"{path} not found: point --data-dir at its folder's parent")
    with np.load(f"{stem}.npz") as reference:
        names, saved = reference["names"].tolist(), torch.tensor(reference["draws"]).double()
    args = entry.design(json.loads(Path(f"{stem}.json").read_text()))
    sites = {site: _columns(names, site) for site in entry.sites}
    return Posterior(name, entry.model, args, sites, saved, entry.adapt)
