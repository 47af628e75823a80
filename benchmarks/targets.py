# SPDX-License-Identifier: Apache-2.0
"""Posteriors with known exact draws, as references for guides.

Every :class:`KnownPosterior` holds an ordinary Pyro model and ``truth(num_draws, seed)``, which
returns fresh draws of shape ``(num_draws, dim)``. All models broadcast over Pyro's particle plate.

* ``banana``: :math:`(x_1, x_1^2 + x_2 + 1) \\sim N(0, [[1, .9], [.9, 1]])`
* ``x_shape``: two crossed Gaussians with correlations .9 and -.9
* ``x_shape_gap``: the same two with their centres at (-5, 0) and (5, 0)
* ``multimodal``: two unit Gaussians four apart
* ``gmm40``: forty unit Gaussians with centres uniform in [-40, 40]^2 (after Midgley et al., 2023)
* ``waveform``: Bayesian logistic regression with 22 coefficients (Yin and Zhou, 2018, section 4.4);
  needs the files ``sivi_blr/waveform.npz`` and ``sivi_blr/waveform_hmc.npz``
* ``conditioned_diffusion``: the path of a double-well diffusion over 100 Euler steps, every fifth
  of them observed with noise (after Detommaso et al., 2018); needs the file
  ``conditioned_diffusion/100.npz``, whose 10,000 draws of a long HMC run are the truth
* ``funnel``, ``funnel_wide``: :math:`v \\sim N(0, s^2)`, nine :math:`x_i \\sim N(0, e^v)`, with
  :math:`s = 1.5` and :math:`s = 3` (Neal, 2003)

**References:**

[1] `Semi-Implicit Variational Inference`, M. Yin and M. Zhou, ICML 2018.
[2] `Slice Sampling`, R. M. Neal, Annals of Statistics 2003.
[3] `A Stein variational Newton method`, G. Detommaso et al., NeurIPS 2018.
[4] `Flow Annealed Importance Sampling Bootstrap`, L. I. Midgley et al., ICLR 2023.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints

__all__ = [
    "TARGETS",
    "KnownPosterior",
    "MissingData",
    "gmm40_centers",
    "make_target",
    "modes_found",
    "weight_total_variation",
]


class MissingData(Exception):
    """The data files of a target are missing in ``--data-dir``."""


@dataclass(frozen=True)
class KnownPosterior:
    """A model, its exact sampler, and the criterion of success.

    :param name: the key in :data:`TARGETS`.
    :param sites: the latent sites, in the order of the columns of ``truth``.
    :param model: a Pyro model without arguments.
    :param truth: ``(num_draws, seed) -> Tensor`` of shape ``(num_draws, dim)``; fewer draws if a
        file has fewer.
    :param threshold: the largest ratio to the floor that counts as success.
    """

    name: str
    sites: tuple[str, ...]
    model: Callable[[], object]
    truth: Callable[[int, int], Tensor]
    threshold: float = 1.5

    def flatten(self, draws: dict[str, Tensor]) -> Tensor:
        """Concatenate the draws of all sites: shape ``(num_draws, dim)``."""
        return torch.cat(
            [
                draws[site].flatten(1) if draws[site].dim() > 1 else draws[site][:, None]
                for site in self.sites
            ],
            dim=-1,
        )


def _load(data_dir: Path | None, name: str) -> dict[str, np.ndarray]:
    path = Path(data_dir or ".") / name
    if not path.exists():
        raise MissingData(f"{path} not found: point --data-dir at its folder")
    return dict(np.load(path))


def _generator(seed: int, device: str) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)


def _banana(device: str, data_dir: Path | None) -> KnownPosterior:
    standard_normal = dist.Normal(torch.tensor(0.0, device=device), 1.0)

    def model() -> None:
        x1 = pyro.sample("x1", standard_normal)
        pyro.sample("x2", dist.Normal(0.9 * x1 - x1**2 - 1.0, math.sqrt(0.19)))

    def truth(num_draws: int, seed: int) -> Tensor:
        e = torch.randn(num_draws, 2, device=device, generator=_generator(seed, device))
        y1, y2 = e[:, 0], 0.9 * e[:, 0] + math.sqrt(1 - 0.9**2) * e[:, 1]
        return torch.stack([y1, y2 - y1**2 - 1.0], dim=-1)

    return KnownPosterior("banana", ("x1", "x2"), model, truth, threshold=2.0)


class _Mixture(dist.MixtureSameFamily):
    """A mixture on R^d with a real support: Pyro has no bijection for mixture supports."""

    support = constraints.real_vector


def _gaussian_mixture(
    name: str, means: Tensor, covariances: Tensor, search_scale: float | None = None
) -> KnownPosterior:
    """An equal mixture of Gaussians.

    :param search_scale: if given, the prior of the latent has no density, and its draws, which
        have this scale, only determine the search region.
    """
    scale_trils = torch.linalg.cholesky(covariances)
    mixture = _Mixture(
        dist.Categorical(logits=torch.zeros_like(means[:, 0])),
        dist.MultivariateNormal(means, scale_tril=scale_trils),
    )

    def model() -> None:
        if search_scale is None:
            pyro.sample("x", mixture)
            return
        anywhere = dist.Normal(torch.zeros_like(means[0]), search_scale).to_event(1).mask(False)
        x = pyro.sample("x", anywhere)
        pyro.sample("mixture", mixture, obs=x)

    def truth(num_draws: int, seed: int) -> Tensor:
        device = str(means.device)
        generator = _generator(seed, device)
        k = torch.randint(len(means), (num_draws,), device=device, generator=generator)
        e = torch.randn(num_draws, means.shape[-1], device=device, generator=generator)
        return means[k] + torch.einsum("nij,nj->ni", scale_trils[k], e)

    return KnownPosterior(name, ("x",), model, truth)


def _crossed(device: str) -> Tensor:
    """The two covariances of ``x_shape``."""
    return torch.tensor([[[2.0, 1.8], [1.8, 2.0]], [[2.0, -1.8], [-1.8, 2.0]]], device=device)


def _x_shape(device: str, data_dir: Path | None) -> KnownPosterior:
    return _gaussian_mixture("x_shape", torch.zeros(2, 2, device=device), _crossed(device))


def _x_shape_gap(device: str, data_dir: Path | None) -> KnownPosterior:
    means = torch.tensor([[-5.0, 0.0], [5.0, 0.0]], device=device)
    return _gaussian_mixture("x_shape_gap", means, _crossed(device), search_scale=10.0)


def gmm40_centers(device: str = "cpu") -> Tensor:
    """The centres of ``gmm40``, shape ``(40, 2)``: equal on all devices."""
    uniform = torch.rand(40, 2, dtype=torch.float64, generator=_generator(0, "cpu"))
    return (80 * uniform - 40).to(device, torch.get_default_dtype())


def _gmm40(device: str, data_dir: Path | None) -> KnownPosterior:
    identity = torch.eye(2, device=device).expand(40, 2, 2)
    return _gaussian_mixture("gmm40", gmm40_centers(device), identity, search_scale=40.0)


def modes_found(draws: Tensor, centers: Tensor, radius: float = 4.0) -> int:
    """Count the modes with at least a tenth of their expected share of draws.

    :param draws: shape ``(num_draws, dim)``.
    :param centers: of unit Gaussians with equal weights, shape ``(num_modes, dim)``.
    :param radius: largest distance of a draw from its nearest centre.
    """
    distances, nearest = torch.cdist(draws, centers).min(-1)
    counts = nearest[distances <= radius].bincount(minlength=len(centers))
    return int((counts >= 0.1 * len(draws) / len(centers)).sum())


def weight_total_variation(draws: Tensor, centers: Tensor) -> float:
    """Return the total variation between the shares of draws by nearest centre and equal shares.

    :param draws: shape ``(num_draws, dim)``.
    :param centers: shape ``(num_modes, dim)``.
    """
    nearest = torch.cdist(draws, centers).argmin(-1)
    shares = nearest.bincount(minlength=len(centers)) / len(draws)
    return (shares - 1 / len(centers)).abs().sum().item() / 2


def _multimodal(device: str, data_dir: Path | None) -> KnownPosterior:
    means = torch.tensor([[-2.0, 0.0], [2.0, 0.0]], device=device)
    return _gaussian_mixture("multimodal", means, torch.eye(2, device=device).expand(2, 2, 2))


def _funnel(name: str, sd: float, device: str) -> KnownPosterior:
    scale = torch.tensor(sd, device=device)

    def model() -> None:
        v = pyro.sample("v", dist.Normal(0.0 * scale, scale))
        with pyro.plate("coordinates", 9):
            pyro.sample("x", dist.Normal(0.0, torch.exp(v / 2)))

    def truth(num_draws: int, seed: int) -> Tensor:
        e = torch.randn(num_draws, 10, device=device, generator=_generator(seed, device))
        v = sd * e[:, :1]
        return torch.cat([v, torch.exp(v / 2) * e[:, 1:]], dim=-1)

    return KnownPosterior(name, ("v", "x"), model, truth)


def _waveform(device: str, data_dir: Path | None) -> KnownPosterior:
    data = _load(data_dir, "sivi_blr/waveform.npz")
    reference = torch.tensor(_load(data_dir, "sivi_blr/waveform_hmc.npz")["draws"], device=device)
    X = torch.tensor(data["X_train"], device=device)
    y = torch.tensor(data["y_train"], device=device, dtype=X.dtype)

    def model() -> None:
        prior = dist.Normal(torch.zeros_like(X[0]), 10.0).to_event(1)
        beta = pyro.sample("beta", prior)
        with pyro.plate("rows", len(X)):
            pyro.sample("y", dist.Bernoulli(logits=torch.linalg.vecdot(X, beta)), obs=y)

    def score(beta: Tensor) -> Tensor:
        return (y - torch.sigmoid(beta @ X.T)) @ X - beta / 100

    def log_density(beta: Tensor) -> Tensor:
        logits = beta @ X.T
        log_likelihood = (y * logits - torch.nn.functional.softplus(logits)).sum(-1)
        return log_likelihood - beta.square().sum(-1) / 200

    def truth(num_draws: int, seed: int) -> Tensor:
        generator = _generator(seed, device)
        rows = torch.randint(len(reference), (num_draws,), device=device, generator=generator)
        frame = torch.linalg.cholesky(torch.cov(reference.T))
        return _hmc(log_density, score, reference[rows], frame, generator)

    return KnownPosterior("waveform", ("beta",), model, truth)


def _conditioned_diffusion(device: str, data_dir: Path | None) -> KnownPosterior:
    data = _load(data_dir, "conditioned_diffusion/100.npz")
    reference, y = (torch.tensor(data[key], device=device) for key in ("draws", "observations"))
    observed = torch.tensor(data["observed_steps"], device=device) - 1  # steps count from 1
    noise_sd = float(data["observation_sd"])
    dt = 1 / reference.shape[-1]

    def model() -> None:
        # The Euler steps carry the whole density, so they are evaluated jointly.
        anywhere = dist.Normal(torch.zeros_like(reference[0]), 0.1).to_event(1).mask(False)
        u = pyro.sample("u", anywhere)
        before = torch.nn.functional.pad(u[..., :-1], (1, 0))  # the path starts at 0
        drift = 10 * before * (1 - before**2) / (1 + before**2)
        steps = dist.Normal(before + dt * drift, math.sqrt(dt)).to_event(1)
        pyro.sample("steps", steps, obs=u)
        pyro.sample("y", dist.Normal(u[..., observed], noise_sd).to_event(1), obs=y)

    def truth(num_draws: int, seed: int) -> Tensor:
        # Seeds 2n and 2n + 1 share no draw.
        generator = _generator(seed // 2, device)
        rows = torch.randperm(len(reference), device=device, generator=generator)
        return reference[rows.chunk(2)[seed % 2][:num_draws]]

    return KnownPosterior("conditioned_diffusion", ("u",), model, truth)


def _hmc(
    log_density: Callable[[Tensor], Tensor],
    score: Callable[[Tensor], Tensor],
    start: Tensor,
    frame: Tensor,
    generator: torch.Generator,
    num_transitions: int = 4,
    num_leapfrogs: int = 8,
    step_size: float = 0.2,
) -> Tensor:
    """Replace draws of a posterior by the ends of short, whitened HMC chains.

    The chains start in equilibrium and need no warm-up. A trajectory of about a quarter turn (1.6)
    makes near-Gaussian draws independent of their initial points.

    :param start: draws of the posterior, shape ``(num_chains, dim)``.
    :param frame: Cholesky factor of the posterior covariance, shape ``(dim, dim)``.
    :returns: the new draws, shape ``(num_chains, dim)``.
    """
    position = start
    for _ in range(num_transitions):
        momentum = torch.empty_like(position).normal_(generator=generator)
        proposal, energy = position, log_density(position) - momentum.square().sum(-1) / 2
        momentum = momentum + step_size / 2 * score(proposal) @ frame
        for leapfrog in range(num_leapfrogs):
            proposal = proposal + step_size * momentum @ frame.T
            kick = step_size / (2 if leapfrog == num_leapfrogs - 1 else 1)
            momentum = momentum + kick * score(proposal) @ frame
        gain = log_density(proposal) - momentum.square().sum(-1) / 2 - energy
        uniform = torch.empty_like(gain).uniform_(generator=generator)
        position = torch.where((uniform.log() < gain)[:, None], proposal, position)
    return position


TARGETS: dict[str, Callable[[str, Path | None], KnownPosterior]] = {
    "banana": _banana,
    "x_shape": _x_shape,
    "x_shape_gap": _x_shape_gap,
    "multimodal": _multimodal,
    "gmm40": _gmm40,
    "waveform": _waveform,
    "conditioned_diffusion": _conditioned_diffusion,
    "funnel": lambda device, data_dir: _funnel("funnel", 1.5, device),
    "funnel_wide": lambda device, data_dir: _funnel("funnel_wide", 3.0, device),
}


def make_target(name: str, device: str = "cpu", data_dir: Path | None = None) -> KnownPosterior:
    """Build a target with its tensors on ``device``.

    :raises MissingData: if the target's data files are not in ``data_dir``.
    """
    return TARGETS[name](device, data_dir)
