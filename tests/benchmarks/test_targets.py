# SPDX-License-Identifier: Apache-2.0
"""Each target's model has the density its sampler draws from, and broadcasts over particles."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyro
import pytest
import torch
from pyro import poutine
from torch import Tensor

from benchmarks import targets

# The values of the sites for draws (n, dim), laid out under a particle plate at dimension -2.
LAYOUTS = {
    "banana": lambda x: {"x1": x[:, :1], "x2": x[:, 1:]},
    "x_shape": lambda x: {"x": x[:, None]},
    "x_shape_gap": lambda x: {"x": x[:, None]},
    "gmm40": lambda x: {"x": x[:, None]},
    "multimodal": lambda x: {"x": x[:, None]},
    "waveform": lambda x: {"beta": x[:, None]},
    "conditioned_diffusion": lambda x: {"u": x[:, None]},
    "funnel": lambda x: {"v": x[:, :1], "x": x[:, 1:]},
    "funnel_wide": lambda x: {"v": x[:, :1], "x": x[:, 1:]},
}


def model_log_density(target: targets.KnownPosterior, x: Tensor) -> Tensor:
    """The joint log density of the model at all rows of ``x``, from one run."""
    model = poutine.condition(target.model, LAYOUTS[target.name](x))
    with pyro.plate("particles", len(x), dim=-2):
        trace = poutine.trace(model).get_trace()
    trace.compute_log_prob()
    assert set(target.sites) <= set(trace.observation_nodes)
    return sum(trace.nodes[site]["log_prob"].sum(-1) for site in trace.observation_nodes)


def gaussian(x: Tensor, covariance: list[list[float]]) -> Tensor:
    """Log density of a centred Gaussian in two dimensions, by hand."""
    (a, b), (_, d) = covariance
    determinant = a * d - b * b
    square = (d * x[:, 0] ** 2 - 2 * b * x[:, 0] * x[:, 1] + a * x[:, 1] ** 2) / determinant
    return -0.5 * square - math.log(2 * math.pi) - 0.5 * math.log(determinant)


def half_and_half(first: Tensor, second: Tensor) -> Tensor:
    return torch.logaddexp(first, second) - math.log(2)


def banana(x: Tensor) -> Tensor:
    y = torch.stack([x[:, 0], x[:, 0] ** 2 + x[:, 1] + 1], dim=-1)
    return gaussian(y, [[1.0, 0.9], [0.9, 1.0]])


def x_shape(x: Tensor) -> Tensor:
    return half_and_half(*(gaussian(x, [[2.0, c], [c, 2.0]]) for c in (1.8, -1.8)))


def x_shape_gap(x: Tensor) -> Tensor:
    left, right = x + torch.tensor([5.0, 0.0]), x - torch.tensor([5.0, 0.0])
    rising, falling = gaussian(left, [[2.0, 1.8], [1.8, 2.0]]), [[2.0, -1.8], [-1.8, 2.0]]
    return half_and_half(rising, gaussian(right, falling))


def gmm40(x: Tensor) -> Tensor:
    squares = ((x[:, None] - targets.gmm40_centers()) ** 2).sum(-1)
    return (torch.exp(-0.5 * squares.double()).sum(-1) / 40 / (2 * math.pi)).log().float()


def multimodal(x: Tensor) -> Tensor:
    shift = torch.tensor([2.0, 0.0])
    return half_and_half(*(gaussian(x + s * shift, [[1.0, 0.0], [0.0, 1.0]]) for s in (1, -1)))


def funnel(x: Tensor, sd: float) -> Tensor:
    v, rest = x[:, 0], x[:, 1:]
    terms = v**2 / sd**2 + 9 * v + rest.square().sum(-1) * torch.exp(-v)
    return -0.5 * terms - math.log(sd) - 5 * math.log(2 * math.pi)


DENSITIES = {
    "banana": banana,
    "x_shape": x_shape,
    "x_shape_gap": x_shape_gap,
    "gmm40": gmm40,
    "multimodal": multimodal,
    "funnel": lambda x: funnel(x, 1.5),
    "funnel_wide": lambda x: funnel(x, 3.0),
}


@pytest.mark.parametrize("name", DENSITIES)
def test_model_density(name: str) -> None:
    dim = 10 if name.startswith("funnel") else 2
    x = 1.5 * torch.randn(50, dim, generator=torch.Generator().manual_seed(0))
    actual = model_log_density(targets.make_target(name), x)
    torch.testing.assert_close(actual, DENSITIES[name](x), rtol=1e-4, atol=1e-4)


# Expectations that a wrong sign, scale or correlation would miss: (name, function, expected).
MOMENTS = [
    ("banana", lambda x: x[:, 1], -2.0),
    ("banana", lambda x: (x[:, 1] + 2) ** 2, 3.0),
    ("banana", lambda x: x[:, 0] * x[:, 1], 0.9),
    ("banana", lambda x: x[:, 0] ** 2 * x[:, 1], -4.0),
    ("x_shape", lambda x: x[:, 0] * x[:, 1], 0.0),
    ("x_shape", lambda x: (x[:, 0] * x[:, 1]) ** 2, 4 + 2 * 1.8**2),
    ("x_shape", lambda x: x[:, 0] ** 2, 2.0),
    ("x_shape_gap", lambda x: x[:, 0], 0.0),
    ("x_shape_gap", lambda x: x[:, 0] ** 2, 2.0 + 5.0**2),
    ("x_shape_gap", lambda x: x[:, 0] * x[:, 1], 0.0),
    ("x_shape_gap", lambda x: x[:, 0].sign() * (x[:, 0] - 5) * x[:, 1], -1.8),
    ("x_shape_gap", lambda x: x[:, 1] ** 2, 2.0),
    ("multimodal", lambda x: x[:, 0], 0.0),
    ("multimodal", lambda x: x[:, 0] ** 2, 5.0),
    ("multimodal", lambda x: x[:, 0] ** 4, 43.0),
    ("multimodal", lambda x: x[:, 1] ** 2, 1.0),
    ("funnel", lambda x: x[:, 0] ** 2, 1.5**2),
    ("funnel", lambda x: x[:, 1] ** 2 * torch.exp(-x[:, 0]), 1.0),
    ("funnel", lambda x: x[:, 9] ** 2 * torch.exp(-x[:, 0]) * x[:, 0] ** 2, 1.5**2),
    ("funnel_wide", lambda x: x[:, 0] ** 2, 9.0),
]


@pytest.mark.parametrize(("name", "function", "expected"), MOMENTS)
def test_truth_moments(name, function, expected) -> None:
    values = function(targets.make_target(name).truth(200_000, 0))
    error = (values.mean() - expected) / (values.std() / math.sqrt(len(values)))
    assert abs(error) < 4


def test_gmm40_truth() -> None:
    centers = targets.gmm40_centers()
    draws = targets.make_target("gmm40").truth(200_000, 0)
    sd = draws.std(0) / math.sqrt(len(draws))
    assert ((draws.mean(0) - centers.mean(0)).abs() < 4 * sd).all()
    expected = torch.eye(2) + torch.cov(centers.T, correction=0)
    torch.testing.assert_close(torch.cov(draws.T), expected, rtol=0.02, atol=2.0)
    alone = torch.cdist(centers, centers).fill_diagonal_(torch.inf).min(-1).values > 8
    distances, nearest = torch.cdist(draws, centers).min(-1)
    assert alone.sum() > 5
    assert distances[alone[nearest]].square().mean().item() == pytest.approx(2, abs=0.05)


def test_gmm40_centers_are_the_same_in_both_precisions() -> None:
    single = targets.gmm40_centers()
    torch.set_default_dtype(torch.float64)
    double = targets.gmm40_centers()
    assert (single.dtype, double.dtype) == (torch.float32, torch.float64)
    assert double.shape == (40, 2)
    torch.testing.assert_close(single.double(), double, rtol=0, atol=1e-5)
    assert double.abs().max() < 40 < 42 < double.max() - double.min()


def test_priors_of_separated_modes_have_no_density() -> None:
    """Their draws only say where to search."""
    for name, scale in (("gmm40", 40.0), ("x_shape_gap", 10.0)):
        with pyro.plate("particles", 1000, dim=-1):
            trace = poutine.trace(targets.make_target(name).model).get_trace()
        trace.compute_log_prob()
        site = trace.nodes["x"]
        assert (site["log_prob"] == 0).all()
        assert site["value"].std().item() == pytest.approx(scale, rel=0.1)


def test_modes_found_by_hand() -> None:
    centers = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0], [10.0, 10.0]])
    draws = torch.zeros(400, 2)
    assert targets.modes_found(draws, centers) == 1
    draws[:10] = torch.tensor([10.0, 3.9])  # a tenth of 100
    assert targets.modes_found(draws, centers) == 2
    draws[9] = 0.0
    assert targets.modes_found(draws, centers) == 1
    draws[20:200] = torch.tensor([-3.0, 13.0])  # nearest to the third, at 4.24
    assert targets.modes_found(draws, centers) == 1
    assert targets.modes_found(draws, centers, radius=4.3) == 2


def test_weight_total_variation_by_hand() -> None:
    centers = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0], [10.0, 10.0]])
    assert targets.weight_total_variation(torch.zeros(8, 2), centers) == pytest.approx(0.75)
    assert targets.weight_total_variation(centers.repeat(3, 1) + 1, centers) == 0
    draws = centers[torch.tensor([0] * 40 + [1] * 30 + [2] * 20 + [3] * 10)]
    assert targets.weight_total_variation(draws, centers) == pytest.approx(0.2)


def test_exact_draws_of_gmm40_find_all_modes() -> None:
    draws = targets.make_target("gmm40").truth(10_000, 0)
    centers = targets.gmm40_centers()
    assert targets.modes_found(draws, centers) == 40
    assert targets.weight_total_variation(draws, centers) < 0.05


@pytest.mark.parametrize("name", DENSITIES)
def test_truth_depends_on_its_seed_alone(name: str) -> None:
    target = targets.make_target(name)
    first, again, other = target.truth(10, 3), target.truth(10, 3), target.truth(10, 4)
    assert torch.equal(first, again)
    assert not torch.isclose(first, other).any()


def test_flatten_orders_the_columns() -> None:
    target = targets.make_target("funnel")
    x = target.truth(5, 0)
    assert torch.equal(target.flatten({"x": x[:, 1:], "v": x[:, 0]}), x)


@pytest.fixture
def data_dir(tmp_path: Path) -> tuple[Path, Tensor, Tensor, Tensor]:
    """A small logistic regression in the layout of the waveform files, its posterior on a grid."""
    generator = np.random.default_rng(0)
    features = generator.normal(size=(30, 2)).astype(np.float32)
    labels = (generator.random(30) < 1 / (1 + np.exp(-features @ [1.0, -2.0]))).astype(np.int8)
    axis = np.linspace(-12, 12, 601)
    grid = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)
    margins = (2 * labels - 1) * (grid @ features.T)
    log_density = -np.logaddexp(0, -margins).sum(-1) - (grid**2).sum(-1) / 200
    weights = np.exp(log_density - log_density.max())
    weights /= weights.sum()
    rows = generator.choice(len(grid), 5000, p=weights)
    folder = tmp_path / "sivi_blr"
    folder.mkdir()
    np.savez(folder / "waveform.npz", X_train=features, y_train=labels)
    np.savez(folder / "waveform_hmc.npz", draws=grid[rows].astype(np.float32))
    points = torch.tensor(grid[rows[:50]]).float()
    return tmp_path, points, torch.tensor(log_density[rows[:50]]).float(), torch.tensor(grid[rows])


def test_waveform(data_dir) -> None:
    folder, points, log_density, start = data_dir
    target = targets.make_target("waveform", data_dir=folder)
    difference = model_log_density(target, points) - log_density
    torch.testing.assert_close(difference, difference[:1].expand(50), rtol=0, atol=1e-4)

    draws = target.truth(20_000, 1)
    sd = start.std(0)
    assert ((draws.mean(0) - start.mean(0)).abs() / sd < 0.06).all()
    assert ((draws.std(0) / sd - 1).abs() < 0.06).all()


def path_log_density(path: np.ndarray, y: np.ndarray, observed: np.ndarray) -> float:
    """Log density of one path, step by step, up to a constant."""
    dt, u, total = 1 / len(path), 0.0, 0.0
    for new in path:
        mean = u + dt * 10 * u * (1 - u**2) / (1 + u**2)
        total -= (new - mean) ** 2 / (2 * dt)
        u = new
    return total - ((path[observed - 1] - y) ** 2).sum() / 0.08


def test_conditioned_diffusion(tmp_path: Path) -> None:
    """On a made data set: paths around which the density differs by tens."""
    generator = np.random.default_rng(0)
    paths = generator.normal(scale=0.3, size=(41, 12)).cumsum(-1).astype(np.float32)
    y, observed = generator.normal(size=3).astype(np.float32), np.array([4, 8, 12])
    folder = tmp_path / "conditioned_diffusion"
    folder.mkdir()
    data = {"observations": y, "observed_steps": observed, "observation_sd": np.float32(0.2)}
    np.savez(folder / "100.npz", draws=paths, **data)
    target = targets.make_target("conditioned_diffusion", data_dir=tmp_path)

    expected = torch.tensor([path_log_density(path, y, observed) for path in paths]).float()
    difference = model_log_density(target, torch.tensor(paths)) - expected
    assert expected.std() > 10
    torch.testing.assert_close(difference, difference[:1].expand(41), rtol=0, atol=1e-3)

    for seed in (0, 8):
        halves = torch.cat([target.truth(100, seed), target.truth(100, seed + 1)])
        assert {tuple(row.tolist()) for row in halves} == {tuple(row) for row in paths.tolist()}
    assert torch.equal(target.truth(5, 3), target.truth(100, 3)[:5])
    assert not torch.equal(target.truth(5, 3), target.truth(5, 5))


def hmc_from_equilibrium(**settings) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    frame = torch.tensor([[2.0, 0.0], [1.0, 0.5]])
    precision = torch.linalg.inv(frame @ frame.T)
    start = torch.randn(20_000, 2, generator=generator) @ frame.T
    end = targets._hmc(
        lambda x: -0.5 * ((x @ precision) * x).sum(-1),
        lambda x: -x @ precision,
        start,
        frame,
        generator,
        **settings,
    )
    return start, end, frame @ frame.T


def test_hmc_forgets_its_start() -> None:
    start, end, _ = hmc_from_equilibrium()
    correlation = torch.corrcoef(torch.cat([start, end], dim=-1).T)[:2, 2:]
    assert correlation.abs().max() < 0.05


@pytest.mark.parametrize("step_size", [0.2, 1.4])
def test_hmc_stays_in_equilibrium(step_size: float) -> None:
    """Even with long steps, of which many must be rejected."""
    _, end, covariance = hmc_from_equilibrium(step_size=step_size, num_transitions=20)
    torch.testing.assert_close(torch.cov(end.T), covariance, rtol=0.04, atol=0.04)


def test_missing_data_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(targets.MissingData, match="waveform.npz not found: point --data-dir"):
        targets.make_target("waveform", data_dir=tmp_path)
