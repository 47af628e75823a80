# SPDX-License-Identifier: Apache-2.0
"""Loading posteriors: columns of regressions, sites of references; on files invented here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.posteriordb import designs
from benchmarks.posteriordb.data import EXTRA, NAMES, MissingData, load
from pyro_implicit.density.target import Target

RNG = np.random.default_rng(0)
SIZES = ("diam1", "diam2", "canopy_height", "total_height", "density", "weight")


def numbers(size: int | tuple[int, ...]) -> list[Any]:
    return RNG.uniform(0.5, 3.0, size=size).tolist()


DATA: dict[str, dict[str, Any]] = {
    "arK": {"K": 5, "T": 12, "y": numbers(12)},
    "bball_drive_event_0": {"u": numbers(6), "v": numbers(6), "alpha": [[4, 2], [2, 4]]},
    "earnings": {"earn": numbers(9), "height": numbers(9), "male": [0, 1] * 4 + [1]},
    "eight_schools": {"J": 8, "y": numbers(8), "sigma": numbers(8)},
    "gp_pois_regr": {"x": numbers(5), "y": numbers(5), "k": numbers(5)},
    "hudson_lynx_hare": {"ts": [1, 2, 3], "y_init": numbers(2), "y": numbers((3, 2))},
    "kidiq": {"kid_score": numbers(9), "mom_hs": [0, 1] * 4 + [1], "mom_iq": numbers(9)},
    "low_dim_gauss_mix": {"y": numbers(6)},
    "mesquite": {**{name: numbers(15) for name in SIZES}, "group": [0, 1, 1] * 5},
    "one_comp_mm_elim_abs": {"t0": 0, "D": 30, "V": 2, "times": [0.5, 1], "C_hat": numbers(2)},
    "sblrc": {"X": numbers((9, 5)), "y": numbers(9)},
}
DATA["kidiq_with_mom_work"] = DATA["kidiq"] | {"mom_work": [1, 2, 3, 4, 4, 2, 1, 3, 3]}
DATA["sblri"] = DATA["sblrc"]
NES = ("real_ideo", "race_adj", "educ1", "gender", "income", "partyid7")
for year in range(1972, 1997, 4):
    DATA[f"nes{year}"] = {name: numbers(15) for name in NES} | {"age_discrete": [1, 2, 3, 4, 4] * 3}

# The reference's columns, in its order: a site and its size (0: a scalar).
COLUMNS: dict[str, dict[str, int]] = {
    "arK-arK": {"alpha": 0, "beta": 5, "sigma": 0},
    "bball_drive_event_0-hmm_drive_0": {"theta1": 2, "theta2": 2, "phi": 2, "lambda": 2},
    "eight_schools-eight_schools_centered": {"theta": 8, "mu": 0, "tau": 0},
    "eight_schools-eight_schools_noncentered": {"theta": 8, "mu": 0, "tau": 0},
    "gp_pois_regr-gp_regr": {"rho": 0, "alpha": 0, "sigma": 0},
    "hudson_lynx_hare-lotka_volterra": {"theta": 4, "z_init": 2, "sigma": 2},
    "low_dim_gauss_mix-low_dim_gauss_mix": {"mu": 2, "sigma": 2, "theta": 0},
    "one_comp_mm_elim_abs-one_comp_mm_elim_abs": {"k_a": 0, "K_m": 0, "V_m": 0, "sigma": 0},
}
COEFFICIENTS = {
    "earnings-earn_height": 2,
    "earnings-log10earn_height": 2,
    "earnings-logearn_height": 2,
    "earnings-logearn_height_male": 3,
    "earnings-logearn_interaction_z": 4,
    "earnings-logearn_logheight_male": 3,
    "kidiq-kidscore_interaction": 4,
    "kidiq-kidscore_momhs": 2,
    "kidiq-kidscore_momhsiq": 3,
    "kidiq-kidscore_momiq": 2,
    "kidiq_with_mom_work-kidscore_interaction_c": 4,
    "kidiq_with_mom_work-kidscore_interaction_c2": 4,
    "kidiq_with_mom_work-kidscore_mom_work": 4,
    "mesquite-logmesquite": 7,
    "mesquite-logmesquite_logva": 4,
    "mesquite-logmesquite_logvash": 6,
    "mesquite-logmesquite_logvolume": 2,
    "mesquite-mesquite": 7,
    "sblrc-blr": 5,
    "sblri-blr": 5,
} | {f"nes{year}-nes": 9 for year in range(1972, 1997, 4)}
COLUMNS |= {name: {"beta": size, "sigma": 0} for name, size in COEFFICIENTS.items()}
NUM_DRAWS = 6


def invented_draws(columns: dict[str, int]) -> dict[str, np.ndarray]:
    """Positive, increasing in the columns of a site; probabilities where they have to be."""
    draws = {
        site: np.sort(RNG.uniform(0.1, 0.9, (NUM_DRAWS, size or 1)))
        for site, size in columns.items()
    }
    for site in {"theta1", "theta2"} & set(draws):
        draws[site] /= draws[site].sum(-1, keepdims=True)
    return draws


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "posteriordb"
    folder.mkdir()
    for name, columns in COLUMNS.items():
        names = [
            label
            for site, size in columns.items()
            for label in ([f"{site}[{k + 1}]" for k in range(size)] or [site])
        ]
        draws = np.concatenate(list(invented_draws(columns).values()), axis=-1)
        np.savez(folder / f"{name}.npz", names=names, draws=draws.astype(np.float32))
        (folder / f"{name}.json").write_text(json.dumps(DATA[name.split("-")[0]]))
    return tmp_path


def saved(data_dir: Path, name: str) -> dict[str, Tensor]:
    """The columns by their names."""
    file = np.load(data_dir / "posteriordb" / f"{name}.npz")
    columns = torch.tensor(file["draws"]).double().unbind(-1)
    return dict(zip(file["names"].tolist(), columns, strict=True))


def test_there_are_35() -> None:
    assert len(NAMES) == len(set(NAMES)) == 35 and set(NAMES) == set(COLUMNS)


@pytest.mark.parametrize("name", NAMES + EXTRA)
def test_models_take_their_data_and_draws(name: str, data_dir: Path) -> None:
    torch.set_default_dtype(torch.float64)
    posterior = load(name, data_dir)
    draws = posterior.reference()
    density = Target(posterior.model, *posterior.args)
    assert list(draws) == list(density.shapes)
    columns = np.hstack([np.atleast_1d(columns) for columns in posterior.sites.values()])
    assert sorted(columns) == list(range(posterior.saved.shape[-1]))
    latents = posterior.unconstrain({site: values.float() for site, values in draws.items()})
    assert latents.shape == (NUM_DRAWS, density.latent_dim) and latents.dtype == torch.float64
    for site, values in density.constrain(latents).items():
        torch.testing.assert_close(values, draws[site], rtol=1e-5, atol=1e-5)
    assert density.log_prob(latents).isfinite().all()
    assert density.is_vectorized


def test_unconstrained_coordinates(data_dir: Path) -> None:
    name = "low_dim_gauss_mix-low_dim_gauss_mix"
    posterior, columns = load(name, data_dir), saved(data_dir, name)
    first, second, theta = columns["mu[1]"], columns["mu[2]"], columns["theta"]
    expected = [first, (second - first).log(), columns["sigma[1]"].log()]
    expected += [columns["sigma[2]"].log(), (theta / (1 - theta)).log()]
    found = posterior.unconstrain(posterior.reference())
    torch.testing.assert_close(found, torch.stack(expected, dim=-1))


def test_standardised_effects(data_dir: Path) -> None:
    name = "eight_schools-eight_schools_noncentered"
    columns, draws = saved(data_dir, name), load(name, data_dir).reference()
    fifth = (columns["theta[5]"] - columns["mu"]) / columns["tau"]
    torch.testing.assert_close(draws["theta_trans"][:, 4], fifth)
    torch.testing.assert_close(draws["tau"], columns["tau"])


def test_unordered_mixture_has_both_orders(data_dir: Path) -> None:
    ordered = load("low_dim_gauss_mix-low_dim_gauss_mix", data_dir).reference()
    draws = load("low_dim_gauss_mix_unordered", data_dir).reference()
    for site in ("mu", "sigma"):
        torch.testing.assert_close(draws[site][::2], ordered[site][::2])
        torch.testing.assert_close(draws[site][1::2], ordered[site][1::2, [1, 0]])
    torch.testing.assert_close(draws["theta"][::2], ordered["theta"][::2])
    torch.testing.assert_close(draws["theta"][1::2], 1 - ordered["theta"][1::2])


def test_missing_files_name_the_cure(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match=r"arK-arK.json not found: point --data-dir at"):
        load("arK-arK", tmp_path)


def first_row(design: Any, data: dict[str, Any]) -> tuple[list[float], float]:
    X, y = design(data)
    assert X.shape == (len(y), X.shape[-1]) and X.dtype == y.dtype == torch.float64
    return X[0].tolist(), y[0].item()


def test_lags() -> None:
    X, y = designs.autoregression({"K": 3, "y": [1, 2, 3, 4, 5]})
    assert X.tolist() == [[3, 2, 1], [4, 3, 2]] and y.tolist() == [4, 5]


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("log10earn_height", [60.0]),
        ("logearn_height_male", [60.0, 1.0]),
        ("logearn_logheight_male", [np.log(60), 1.0]),
        ("logearn_interaction_z", [-1.0, 1.0, -1.0]),
    ],
)
def test_earnings(kind: str, expected: list[float]) -> None:
    data = {"earn": [100, 1, 1], "height": [60, 62, 64], "male": [1, 0, 1]}
    row, y = first_row(designs.earnings(kind), data)
    assert row == pytest.approx([1.0, *expected])
    assert y == pytest.approx(2.0 if kind.startswith("log10") else np.log(100))


def test_centred_interaction() -> None:
    data = {"kid_score": [7, 8], "mom_hs": [1, 0], "mom_iq": [90, 120]}
    design = designs.kidscore(lambda hs, iq: (hs.mean(), 100))
    assert first_row(design, data) == ([1, 0.5, -10, -5], 7)


def test_levels_of_work() -> None:
    X, _ = designs.mom_work({"kid_score": [1] * 4, "mom_work": [1, 2, 3, 4]})
    assert X.tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("logmesquite", [2, 3, 5, 7, 11]),
        ("logmesquite_logvolume", [30]),
        ("logmesquite_logva", [30, 6]),
        ("logmesquite_logvash", [30, 6, 2 / 3, 7]),
    ],
)
def test_log_mesquite(kind: str, expected: list[float]) -> None:
    data = {name: [value] for name, value in zip(SIZES, (2, 3, 5, 7, 11, 13), strict=True)}
    row, y = first_row(designs.log_mesquite(kind), data | {"group": [4]})
    group = [] if kind == "logmesquite_logvolume" else [4]
    assert row == pytest.approx([1, *np.log(expected), *group]) and y == pytest.approx(np.log(13))


def test_nes() -> None:
    data = {name: [value] for value, name in enumerate(NES, 10)} | {"age_discrete": [3]}
    assert first_row(designs.nes, data) == ([1, 10, 11, 0, 1, 0, 12, 13, 14], 15)
