# SPDX-License-Identifier: Apache-2.0
"""The adjusted microcanonical sampler, against targets whose moments are known."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_implicit.mcmc import refine
from pyro_implicit.mcmc.kernels import mams, mclmc

DIM = 10
PRECISION = torch.logspace(-1, 1, DIM, dtype=torch.float64)
NOISE = 0.1


def gaussian(z):
    return -0.5 * (PRECISION * z.square()).sum(-1), -PRECISION * z


def rosenbrock(z):
    """Five pairs: x of N(1, 1), and y of N(x^2, NOISE)."""
    x, y = z.chunk(2, -1)
    rest = (y - x.square()) / NOISE
    density = -0.5 * ((x - 1).square() + NOISE * rest.square()).sum(-1)
    return density, torch.cat([1 - x + 2 * x * rest, -rest], -1)


def draws_of(target, number):
    noise = torch.randn(number, DIM, dtype=torch.float64)
    if target is gaussian:
        return noise / PRECISION.sqrt()
    x = 1 + noise[:, :5]
    return torch.cat([x, x.square() + math.sqrt(NOISE) * noise[:, 5:]], -1)


def quantities(target, z):
    """Return averages of 0 and 1 in turn, and their standard errors."""
    if target is gaussian:
        white = z * PRECISION.sqrt()
    else:
        x, y = z.chunk(2, -1)
        white = torch.cat([x - 1, (y - x.square()) / math.sqrt(NOISE)], -1)
    moments = torch.stack([white.mean(0), white.square().mean(0) - 1])
    errors = torch.tensor([1.0, math.sqrt(2.0)]).unsqueeze(-1) / math.sqrt(len(z))
    return moments / errors


def settings(state, size, num_steps, length=math.inf):
    ones = torch.ones_like(state.position[:, :1])
    return mams.Settings(mclmc.Settings(size * ones, length * ones, num_steps))


def test_exact_draws_stay_exact():
    """At a step size where the kernel without adjustment is wrong by many standard errors."""
    torch.manual_seed(0)
    target, size = rosenbrock, 0.65
    first = draws_of(target, 4000)
    state = other = mams.init(first, target)
    acceptance = []
    for _ in range(35):
        options = settings(state, size, 6, length=2.0)
        state, info = mams.step(state, target, options)
        other, _ = mams.step(other, target, options._replace(is_adjusted=False))
        acceptance.append(info.acceptance.mean())
    assert 0.3 < torch.stack(acceptance).mean() < 0.95
    moved = (state.position - first).square().mean(0) / first.var(0)
    assert moved.min() > 0.3
    assert quantities(target, state.position).abs().max() < 4.5  # the largest of twenty
    assert quantities(target, other.position).abs().max() > 9


def test_short_paths_in_two_dimensions_stay_exact():
    """A direction that only accepted chains refresh would narrow the first axis by six per cent."""
    torch.manual_seed(0)
    scale = torch.tensor([1.0, 0.35])

    def target(z):
        return -0.5 * (z / scale).square().sum(-1), -z / scale.square()

    state = mams.init(scale * torch.randn(100_000, 2), target)
    for _ in range(20):
        state, info = mams.step(state, target, settings(state, 0.9, 1, length=0.9))
    assert info.acceptance.mean() < 0.95
    ratio = (state.position / scale).square().mean(0)
    assert (ratio - 1).abs().max() < 4 * math.sqrt(2 / 100_000)


@pytest.mark.parametrize(("target", "size"), [(gaussian, 1.8), (rosenbrock, 0.25)])
def test_energy_errors_of_exact_draws_average_to_one(target, size):
    """E exp(-Delta) = 1, because a path maps the density to itself times exp(-Delta)."""
    torch.manual_seed(0)
    state = mams.init(draws_of(target, 20_000), target)
    _, info = mams.step(state, target, settings(state, size, 6, length=2.0))
    weights = (-info.energy_error).exp()
    error = weights.std() / math.sqrt(len(weights))
    assert error < 0.01 and info.energy_error.mean() > 4.5 * error
    assert abs(weights.mean() - 1) < 4.5 * error


def test_energy_error_is_of_third_order():
    torch.manual_seed(0)
    state = mams.init(draws_of(rosenbrock, 2000), rosenbrock)
    errors = [
        mams.step(state, rosenbrock, settings(state, size, 1))[1].energy_error.square().mean()
        for size in (0.02, 0.01)
    ]
    assert abs(math.log2(errors[0] / errors[1]) - 6) < 0.1  # squared


def test_energy_error_is_that_of_the_volume():
    """A path changes volumes by exp(-Delta K): the Jacobian in two dimensions, by autograd."""
    precision = torch.tensor([0.5, 3.0], dtype=torch.float64)

    def score(z):
        return -0.5 * (precision * z.square()).sum(-1), -precision * z

    def walk(point):
        z, angle = point[:2].unsqueeze(0), point[2]
        u = torch.stack([angle.cos(), angle.sin()]).unsqueeze(0)
        state = mclmc.State(z, u, *score(z))
        end, _, change = mclmc.path(state, score, settings(state, 0.8, 3).path)
        x, y = end.direction[0]
        ends = torch.cat([end.position[0], torch.atan2(y, x).unsqueeze(0)])
        return ends, change[0] + end.log_density[0] - state.log_density[0]

    point = torch.tensor([0.7, -0.4, 1.3], dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda one: walk(one)[0], point)
    assert torch.allclose(walk(point)[1], -jacobian.det().abs().log())
    assert walk(point)[1].abs() > 0.1


def test_rejected_paths_are_reversed():
    """Acceptance is that of the energies at both ends, and directions are kept or reversed."""
    torch.manual_seed(0)
    state = mams.init(draws_of(gaussian, 500), gaussian)
    after, info = mams.step(state, gaussian, settings(state, 2.4, 3))
    end, _, change = mclmc.path(state, gaussian, settings(state, 2.4, 3).path)
    assert torch.allclose(info.acceptance, (-change).exp().clamp(max=1.0))
    is_back = (after.position == state.position).all(-1)
    assert 0.1 < is_back.double().mean() < 0.9
    torch.testing.assert_close(after.direction[is_back], -state.direction[is_back])
    assert torch.allclose(after.position[~is_back], end.position[~is_back])
    assert torch.allclose(after.direction[~is_back], end.direction[~is_back])
    # The reversed path leads back, with the opposite energy error.
    reverse = end._replace(direction=-end.direction)
    start, _, back = mclmc.path(reverse, gaussian, settings(state, 2.4, 3).path)
    assert torch.allclose(start.position, state.position, atol=1e-8)
    assert torch.allclose(back, -change, atol=1e-8)


def test_chains_tune_themselves_apart_from_others():
    """Each chain has its own mode's step size, and the wanted acceptance probability."""
    torch.manual_seed(0)
    scale = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64).unsqueeze(-1)

    def three(z):
        density, gradient = gaussian(z * scale)
        return density, gradient * scale

    state, tuning = mams.init(draws_of(gaussian, 3) / scale, three), mams.adaptation()
    state, tuning, _ = tuning.restart(three, state)
    for share in torch.linspace(0, 1, 41).tolist():
        for _ in range(10):
            used = tuning.settings(state)
            state, info = mams.step(state, three, used)
            tuning = tuning.update(state, info, used)
        tuning = tuning.at(share)
    tuning = tuning.frozen()
    used, found = tuning.settings(state), []
    assert used.is_adjusted and 1 <= used.path.num_steps <= 32
    for _ in range(200):
        state, info = mams.step(state, three, used)
        found.append(info.acceptance)
        assert tuning.update(state, info, used) is tuning
    assert ((torch.stack(found).mean(0) - 0.9).abs() < 0.08).all()
    sizes = (used.path.step_size * scale).flatten()
    assert sizes.max() < 1.6 * sizes.min()


def test_paths_that_leave_the_finite_numbers_are_rejected():
    def bounded(z):
        density, gradient = gaussian(z)
        return density.masked_fill(z[:, 0] > 0, math.nan), gradient

    position = torch.full((2, DIM), -0.01, dtype=torch.float64)
    state = mams.init(position, bounded)
    state = state._replace(direction=torch.eye(DIM, dtype=torch.float64)[[0, 0]])
    after, info = mams.step(state, bounded, settings(state, 0.1, 4))
    assert info.acceptance.tolist() == [0.0, 0.0] and info.energy_error.isinf().all()
    assert after.position.equal(position) and after.direction.equal(-state.direction)


def test_one_dimension_is_refused():
    with pytest.raises(ValueError, match="two latent dimensions.*Cure: kernel='hmc'"):
        mams.init(torch.zeros(3, 1), gaussian)


def pairs():
    x = pyro.sample("x", dist.Normal(1.0, 1.0).expand([5]).to_event(1))
    pyro.sample("y", dist.Normal(x.square(), math.sqrt(NOISE)).to_event(1))


def test_refine():
    starts = {"x": torch.randn(40, 5), "y": torch.randn(40, 5)}
    options = {"seed": 0, "progress": False, "max_gradients": 4000, "max_draws": 200}
    result = refine(pairs, starts, kernel="mams", **options)
    assert result.kernel == "mams" and result.frame == "none" and result.num_chains == 40
    assert abs(result.acceptance - 0.9) < 0.06
    assert not any("step size biases" in doubt for doubt in result.doubts)
    draws = result.get_samples()
    rest = draws["y"] - draws["x"].square()
    assert abs(draws["x"].mean() - 1) < 0.1 and abs(draws["x"].var() - 1) < 0.12
    assert abs(rest.var() / NOISE - 1) < 0.05


def mean_of_weights():
    weights = pyro.sample("w", dist.Normal(0.0, 1.0).expand([120]).to_event(1))
    pyro.sample("y", dist.Normal(weights.mean(-1), 0.05), obs=torch.tensor(0.5))


def test_a_stiff_direction_has_the_right_width():
    """It is 25 % too narrow without Metropolis' rule."""
    options = {"seed": 0, "progress": False, "max_gradients": 4000}
    result = refine(mean_of_weights, {"w": torch.randn(10, 120)}, kernel="mams", **options)
    means = result.get_samples()["w"].mean(-1)
    precision = 120 + 1 / 0.05**2
    assert abs(means.std() * precision**0.5 - 1) < 0.12
    assert (means.mean() - 0.5 / 0.05**2 / precision).abs() * precision**0.5 < 0.15
