# SPDX-License-Identifier: Apache-2.0
"""Variational autoencoders: one decoder, trained with a Gaussian and with implicit encoders.

The images are scikit-learn's 8x8 digits, or MNIST from its published files, binarised once: each
pixel is drawn with its grey value as probability. All encoders are networks with two hidden layers:

- ``gaussian``: the outputs are the mean and the standard deviations of q(z | x);
- ``kivi``, ``avb``: the noise enters at the first hidden layer, so q(z | x) is implicit;
- ``livi``, ``sivi``, ``uivi``: the same with Gaussian noise of a small, learnt scale at the output;
- ``injective``: a network of the image gives the context of an autoregressive generator;
- ``gaussian-iw``, ``injective-iw``: two of these, trained by the importance-weighted bound.

For each encoder the script prints the method's own bound on training and test images, and the test
log-likelihood of the decoder. The bounds of ``gaussian``, ``injective`` (``-iw`` included) and
``sivi`` are bounds on average; the others are estimates, and that of ``kivi`` is too low with few
``--bound-particles``.

Importance sampling estimates the log-likelihood, in the same way for all encoders: a multivariate t
distribution with five degrees of freedom is fitted to draws of q(z | x), fitted again to its own
weighted draws, and then provides ``--importance-samples`` draws for every image. The estimate is
reliable if the effective sample size (ESS, of the median image) is large. "Monte Carlo" is its
standard error, "s.e." the standard error from the choice of test images.

All encoders train for ``--epochs``, so that no decoder has learnt longer than another. With
``--checkpoint`` a killed training continues from the last epoch, to the same result.

Each encoder takes up to a minute. The second command has the sizes of the KIVI paper::

    python examples/vae.py
    python examples/vae.py --data-dir mnist/ --hidden 500 --entropy-particles 100 --lr 1e-3
"""

from __future__ import annotations

import argparse
import gzip
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import Trace_ELBO
from sklearn.datasets import load_digits
from torch import Tensor, nn
from tqdm import trange

from pyro_implicit import (
    AVB_ELBO,
    KIVI_ELBO,
    LIVI_ELBO,
    SIVI_ELBO,
    UIVI_ELBO,
    AutoregressiveGenerator,
    Implicit,
    InjectiveELBO,
    NoisyEncoder,
    SemiImplicit,
)
from pyro_implicit.fitting.checkpoint import TrainingCheckpoint
from pyro_implicit.infer import ImplicitELBO, ImplicitRenyiELBO


class GaussianEncoder(nn.Module):
    """An encoder whose q(z | x) is a Gaussian with independent coordinates."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> dist.TorchDistribution:
        loc, log_scale = self.network(x).chunk(2, dim=-1)
        return dist.Normal(loc, log_scale.exp()).to_event(1)


class ImplicitEncoder(nn.Module):
    """An encoder that maps noise to z, plus Gaussian noise of a learnt scale if given."""

    def __init__(self, network: NoisyEncoder, scale: float | None = None) -> None:
        super().__init__()
        self.network = network
        self.log_scale = None
        if scale is not None:
            self.log_scale = nn.Parameter(torch.full((network.output_dim,), math.log(scale)))

    def forward(self, x: Tensor) -> Implicit:
        noise_dim = self.network.noise_dim
        if self.log_scale is None:
            return Implicit(self.network, noise_dim, context=x)
        return SemiImplicit(self.network, noise_dim, self.log_scale.exp(), context=x)


class InjectiveEncoder(nn.Module):
    """q(z | x) is what an injective generator makes of noise, given features of the image."""

    def __init__(self, network: nn.Module, generator: AutoregressiveGenerator) -> None:
        super().__init__()
        self.network, self.generator = network, generator

    def forward(self, x: Tensor) -> Implicit:
        return Implicit(self.generator, self.generator.noise_dim, context=self.network(x))


class VAE(nn.Module):
    """Decoder and encoder as a Pyro model and its guide."""

    def __init__(self, decoder: nn.Module, encoder: nn.Module, latent_dim: int) -> None:
        super().__init__()
        self.decoder, self.encoder, self.latent_dim = decoder, encoder, latent_dim

    def model(self, x: Tensor) -> None:
        pyro.module("decoder", self.decoder)
        with pyro.plate("images", len(x)):
            z = pyro.sample("z", dist.Normal(x.new_zeros(self.latent_dim), 1.0).to_event(1))
            pyro.sample("x", dist.Bernoulli(logits=self.decoder(z)).to_event(1), obs=x)

    def guide(self, x: Tensor) -> None:
        pyro.module("encoder", self.encoder)
        with pyro.plate("images", len(x)):
            pyro.sample("z", self.encoder(x))


def mlp(num_inputs: int, hidden: int, num_outputs: int) -> nn.Sequential:
    layers = [nn.Linear(num_inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden, num_outputs))


def build(name: str, num_pixels: int, args: argparse.Namespace) -> tuple[VAE, Trace_ELBO]:
    """Return the named autoencoder and its ELBO, with one draw per image for the likelihood."""
    if name.endswith("-iw"):
        vae, _ = build(name.removesuffix("-iw"), num_pixels, args)
        return vae, ImplicitRenyiELBO(0.0, args.entropy_particles, vectorize_particles=True)
    decoder = mlp(args.latent_dim, args.hidden, num_pixels)
    # LIVI needs second derivatives of the network, which miss the kinks of ReLU.
    activation = "elu" if name == "livi" else "relu"
    noisy = NoisyEncoder(num_pixels, args.latent_dim, (args.hidden, args.hidden), activation)
    encoder: nn.Module
    elbo: Trace_ELBO
    if name == "gaussian":
        encoder = GaussianEncoder(mlp(num_pixels, args.hidden, 2 * args.latent_dim))
        elbo = ImplicitELBO(1)
    elif name == "kivi":
        encoder, elbo = ImplicitEncoder(noisy), KIVI_ELBO(1, args.entropy_particles)
    elif name == "avb":
        encoder = ImplicitEncoder(noisy)
        elbo = AVB_ELBO(1, args.entropy_particles, covariance="full")
    elif name == "livi":
        encoder, elbo = ImplicitEncoder(noisy, scale=0.05), LIVI_ELBO(1)
    elif name == "injective":
        features = mlp(num_pixels, args.hidden, args.hidden)
        generator = AutoregressiveGenerator(args.latent_dim, context_dim=args.hidden)
        encoder, elbo = InjectiveEncoder(features, generator), InjectiveELBO(1)
    else:
        encoder = ImplicitEncoder(noisy, scale=0.3)
        mixing = {"num_mixing": args.entropy_particles}
        elbo = SIVI_ELBO(1, **mixing) if name == "sivi" else UIVI_ELBO(1, **mixing)
    return VAE(decoder, encoder, args.latent_dim).to(args.device), elbo


def load(folder: Path | None, num_train: int | None, num_test: int | None) -> tuple[Tensor, Tensor]:
    """Return training and test images, ``(num_images, num_pixels)``, of zeros and ones."""
    generator = torch.Generator().manual_seed(0)
    if folder is None:
        grey = torch.tensor(load_digits().data).float() / 16
        train, test = grey[torch.randperm(len(grey), generator=generator)].split([1500, 297])
    else:
        train, test = (read_images(folder / f"{part}-images-idx3-ubyte.gz") for part in PARTS)
    train, test = (torch.bernoulli(grey, generator=generator) for grey in (train, test))
    return train[:num_train], test[:num_test]


PARTS = ["train", "t10k"]


def read_images(path: Path) -> Tensor:
    content = gzip.decompress(path.read_bytes())
    _, num_images, *size = np.frombuffer(content, ">i4", count=4)
    pixels = np.frombuffer(content, np.uint8, offset=16).reshape(num_images, math.prod(size))
    return torch.tensor(pixels).float() / 255


class Progress:
    """What a resumed training must know besides parameters, optimisers and random streams."""

    def __init__(self) -> None:
        self.epochs, self.seconds = 0, 0.0


def fit(
    vae: VAE, elbo: Trace_ELBO, images: Tensor, args: argparse.Namespace, name: str
) -> Progress:
    """Train an autoencoder, from its checkpoint if there is one."""
    optimiser = torch.optim.Adam(vae.parameters())
    # AVB makes a network and its optimiser in the first step.
    elbo.differentiable_loss(vae.model, vae.guide, images[: args.batch_size]).backward()
    parameters = dict(vae.named_parameters())
    if isinstance(elbo, nn.Module):
        parameters |= elbo.named_parameters(prefix="elbo")
    optimisers = {"": optimiser} | getattr(elbo, "optimisers", {})
    progress = Progress()
    stored = TrainingCheckpoint(progress, parameters, optimisers, elbo)
    file = None if args.checkpoint is None else args.checkpoint / f"{name}-{args.seed}.pt"
    if file is not None and file.exists():
        stored.load(file)
    for epoch in (bar := trange(progress.epochs, args.epochs, desc=name)):
        start = time.process_time()
        for group in optimiser.param_groups:
            group["lr"] = args.lr * 0.1 ** (epoch / args.epochs)
        total = 0.0
        for batch in torch.randperm(len(images)).split(args.batch_size):
            optimiser.zero_grad()
            loss = elbo.differentiable_loss(vae.model, vae.guide, images[batch])
            loss.backward()
            optimiser.step()
            total += loss.item()
        progress.epochs = epoch + 1
        progress.seconds += time.process_time() - start
        if file is not None:
            stored.save(file)
        bar.set_postfix(bound=f"{-total / len(images):.2f}", refresh=False)
    return progress


@torch.no_grad()
def mean_bound(elbo: Trace_ELBO, vae: VAE, images: Tensor, args: argparse.Namespace) -> float:
    """Return the bound per image."""
    rounds = max(1, 1000 // len(images))
    batches = images.split(args.batch_size)
    losses = [elbo.loss(vae.model, vae.guide, x) for x in batches for _ in range(rounds)]
    return -sum(losses) / (rounds * len(images))


class LogLikelihood(NamedTuple):
    """Estimate log p(x) of each image, and the effective sample size of the estimate."""

    value: Tensor
    ess: Tensor


@torch.no_grad()
def log_likelihood(
    decoder: Callable[[Tensor], Tensor], draws: Tensor, images: Tensor, num_samples: int
) -> LogLikelihood:
    """Estimate log p(x) by importance sampling from t distributions fitted to encoder draws.

    :param decoder: from latents ``(*, latent_dim)`` to logits ``(*, num_pixels)``.
    :param draws: of the encoder, ``(num_draws, num_images, latent_dim)``.
    :param images: ``(num_images, num_pixels)``, of zeros and ones.
    """
    prior = dist.Normal(draws.new_zeros(draws.shape[-1]), 1.0).to_event(1)

    def weigh(proposal: dist.TorchDistribution) -> tuple[Tensor, Tensor]:
        z = proposal.sample((num_samples,))
        log_joint = dist.Bernoulli(logits=decoder(z)).to_event(1).log_prob(images)
        return z, log_joint + prior.log_prob(z) - proposal.log_prob(z)

    proposal = student(draws, torch.full_like(draws[..., 0], 1 / len(draws)))
    z, log_weights = weigh(proposal)
    _, log_weights = weigh(student(z, log_weights.softmax(0)))
    ess = 1 / log_weights.softmax(0).square().sum(0)
    return LogLikelihood(log_weights.logsumexp(0) - math.log(num_samples), ess)


def student(z: Tensor, weights: Tensor) -> dist.TorchDistribution:
    """Return t distributions with the weighted moments of z as location and scale."""
    mean = (weights.unsqueeze(-1) * z).sum(0)
    centered = z - mean
    covariance = torch.einsum("sb,sbi,sbj->bij", weights, centered, centered)
    # Lower limit for coordinates with almost constant draws, or weights of a single draw.
    floor = 1e-4 * torch.eye(z.shape[-1], dtype=z.dtype, device=z.device)
    return dist.MultivariateStudentT(5.0, mean, torch.linalg.cholesky(covariance + floor))


def evaluate(vae: VAE, images: Tensor, num_samples: int) -> LogLikelihood:
    with torch.no_grad():
        parts = [
            log_likelihood(vae.decoder, vae.encoder(batch).sample((1000,)), batch, num_samples)
            for batch in images.split(10)
        ]
    return LogLikelihood(*(torch.cat(part) for part in zip(*parts, strict=True)))


@torch.no_grad()
def pictures(vae: VAE, images: Tensor) -> list[Tensor]:
    """Return images, their reconstructions and as many prior samples, each ``(16, pixels)``."""
    images = images[:16]
    prior = torch.randn(16, vae.latent_dim, device=images.device)
    decoded = [vae.decoder(z).sigmoid() for z in (vae.encoder(images).sample(), prior)]
    return [images, *decoded]


def plot(rows: dict[str, list[Tensor]], path: Path) -> None:
    size = (9, 0.85 * len(rows) + 0.3)
    figure, axes = plt.subplots(len(rows), 3, figsize=size, squeeze=False, layout="constrained")
    for row, (name, grids) in zip(axes, rows.items(), strict=True):
        row[0].set_ylabel(name)
        for axis, grid in zip(row, grids, strict=True):
            side = math.isqrt(grid.shape[-1])
            grid = nn.functional.pad(grid.cpu(), (0, 0, 0, 16 - len(grid)))
            tiles = nn.functional.pad(grid.reshape(2, 8, side, side), (1, 1, 1, 1), value=0.3)
            mosaic = tiles.transpose(1, 2).flatten(2).flatten(0, 1)
            axis.imshow(mosaic.numpy(), "gray_r", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
    for axis, title in zip(axes[0], ["test images", "reconstructions", "samples"], strict=True):
        axis.set_title(title)
    figure.savefig(path, dpi=150)


def run(
    name: str, train: Tensor, test: Tensor, args: argparse.Namespace
) -> tuple[VAE, dict[str, float]]:
    """Train and measure one autoencoder."""
    pyro.clear_param_store()
    pyro.set_rng_seed(args.seed)
    vae, elbo = build(name, train.shape[1], args)
    seconds = fit(vae, elbo, train, args, name).seconds
    for option in ("num_entropy_particles", "num_mixing"):  # more than training could afford
        if hasattr(elbo, option):
            setattr(elbo, option, args.bound_particles)
    bounds = [mean_bound(elbo, vae, x[: len(test)], args) for x in (train, test)]
    value, ess = evaluate(vae, test[: args.num_eval], args.importance_samples)
    # The relative variance of a mean weight is, to first order, the variance of its logarithm.
    noise = (1 / ess - 1 / args.importance_samples).clamp(min=0).sum().sqrt() / len(value)
    numbers = {"train_bound": bounds[0], "test_bound": bounds[1], "num_eval": len(value)}
    numbers |= {"log_likelihood": value.mean().item(), "monte_carlo": noise.item()}
    numbers |= {"standard_error": (value.std() / len(value) ** 0.5).item()}
    return vae, numbers | {"ess": ess.median().item(), "seconds": seconds}


def main(args: argparse.Namespace) -> None:
    train, test = (x.to(args.device) for x in load(args.data_dir, args.num_train, args.num_test))
    titles = ["train bound", "test bound", "gap", "log p(test)", "s.e.", "Monte Carlo", "ESS"]
    row = "{:9} {:>11} {:>11} {:>6} {:>12} {:>6} {:>12} {:>6} {:>8}".format
    table = [row("encoder", *titles, "s/epoch")]
    grids = {}
    for name in args.encoders:
        vae, found = run(name, train, test, args)
        found["gap"] = found["train_bound"] - found["test_bound"]
        keys = ["train_bound", "test_bound", "gap", "log_likelihood", "standard_error"]
        cells = [*(f"{found[key]:.2f}" for key in keys), f"{found['monte_carlo']:.3f}"]
        seconds = found["seconds"] / args.epochs
        table.append(row(name, *cells, f"{found['ess']:.0f}", f"{seconds:.2f}"))
        print(table[-1])
        grids[name] = pictures(vae, test)
    print(f"\n{len(train)} training and {len(test)} test images of {train.shape[1]} pixels")
    print(
        f"log p(test): {found['num_eval']} images, "
        f"{args.importance_samples} importance samples each"
    )
    print("\n".join(table))
    args.out.mkdir(parents=True, exist_ok=True)
    picture = args.out / "vae.png"
    plot(grids, picture)
    print(f"Figure: {picture}")


ENCODERS = ["gaussian", "kivi", "avb", "livi", "sivi", "uivi", "injective"]
ENCODERS += ["gaussian-iw", "injective-iw"]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, help="folder of MNIST's *-images-idx3-ubyte.gz")
    parser.add_argument("--num-train", type=int, help="training images; all by default")
    parser.add_argument("--num-test", type=int, help="test images; all by default")
    parser.add_argument("--encoders", nargs="+", choices=ENCODERS, default=ENCODERS[:5])
    parser.add_argument("--latent-dim", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=100, help="units of each hidden layer")
    parser.add_argument(
        "--entropy-particles", type=int, default=20, help="draws per image for entropy or weights"
    )
    parser.add_argument(
        "--bound-particles", type=int, default=200, help="draws per image for the bounds"
    )
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--checkpoint", type=Path, help="folder from which training continues")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate, decays to a tenth")
    parser.add_argument("--importance-samples", type=int, default=5000, help="per image")
    parser.add_argument("--num-eval", type=int, default=200, help="test images of log p(test)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the figure")
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
