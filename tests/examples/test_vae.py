# SPDX-License-Identifier: Apache-2.0
"""The autoencoder example: its importance sampling against exact values, and its data."""

from __future__ import annotations

import gzip
import importlib.util
import math
import struct
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch

PATH = Path(__file__).parents[2] / "examples" / "vae.py"


@pytest.fixture(scope="module")
def vae():
    pytest.importorskip("sklearn")
    spec = importlib.util.spec_from_file_location("vae_example", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(estimate, exact, num_samples):
    """Within four standard errors of every image, which the effective sample size gives."""
    error = (1 / estimate.ess - 1 / num_samples).sqrt()
    assert (error < 0.05).all(), error
    assert ((estimate.value - exact).abs() < 4 * error).all(), (estimate.value - exact) / error


def test_log_likelihood_of_a_constant_decoder(vae):
    logits = torch.randn(5, dtype=torch.float64)
    images = torch.bernoulli(torch.full((4, 5), 0.5, dtype=torch.float64))
    # An encoder that is narrow and off the posterior, which is the prior.
    draws = 0.7 + 0.5 * torch.randn(500, 4, 3, dtype=torch.float64)
    estimate = vae.log_likelihood(lambda z: logits.expand(*z.shape[:-1], 5), draws, images, 20000)
    check(estimate, dist.Bernoulli(logits=logits).to_event(1).log_prob(images), 20000)


@pytest.mark.parametrize("spread", [0.3, 1.0])
def test_log_likelihood_by_quadrature(vae, spread):
    weight = 2 * torch.randn(6, 2, dtype=torch.float64)
    images = torch.bernoulli(torch.full((4, 6), 0.5, dtype=torch.float64))

    def decoder(z):
        return torch.sin(z @ weight.T) + z[..., :1]

    axis = torch.linspace(-7, 7, 701, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    log_joint = dist.Bernoulli(logits=decoder(grid).unsqueeze(1)).to_event(1).log_prob(images)
    log_joint = log_joint + dist.Normal(0.0, 1.0).log_prob(grid).sum(-1, keepdim=True)
    exact = log_joint.logsumexp(0) + 2 * math.log(axis[1] - axis[0])
    draws = spread * torch.randn(500, 4, 2, dtype=torch.float64)
    check(vae.log_likelihood(decoder, draws, images, 20000), exact, 20000)


def test_effective_sample_size(vae):
    # Weights of no variance at all would give all samples; a t proposal leaves most of them.
    pyro.set_rng_seed(0)
    draws = torch.randn(2000, 3, 2, dtype=torch.float64)
    estimate = vae.log_likelihood(lambda z: 0 * z, draws, torch.ones(3, 2).double(), 4000)
    assert ((estimate.ess > 0.6 * 4000) & (estimate.ess < 4000)).all()


def test_student_has_the_weighted_moments(vae):
    torch.manual_seed(0)
    z = torch.randn(50, 2, 3, dtype=torch.float64)
    counts = torch.randint(0, 3, (50, 2))
    counts[0] += 150 - counts.sum(0)
    proposal = vae.student(z, counts / 150.0)
    for image in range(2):
        repeated = z[:, image].repeat_interleave(counts[:, image], 0)
        torch.testing.assert_close(proposal.loc[image], repeated.mean(0))
        shape = proposal.scale_tril[image] @ proposal.scale_tril[image].T
        floor = 1e-4 * torch.eye(3, dtype=torch.float64)
        torch.testing.assert_close(shape, repeated.T.cov(correction=0) + floor)


def test_digits_are_binary_and_always_the_same(vae):
    train, test = vae.load(None, None, None)
    assert train.shape == (1500, 64) and test.shape == (297, 64)
    assert set(train.unique().tolist()) == {0.0, 1.0}
    again, few = vae.load(None, 7, 3)
    assert torch.equal(again, train[:7]) and torch.equal(few, test[:3])
    assert 0.2 < train.mean() < 0.4


def test_mnist_files(vae, tmp_path):
    sizes = {"train": 5, "t10k": 2}
    for part, count in sizes.items():
        pixels = bytes([0, 255, 255, 0, 0, 255] * count)
        content = struct.pack(">4i", 2051, count, 2, 3) + pixels
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(content))
    train, test = vae.load(tmp_path, 4, None)
    expected = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0, 1.0])
    assert torch.equal(train, expected.expand(4, 6))
    assert torch.equal(test, expected.expand(2, 6))
