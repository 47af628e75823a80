# SPDX-License-Identifier: Apache-2.0
"""Microcanonical Langevin dynamics, against its differential equation and Gaussian targets."""

from __future__ import annotations

import math
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_implicit import AutoEnsemble
from pyro_implicit.mcmc import ChainPolicy, refine
from pyro_implicit.mcmc.kernels import mclmc

DIM = 10
PRECISION = torch.linspace(0.5, 2.0, DIM, dtype=torch.float64)


def score(z):
    return -0.5 * (PRECISION * z.square()).sum(-1), -PRECISION * z


def start(num_chains, seed=0):
    torch.manual_seed(seed)
    return mclmc.init(torch.randn(num_chains, DIM, dtype=torch.float64), score)


def settings(state, size, num_steps, length=math.inf):
    ones = torch.ones_like(state.position[:, :1])
    return mclmc.Settings(size * ones, length * ones, num_steps)


def test_dynamics():
    """Without refreshment, the path solves the differential equation and keeps the energy."""
    state = start(3)
    after, info = mclmc.step(state, score, settings(state, 1e-3, 1000))

    def velocity(z, u):
        force = score(z)[1] / (DIM - 1)
        return u, force - u * (u * force).sum(-1, keepdim=True)

    z, u, h = state.position, state.direction, 1e-2
    for _ in range(100):  # Runge and Kutta
        a, b = velocity(z, u)
        c, d = velocity(z + h / 2 * a, u + h / 2 * b)
        e, f = velocity(z + h / 2 * c, u + h / 2 * d)
        g, k = velocity(z + h * e, u + h * f)
        z, u = z + h / 6 * (a + 2 * c + 2 * e + g), u + h / 6 * (b + 2 * d + 2 * f + k)
    assert torch.allclose(after.position, z, atol=1e-6, rtol=0)
    assert torch.allclose(after.direction, u, atol=1e-6, rtol=0)
    assert torch.allclose(after.direction.norm(dim=-1), torch.ones(3, dtype=torch.float64))
    assert info.num_gradients == 2000


def test_energy_error_is_of_third_order():
    state = start(200)
    errors = [
        mclmc.step(state, score, settings(state, size, 1))[1].energy_error.mean()
        for size in (0.1, 0.05)
    ]
    assert abs(math.log2(errors[0] / errors[1]) - 6) < 0.05  # squared


def test_kicks_towards_steep_gradients_are_finite():
    direction = torch.nn.functional.normalize(torch.randn(4, 3), dim=-1)
    gradient = 1e12 * torch.tensor([1.0, 0.0, 0.0]).expand(4, 3)
    turned, energy = mclmc._kick(direction, gradient, torch.ones(4, 1))
    assert torch.allclose(turned, gradient / 1e12, atol=1e-6)
    assert energy.isfinite().all()


def test_stationary_distribution():
    state = start(4000)
    state = state._replace(position=state.position / PRECISION.sqrt())
    for _ in range(30):
        state, _ = mclmc.step(state, score, settings(state, 0.5, 8, length=3.0))
    ratio = PRECISION * state.position.var(0)
    # 4,000 independent draws, and a bias of the step size below one percent.
    assert (ratio - 1).abs().max() < 4 * math.sqrt(2 / 4000) + 0.01
    assert state.position.mean(0).abs().max() < 4 * math.sqrt(2 / 4000)


def test_refreshment_forgets_the_direction():
    """After time t the mean cosine is exp(-t / L)."""
    torch.manual_seed(0)
    dim, length = 200, 5.0
    flat = lambda z: (0 * z.sum(-1), 0 * z)  # noqa: E731
    state = mclmc.init(torch.zeros(1000, dim, dtype=torch.float64), flat)
    after, _ = mclmc.step(state, flat, settings(state, 0.1, 50, length))
    cosine = (state.direction * after.direction).sum(-1).mean()
    assert abs(cosine - math.exp(-5.0 / length)) < 0.01


def test_chains_tune_themselves_apart_from_others():
    """A chain's step size follows the scale of its own mode, whatever the others do."""

    def two(z):
        factor = torch.tensor([1.0, 100.0], dtype=z.dtype).unsqueeze(-1)
        return -0.5 * (factor * PRECISION * z.square()).sum(-1), -factor * PRECISION * z

    state, tuning = start(2), mclmc.adaptation()
    state = mclmc.init(state.position / torch.tensor([[1.0], [10.0]]), two)
    state, tuning, _ = tuning.restart(two, state)
    for _ in range(80):
        used = tuning.settings(state)
        state, info = mclmc.step(state, two, used)
        tuning = tuning.update(state, info, used)
    wide, narrow = tuning.settings(state).step_size.flatten().tolist()
    assert 8 < wide / narrow < 12.5


def test_a_chain_that_leaves_the_finite_numbers_is_put_back():
    def bounded(z):
        log_density, gradient = score(z)
        return log_density.masked_fill(z[:, 0] > 0, math.nan), gradient

    position = torch.stack([torch.full((DIM,), -0.01), torch.full((DIM,), -5.0)]).double()
    state = mclmc.init(position, bounded)
    state = state._replace(direction=torch.eye(DIM)[:1].expand(2, -1).double())
    after, info = mclmc.step(state, bounded, settings(state, 0.1, 4))
    assert info.acceptance.tolist() == [0.0, 1.0]
    assert after.position[0].equal(state.position[0]) and not after.position[1].equal(position[1])
    tuning = replace(
        mclmc.adaptation(), step_sizes=torch.full((2, 1), 0.1), lengths=torch.ones(2, 1)
    )
    for begun in (tuning, tuning.frozen()):
        one = begun.update(state, info, begun.settings(state))
        sizes = one.step_sizes.flatten()
        assert sizes[0].item() < 0.051 and sizes[1].item() >= 0.1
    moved = info._replace(energy_error=torch.ones(2))
    for _ in range(2):
        one = one.update(state, moved, one.settings(state))
    assert one.step_sizes.flatten().tolist() == pytest.approx([0.1, 0.1])
    strict = settings(state, 0.1, 4)._replace(max_error=0.0)
    after, info = mclmc.step(state, bounded, strict)
    assert after.position.equal(state.position) and info.acceptance.tolist() == [0.0, 0.0]


def warmed_up(tuning, positions, gradients):
    """Let a tuning see states ``(number, num_chains, d)``."""
    for z, g in zip(positions, gradients, strict=True):
        state = mclmc.State(z, z, z[:, 0], g)
        info = mclmc.Info(torch.ones_like(z[:, 0]), 1)
        tuning = tuning.update(state, info, tuning.settings(state))
    return tuning


def test_chains_learn_scales_and_lengths_from_their_own_states():
    """Scales are (variance / mean squared gradient)^(1/4), and lengths are in their units."""
    torch.manual_seed(0)
    tuning = replace(
        mclmc.adaptation(), step_sizes=torch.full((2, 1), 0.1), lengths=torch.ones(2, 1)
    )
    sds = torch.tensor([[1.0, 0.1, 3.0, 0.5], [0.2, 1.0, 1.0, 1.0]])
    slopes = 1 / sds.flip(-1)  # gradients of another shape than Gaussian ones
    noise = torch.randn(2, 100, 2, 4)
    positions, gradients = 7 + sds * noise[0], slopes * noise[1]
    assert warmed_up(tuning, positions[:31], gradients[:31]).at(0.2).scale == 1.0
    tuning = warmed_up(tuning, positions[:50], gradients[:50]).at(0.2)
    variance = positions[:50].var(0, correction=0)
    expected = (variance / gradients[:50].square().mean(0)) ** 0.25
    expected /= expected.log().mean(-1, keepdim=True).exp()
    assert torch.allclose(tuning.scale, expected, rtol=1e-3)
    later = warmed_up(tuning, positions[50:], gradients[50:])
    assert later.at(0.4).scale is tuning.scale  # fewer than 64 transitions
    found = later.at(0.9)
    variance = positions[50:].var(0, correction=0) / expected.square()
    assert found.scale is tuning.scale
    assert torch.allclose(found.lengths, variance.sum(-1, keepdim=True).sqrt(), rtol=1e-3)
    flat = warmed_up(mclmc.adaptation(), torch.ones(32, 1, 4), torch.eye(4)[:1].expand(32, 1, 4))
    wild = replace(flat, step_sizes=torch.ones(1, 1)).at(0.2).scale
    assert wild.isfinite().all() and wild.max() <= 10 and wild.min() >= 0.1


def test_scaled_paths_are_paths_of_scaled_coordinates():
    scale = torch.linspace(0.3, 2.0, DIM, dtype=torch.float64).expand(3, -1)
    state = start(3)

    def scaled(z):
        density, gradient = score(scale * z)
        return density, scale * gradient

    other = mclmc.State(state.position / scale, state.direction, *scaled(state.position / scale))
    options = settings(state, 0.4, 5)
    after, squares, total = mclmc.path(state, score, options._replace(scale=scale))
    expected = mclmc.path(other, scaled, options)
    assert torch.allclose(after.position, scale * expected[0].position)
    assert torch.allclose(after.direction, expected[0].direction)
    assert torch.allclose(torch.stack([squares, total]), torch.stack(expected[1:]))


def badly_scaled():
    sds = torch.logspace(-2, 2, 20)
    pyro.sample("x", dist.Normal(0.0, sds).to_event(1))


def test_refine_finds_the_scales_of_a_posterior():
    """Standard deviations differ by a factor of 10,000."""
    starts = {"x": torch.randn(8, 20) * torch.logspace(-2, 2, 20)}
    options = {"kernel": "mclmc", "progress": False, "max_gradients": 8000}
    draws = refine(badly_scaled, starts, seed=0, **options).get_samples()["x"]
    ratio = draws.std(0) / torch.logspace(-2, 2, 20)
    assert ratio.min() > 0.8 and ratio.max() < 1.2


def bimodal():
    x = pyro.sample("x", dist.Normal(0.0, 3.0).expand([4]).to_event(1))
    pyro.sample("y", dist.Normal(x.square(), 0.5).to_event(1), obs=torch.full((4,), 4.0))


def test_refine_starts_a_chain_from_each_member():
    pyro.set_rng_seed(0)
    guide = AutoEnsemble(bimodal, num_members=6)
    guide()
    with torch.no_grad():
        guide.members.copy_(2 * (2.0 * (torch.rand(6, 4) < 0.5) - 1))
    options = {"kernel": "mclmc", "seed": 0, "progress": False, "max_gradients": 3000}
    result = refine(bimodal, guide, **options)
    draws = result.get_samples(group_by_chain=True)["x"]
    assert result.kernel == "mclmc" and result.frame == "none" and result.num_chains == 6
    # Each chain stays in the mode of its member; the posterior's sd in a mode is about .5 / 4.
    assert (draws.sign() == guide.members.sign().unsqueeze(1)).all()
    grid = torch.linspace(0.5, 4, 4001, dtype=torch.float64)
    density = (-0.5 * (grid**2 - 4).square() / 0.25 - 0.5 * grid.square() / 9).exp()
    mean = (grid * density).sum() / density.sum()
    sd = (((grid - mean) ** 2 * density).sum() / density.sum()).sqrt()
    assert abs(draws.abs().mean() - mean) < 0.1 * sd
    assert abs(draws.abs().std() / sd - 1) < 0.15
    more = result.refine_more(max_gradients=300, progress=False)
    assert more.num_gradients > result.num_gradients and more.step_size == result.step_size
    assert any("step size biases" in doubt for doubt in result.doubts)


def test_mclmc_has_no_frame():
    with pytest.raises(ValueError, match="kernel='mclmc' has no frame.*Cure: leave it out"):
        refine(bimodal, {"x": torch.ones(3, 4)}, kernel="mclmc", frame="full", progress=False)


def test_a_killed_run_goes_on(tmp_path):
    guide = {"x": 2 * torch.ones(3, 4)}
    options = {"kernel": "mclmc", "seed": 0, "progress": False, "policy": ChainPolicy()}
    whole = refine(bimodal, guide, max_gradients=800, **options)
    file = {"checkpoint": tmp_path / "run.pt", "checkpoint_every": 7}
    calls = 0

    def killed(draws):
        nonlocal calls
        calls += 1
        if calls == 12:
            raise RuntimeError("killed")
        return draws["x"]

    with pytest.raises(RuntimeError, match="killed"):
        refine(bimodal, guide, max_gradients=800, quantities=killed, **options, **file)
    calls = -(10**9)
    resumed = refine(bimodal, guide, max_gradients=800, quantities=killed, **options, **file)
    assert resumed.get_samples()["x"].equal(whole.get_samples()["x"])
