# SPDX-License-Identifier: Apache-2.0
"""Autoencoders on images of noise: resumed trainings, and the table."""

from __future__ import annotations

import pytest
import torch

from benchmarks import vae_mnist
from benchmarks.common import parse_arguments, read_records
from pyro_implicit.fitting.checkpoint import TrainingCheckpoint

TINY = (
    "--hidden 6 --latent-dim 2 --epochs 3 --num-eval 4 --importance-samples 20 --batch-size 20 "
    "--entropy-particles 12 --bound-particles 12"
)


@pytest.fixture(scope="module")
def vae():
    return vae_mnist.example()


@pytest.fixture
def images(vae, monkeypatch):
    stream = torch.Generator().manual_seed(0)
    parts = tuple(torch.bernoulli(torch.full((n, 9), 0.3), generator=stream) for n in (80, 10))
    monkeypatch.setattr(vae, "load", lambda *args: parts)


def call(vae, folder, *words):
    options = [*TINY.split(), "--out", str(folder / "x.jsonl"), "--runs", str(folder / "runs")]
    vae_mnist.main(vae, vae_mnist.parser(vae).parse_args([*options, *words]))
    return read_records(folder / "x.jsonl")


@pytest.mark.parametrize("encoder", ["avb", "injective-iw"])
def test_a_killed_training_continues_to_the_same_result(
    encoder, vae, images, tmp_path, monkeypatch
):
    words = ["--encoders", encoder]
    (exact,) = call(vae, tmp_path / "a", *words)
    save, epochs = TrainingCheckpoint.save, []

    def killed(self, path):
        save(self, path)
        epochs.append(self.state.epochs)
        if len(epochs) == 2:
            raise SystemExit

    monkeypatch.setattr(TrainingCheckpoint, "save", killed)
    with pytest.raises(SystemExit):
        call(vae, tmp_path / "b", *words)
    (found,) = call(vae, tmp_path / "b", *words)
    assert epochs == [1, 2, 3]
    for key in ("train_bound", "test_bound", "log_likelihood"):
        assert found[key] == exact[key], key


def test_table_by_hand(vae):
    common = {"latent_dim": 8, "hidden": 5, "entropy_particles": 4, "train_bound": -2.0}
    common |= {"test_bound": -3.0, "ess": 7.0, "epochs": 9, "seconds": 1800.0}
    records = [
        common | {"encoder": encoder, "seed": seed, "log_likelihood": value}
        for encoder, seed, value in (
            ("gaussian", 0, -5.0),
            ("gaussian", 1, -6.0),
            ("kivi", 1, -3.5),
        )
    ]
    lines = vae_mnist.report(records, vae.ENCODERS).splitlines()
    assert lines[0] == "8 latents, 5 units, 9 epochs:"
    assert lines[4].startswith(
        "| gaussian, 4 particles | -2.00 | -3.00 | -5.50 | 0.00 (0.00, 0.00)"
    )
    wanted = "| kivi, 4 particles | -2.00 | -3.00 | -3.50 | 2.50 (2.50) | 7 | 0.50 | 1 |"
    assert lines[5] == wanted


def test_paper_settings(vae):
    words = ["--paper", "--latent-dim", "10", "--encoders", "sivi"]
    args = parse_arguments(vae_mnist.parser(vae), lambda args: vae_mnist.PAPER, words)
    assert (args.latent_dim, args.hidden, args.epochs) == (10, 500, 3000)
