# SPDX-License-Identifier: Apache-2.0
"""LIVI's log q of one site: every way to the Jacobian, every batch and event shape."""

from __future__ import annotations

from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

from pyro_implicit import LIVI_ELBO, MLP, GatedMLP, SemiImplicit
from pyro_implicit.infer import livi
from pyro_implicit.infer.engine.implicit_sites import ImplicitSite
from tests.infer.livi_sites import assert_same, draw, linearised

DOUBLE = torch.double
SIZES = [(4, 2), (3, 3), (2, 5), (1, 1)]  # of the value and of the noise


class Plain(nn.Module):
    """Hides everything but ``forward``, so that the Jacobian comes from torch.func."""

    def __init__(self, generator: nn.Module) -> None:
        super().__init__()
        self.inner = generator

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.inner(*inputs)


def log_q(site: ImplicitSite, **options) -> Tensor:
    elbo = LIVI_ELBO(**options)
    return elbo.score_parts(linearised(elbo, site), None).log_prob


@pytest.mark.parametrize("entropy", ["limit", "quadratic"])
@pytest.mark.parametrize("context_dim", [0, 2])
@pytest.mark.parametrize("m,d", SIZES)
def test_analytic_jacobians_agree_with_any_module(m, d, context_dim, entropy):
    generator = GatedMLP(d, m, hidden=(6,), context_dim=context_dim).double()
    generator.networks.weight_1.data[0].normal_()  # the gate's
    context = torch.randn(4, context_dim, dtype=DOUBLE) if context_dim else None
    scale = (0.1 + torch.rand(m, dtype=DOUBLE)).requires_grad_()
    site = draw(SemiImplicit(generator, d, scale, context).expand((3, 4)))
    plain = SemiImplicit(Plain(generator), d, scale, context).expand((3, 4))
    found = log_q(site, entropy=entropy)
    expected = log_q(replace(site, distribution=plain), entropy=entropy)
    assert_same(found, expected, [scale, *generator.parameters()])


@pytest.mark.parametrize("m,d", [(4, 2), (3, 3), (2, 5)])
@pytest.mark.parametrize(
    "options",
    [{"log_det": "exact"}, {"log_det": "smallest"}, {"entropy": "quadratic"}],
    ids=lambda options: next(iter(options.values())),
)
def test_plate_of_local_latents_equals_a_loop(m, d, options):
    """Three particles of five local latents, each with a context and a scale of its own."""
    if options.get("log_det") == "smallest" and d > m:
        d = m
    encoder = MLP(d, m, hidden=(6,), context_dim=2).double()
    context = torch.randn(5, 2, dtype=DOUBLE, requires_grad=True)
    scale = (0.1 + torch.rand(5, m, dtype=DOUBLE)).requires_grad_()
    site = draw(SemiImplicit(encoder, d, scale, context).expand((3, 5)))
    # Up to three noise dimensions LOBPCG converges to rounding, if it may.
    found = log_q(site, **options)
    rows = []
    for particle in range(3):
        for i in range(5):
            alone = SemiImplicit(encoder, d, scale[i], context[i])
            index = (particle, i)
            value = site.value[index]
            rows.append(log_q(ImplicitSite("x", alone, site.noise[index], value, value), **options))
    expected = torch.stack(rows).view(3, 5)
    assert_same(found, expected, [context, scale, *encoder.parameters()])


def test_matrix_values_are_flattened():
    flat = nn.Linear(4, 6, dtype=DOUBLE)
    matrix = nn.Sequential(flat, nn.Unflatten(-1, (2, 3)))
    scale = 0.1 + torch.rand(2, 3, dtype=DOUBLE)
    site = draw(SemiImplicit(matrix, 4, scale).expand((5,)))
    for options in ({"log_det": "exact"}, {"entropy": "quadratic"}):
        found = log_q(site, **options)
        same = SemiImplicit(flat, 4, scale.flatten()).expand((5,))
        value = site.value.flatten(1)
        expected = log_q(ImplicitSite("x", same, site.noise, value, value), **options)
        assert_same(found, expected, list(flat.parameters()))


@pytest.mark.parametrize("log_det", ["exact", "smallest", "stochastic"])
def test_works_without_gradients(log_det):
    generator = GatedMLP(3, 3).double()
    site = draw(SemiImplicit(generator, 3, 0.1).expand((4,)))
    torch.manual_seed(1)
    expected = log_q(site, log_det=log_det)
    torch.manual_seed(1)
    with torch.no_grad():
        found = log_q(site, log_det=log_det)
    assert expected.requires_grad and not found.requires_grad
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "m,d,batch,method",
    [
        (9, 3, 1, "exact"),  # noise dimensions at the limit
        (3, 9, 1, "exact"),  # values at the limit
        (4, 4, 1, "stochastic"),
        (9, 3, 8, "exact"),  # 216 entries
        (9, 3, 9, "stochastic"),  # 243
    ],
)
def test_auto_chooses_by_size(m, d, batch, method, monkeypatch):
    elbo = LIVI_ELBO()
    assert elbo.log_det == "auto"
    assert (livi.ELBOS.max_exact_dim, livi.ELBOS.max_exact_entries) == (800, 200_000_000)
    limits = replace(livi.ELBOS, max_exact_dim=3, max_exact_entries=216)
    monkeypatch.setattr(livi, "ELBOS", limits)
    site = draw(SemiImplicit(nn.Linear(d, m), d, 0.1).expand((batch,)))
    elbo.score_parts(linearised(elbo, site), None)
    assert bool(elbo.residuals) == (method == "stochastic")  # exact log-determinants have none


def test_residuals_by_site():
    hard, easy = nn.Linear(30, 30), nn.Linear(1, 1)

    def model():
        pyro.sample("hard", dist.Normal(torch.zeros(30), 1).to_event(1))
        pyro.sample("easy", dist.Normal(torch.zeros(1), 1).to_event(1))

    def guide():
        pyro.sample("hard", SemiImplicit(hard, 30, 0.01))
        pyro.sample("easy", SemiImplicit(easy, 1, 0.01))

    elbo = LIVI_ELBO(log_det="stochastic", max_iterations=2)
    elbo.loss(model, guide)
    assert elbo.residuals["hard"] > 0.1 > elbo.residuals["easy"]
