# SPDX-License-Identifier: Apache-2.0
"""The weights of a mixture, against known evidences and quadrature."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_implicit.density.modes import Modes
from pyro_implicit.density.target import Target
from pyro_implicit.fitting.candidates import mixture_weights
from pyro_implicit.fitting.policy import MixturePolicy
from pyro_implicit.fitting.stages import Stages, train_exact
from pyro_implicit.runtime.clock import NO_LIMIT

#: Two modes, each with copies, and their Gaussians.
MODES = Modes(torch.tensor([[-1.0], [1.0]]), torch.ones(2, 1, 1), torch.zeros(2))

pytestmark = pytest.mark.usefixtures("double")


def target(log_density):
    """A model of one latent x with this unnormalised log-density."""

    def model():
        flat = dist.ImproperUniform(dist.constraints.real, (), ())
        x = pyro.sample("x", flat)
        pyro.factor("density", log_density(x))

    return Target(model)


def gaussian(loc, scale):
    return dist.Normal(torch.tensor([loc]), torch.tensor([scale])).to_event(1)


def two_modes(x):
    parts = [math.log(0.3) + dist.Normal(-5.0, 0.5).log_prob(x)]
    parts.append(math.log(0.7) + dist.Normal(4.0, 0.2).log_prob(x))
    return torch.logaddexp(*parts) + 2.5


def test_disjoint_components_get_their_evidence():
    found = mixture_weights(target(two_modes), [gaussian(-5.0, 0.5), gaussian(4.0, 0.2)])
    torch.testing.assert_close(found.exp(), torch.tensor([0.3, 0.7]), atol=1e-6, rtol=0)


def test_disjoint_misfits_get_their_elbos():
    """Too narrow by a factor: each weight is multiplied by exp(-KL)."""
    scales = (0.25, 0.19)
    kl = [
        torch.distributions.kl_divergence(dist.Normal(0.0, s), dist.Normal(0.0, t))
        for s, t in zip(scales, (0.5, 0.2), strict=True)
    ]
    expected = (torch.tensor([0.3, 0.7]).log() - torch.stack(kl)).log_softmax(0)
    parts = [gaussian(-5.0, scales[0]), gaussian(4.0, scales[1])]
    found = mixture_weights(target(two_modes), parts, policy=MixturePolicy(least_draws=20000))
    torch.testing.assert_close(found.exp(), expected.exp(), atol=0.005, rtol=0)


def test_equal_components_are_not_counted_twice():
    parts = [gaussian(-5.0, 0.5), gaussian(-5.0, 0.5), gaussian(4.0, 0.2)]
    found = mixture_weights(target(two_modes), parts)
    weights = found.exp()
    assert weights[2].item() == pytest.approx(0.7, abs=0.01)
    # Two of a Gaussian's own kind are that Gaussian, whatever the weights.
    found = mixture_weights(target(dist.Normal(1.0, 2.0).log_prob), [gaussian(1.0, 2.0)] * 2)
    assert found.logsumexp(0).item() == pytest.approx(0.0, abs=1e-8)


def bent(x):
    """A skewed, heavy-tailed density that no mixture of the components hits."""
    return torch.logaddexp(
        dist.StudentT(3.0, 0.0, 1.0).log_prob(x), dist.Gumbel(2.0, 0.7).log_prob(x)
    )


def quadrature_elbo(log_weights, parts):
    grid = torch.linspace(-40, 40, 80001)
    log_q = torch.stack([q.log_prob(grid.unsqueeze(-1)) for q in parts], -1)
    log_q = (log_q + log_weights.log_softmax(0)).logsumexp(-1)
    return torch.trapezoid(log_q.exp() * (bent(grid) - log_q).nan_to_num(), grid)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_overlapping_components_against_quadrature(seed):
    torch.manual_seed(seed)
    parts = [gaussian(-0.5, 1.2), gaussian(2.3, 0.8), gaussian(1.0, 2.5)]
    best = torch.zeros(3, requires_grad=True)
    optimiser = torch.optim.LBFGS([best], max_iter=100, line_search_fn="strong_wolfe")

    def closure():
        optimiser.zero_grad()
        loss = -quadrature_elbo(best, parts)
        loss.backward()
        return loss

    optimiser.step(closure)
    highest = quadrature_elbo(best, parts).item()
    uniform = quadrature_elbo(torch.zeros(3), parts).item()
    found = mixture_weights(
        target(bent), parts, MixturePolicy(most_draws=4000, all_draws=12000, tolerance=1e-6)
    )
    reached = quadrature_elbo(found, parts).item()
    assert highest - uniform > 0.02
    assert reached > highest - 5e-4
    expected = best.detach().softmax(0)
    torch.testing.assert_close(found.exp(), expected, atol=0.03, rtol=0)


def test_a_needless_component_loses_its_weight():
    parts = [gaussian(0.0, 1.0), gaussian(3.0, 1.0)]
    found = mixture_weights(target(dist.Normal(0.0, 1.0).log_prob), parts)
    assert found[1].exp() < 0.01


@pytest.mark.parametrize("bad", [-math.inf, math.nan])
def test_draws_without_a_log_density_cost_their_share(bad):
    def half(x):
        return torch.where(x > -5.0, two_modes(x), torch.full_like(x, bad))

    parts = [gaussian(-5.0, 0.5), gaussian(4.0, 0.2), gaussian(-20.0, 0.5)]
    found = mixture_weights(target(half), parts, policy=MixturePolicy(least_draws=20000))
    expected = torch.tensor([0.15, 0.7, 0.0]) / 0.85
    torch.testing.assert_close(found.exp(), expected, atol=0.005, rtol=0)
    assert found[2] == -math.inf


def test_hopeless_components():
    density = target(lambda x: torch.where(x == 0, x, x * math.nan))
    with pytest.raises(ValueError, match="finite at none of 20 draws.*Cure: train"):
        mixture_weights(density, [gaussian(0.0, 1.0)] * 2, MixturePolicy(10, 10))
    with pytest.raises(ValueError, match="at least one component"):
        mixture_weights(density, [])


def test_evidences_many_powers_apart_in_float32():
    torch.set_default_dtype(torch.float32)

    def apart(x):
        left, right = dist.Normal(-5.0, 0.1).log_prob(x), dist.Normal(4.0, 0.1).log_prob(x) - 900.0
        return torch.where(x < 0, left, right)

    parts = [gaussian(-5.0, 0.1), gaussian(4.0, 0.1)]
    found = mixture_weights(target(apart), parts)
    assert found.dtype == torch.float32
    assert found[0].abs() < 1e-6 and found[1] == pytest.approx(-900, abs=1)


@pytest.mark.parametrize("number, draws", [(2, 1000), (40, 200), (200, 100)])
def test_many_components_are_judged_at_fewer_draws(number, draws):
    density = target(dist.Normal(0.0, 1.0).log_prob)
    seen = []
    log_prob = density.log_prob

    def counted(points):
        seen.append(len(points))
        return log_prob(points)

    density.log_prob = counted
    mixture_weights(density, [gaussian(0.0, 1.0)] * number, MixturePolicy(max_iterations=1))
    assert seen == [draws] * number


@pytest.mark.parametrize(("symmetries", "num_judged"), [((), 1), (("permutations",), 0)])
def test_importance_weights_of_modes_with_copies_are_not_judged(
    symmetries, num_judged, monkeypatch
):
    """Nothing would use them, as modes may have different numbers of copies."""
    judged = []
    monkeypatch.setattr(Stages, "reliability_of", lambda *args: judged.append(args))
    density, modes = target(two_modes), Modes(*(part.double() for part in MODES))
    stages = Stages(density.model, (), {}, 100, lr=0.01, num_particles=8, limit=NO_LIMIT)
    stages.result.symmetries = symmetries
    with stages.kept_apart():
        train_exact(stages, density, modes, 10.0)
        stages.choose(density, modes)
    weighs = "chains weigh" if symmetries else "annealing weighs"
    assert stages.result.stages[0].outcome.endswith(
        f"; {weighs} the modes, and no guide is trained"
    )
    assert len(judged) == num_judged
