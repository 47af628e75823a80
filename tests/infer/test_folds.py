# SPDX-License-Identifier: Apache-2.0
"""Generators that fold their noise: which draws are reversed, their gradient, and the warning."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import nn

from pyro_implicit import AutoImplicit, AutoregressiveGenerator, Implicit, ResidualGenerator
from pyro_implicit.generators import Generator
from pyro_implicit.infer import GPVI_ELBO, FoldWarning, ImplicitRenyiELBO, InjectiveELBO, injective
from pyro_implicit.infer.engine.folds import Orientation, note_orientation
from pyro_implicit.infer.policy import ELBOS
from tests.infer.helpers import train

pytestmark = pytest.mark.usefixtures("double")


class Folded(Generator):
    """f(z) = z - a tanh z in the first coordinate, and -z in the second. The determinant is
    positive where tanh² z < 1 - 1 / a, and negative elsewhere."""

    injective = True  # it says so

    def __init__(self, slope: float = 2.0) -> None:
        super().__init__(2, 2)
        self.slope = nn.Parameter(torch.tensor(slope))

    def forward(self, noise, context=None):
        first, second = noise.unbind(-1)
        return torch.stack([first - self.slope * first.tanh(), -second], -1)


def model():
    pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))


def guide_of(generator):
    def guide():
        pyro.module("generator", generator)
        pyro.sample("x", Implicit(generator, 2))

    return guide


LOSSES = [InjectiveELBO, GPVI_ELBO, ImplicitRenyiELBO]


@pytest.mark.filterwarnings("ignore::pyro_implicit.infer.FoldWarning")
@pytest.mark.parametrize("make_elbo", LOSSES)
def test_the_share_of_reversed_draws_is_the_exact_one(make_elbo):
    elbo, guide = make_elbo(num_particles=100, compile="trace"), guide_of(Folded())
    pyro.set_rng_seed(0)
    for _ in range(200):
        elbo.differentiable_loss(model, guide)
    # tanh² z < 1/2 has a probability of .62, so that its outside has the rarer sign.
    expected = 2 * NormalDist().cdf(-torch.tensor(0.5).sqrt().atanh().item())
    (known,) = elbo.remembered("orientation").values()
    assert known.reversed_share == pytest.approx(expected * (1 - ELBOS.fold_decay**200), abs=0.015)


def test_evaluations_leave_the_record():
    elbo, guide = InjectiveELBO(6), guide_of(Folded())
    elbo.differentiable_loss(model, guide)
    before = elbo.remembered("orientation")
    elbo.loss(model, guide)
    assert elbo.remembered("orientation") == before


def test_which_draws_are_reversed():
    known = Orientation.before(torch.tensor([[1.0, 1.0, -1.0], [1.0, 1.0, 1.0]]))
    assert known.mean_sign == pytest.approx(2 / 3) and known.reversed_share == 0
    signs = torch.tensor([[-1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    assert known.is_reversed(signs).equal(signs < 0)
    later = known.after(signs)
    assert later.mean_sign == pytest.approx(2 / 3)
    assert later.reversed_share == pytest.approx((1 - ELBOS.fold_decay) / 6)
    # One draw in a step cannot tell, but is counted.
    single = Orientation.before(torch.ones(()))
    assert not single.is_reversed(-torch.ones(()))
    assert single.after(-torch.ones(())).reversed_share == pytest.approx(1 - ELBOS.fold_decay)
    half = single.after(torch.tensor([1.0, -1.0]))
    assert half.reversed_share == pytest.approx((1 - ELBOS.fold_decay) / 2)
    # A step that is not finite leaves no trace.
    elbo = InjectiveELBO(5)
    for signs in (torch.full((3,), torch.nan), torch.ones(3)):
        note_orientation(elbo, "x", signs)
    assert elbo.remembered("orientation")["x"].reversed_share == 0
    # Training may turn around all.
    everywhere = Orientation.before(torch.ones(5)).after(-torch.ones(5))
    assert not everywhere.is_reversed(-torch.ones(5)).any()
    assert everywhere.reversed_share == 0


@pytest.mark.parametrize("path", [True, False, "auto"])
def test_reversed_draws_have_the_gradient_of_their_determinant(monkeypatch, path):
    """Against automatic differentiation of f' = 1 - a (1 - tanh² z) itself."""
    generator = Folded(1.1)  # reversed near 0
    elbo, guide = InjectiveELBO(40, path), guide_of(generator)
    elbo.differentiable_loss(model, guide)
    share = 0.4 if path == "auto" else float(path)
    monkeypatch.setattr(injective.ScoreControlVariate, "weight", lambda _: torch.tensor(share))
    pyro.set_rng_seed(1)
    loss = elbo.differentiable_loss(model, guide)
    (found,) = torch.autograd.grad(loss, [generator.slope])

    pyro.set_rng_seed(1)
    noise = torch.randn(40, 2, requires_grad=True)
    draws = generator(noise)
    log_p = dist.Normal(0.0, 1.0).log_prob(draws).sum(-1)
    slope = 1 - generator.slope * (1 - noise[:, 0].tanh().square())
    assert 3 < (slope < 0).sum() < 20
    log_q = dist.Normal(0.0, 1.0).log_prob(noise).sum(-1) - slope.abs().log()
    assert loss.item() == pytest.approx((log_q - log_p).mean().item())
    (by_noise,) = torch.autograd.grad(log_q.sum(), noise, retain_graph=True)
    score = by_noise / torch.stack([slope, -torch.ones(40)], -1)
    along = (score.detach() * draws).sum(-1)
    entropy = torch.where(
        slope < 0, ELBOS.unfolding_weight * slope.abs().log(), share * along + (1 - share) * log_q
    )
    (expected,) = torch.autograd.grad((entropy - log_p).mean(), [generator.slope])
    torch.testing.assert_close(found, expected)


def ring():
    """A ring of radius 2 with two gaps."""
    x = pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1).mask(False))
    radius = (x.square().sum(-1) + 1e-12).sqrt()
    sides = torch.logaddexp(*(-0.5 * ((x[..., 0] - end) / 0.6).square() for end in (2, -2)))
    pyro.factor("ring", sides - 0.5 * ((radius - 2) / 0.4).square())


def folded(size: int) -> ResidualGenerator:
    """Return a generator that folds from the start."""
    generator = ResidualGenerator(size, 2, output_scale=1.0)
    with torch.no_grad():
        generator.network.layers[0].weight.mul_(6)
    return generator


def test_training_unfolds():
    """With ``unfolding_weight=-1.0`` and ``max_reversed=1.0`` the guide folds instead: a fifth of
    its draws and more, and its loss falls below that of the posterior."""
    cells = torch.linspace(-6, 6, 601)
    with pyro.condition(data={"x": torch.cartesian_prod(cells, cells)}):
        trace = pyro.poutine.trace(ring).get_trace()
    log_evidence = trace.nodes["ring"]["fn"].log_factor.logsumexp(0) + 2 * torch.tensor(0.02).log()
    pyro.set_rng_seed(0)
    guide = AutoImplicit(ring, folded, frame=None, init_scale=2.0)
    elbo = InjectiveELBO(50, compile="trace")
    train(ring, guide, elbo, 600, lr=0.01)
    gap = sum(elbo.loss(ring, guide) for _ in range(40)) / 40 + log_evidence
    (known,) = elbo.remembered("orientation").values()
    assert known.reversed_share < 0.001
    assert -0.01 < gap < 0.6


@pytest.fixture
def steps(monkeypatch) -> int:
    """The number of steps between looks."""
    monkeypatch.setattr("pyro_implicit.infer.implicit_elbo.ELBOS", replace(ELBOS, fold_steps=20))
    return 20


@pytest.mark.parametrize("make_elbo", LOSSES)
def test_folds_in_training_are_reported_once(make_elbo, steps):
    svi = SVI(model, guide_of(Folded()), pyro.optim.SGD({"lr": 0.0}), make_elbo(num_particles=20))
    pyro.set_rng_seed(0)
    for _ in range(steps - 1):
        svi.step()
    message = (
        rf"{make_elbo.__name__}, step {steps}: the generator of site 'x' folds: .* "
        r"another sign at \d+\.\d% of its draws.*too low and no bound. Cure: AutoregressiveGen"
    )
    with pytest.warns(FoldWarning, match=message):
        svi.step()
    for _ in range(steps):
        svi.step()


@pytest.mark.parametrize("make_elbo", LOSSES)
def test_no_warning_if_nothing_folds(make_elbo, steps):
    guide = AutoImplicit(model, AutoregressiveGenerator)
    svi = SVI(model, guide, pyro.optim.ClippedAdam({"lr": 0.01}), make_elbo(num_particles=4))
    for _ in range(steps + 1):
        svi.step()


@pytest.mark.filterwarnings("ignore::pyro_implicit.infer.FoldWarning")
def test_recorded_steps_count_as_well():
    counts = []
    for mode in (False, "trace"):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        elbo = InjectiveELBO(8, compile=mode)
        svi = SVI(model, guide_of(Folded(1.2)), pyro.optim.SGD({"lr": 1e-3}), elbo)
        losses = [svi.step() for _ in range(30)]
        (known,) = elbo.remembered("orientation").values()
        counts.append((losses, known.mean_sign.item(), known.reversed_share.item()))
    assert elbo.state.traced.programs.num_run > 5
    assert counts[0] == counts[1] and counts[0][2] > 0
