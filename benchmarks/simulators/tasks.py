# SPDX-License-Identifier: Apache-2.0
"""Two moons and SLCP (Lueckmann et al. 2021, appendix T), reference draws and C2ST.

It imports neither Pyro nor sbi, so that both sides use the same code.
"""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

LOW = {"two_moons": -1.0, "slcp": -3.0}
DIM = {"two_moons": 2, "slcp": 5}
#: Observations are simulated from draws of the prior with these seeds. Development looked at 100.
LOOK, SCORE = [100], [1, 2, 3]


def simulate(task: str, theta: Tensor) -> Tensor:
    """Simulate data of parameters ``(*batch, dim)``."""
    if task == "two_moons":
        angle = math.pi * (torch.rand(theta.shape[:-1]) - 0.5)
        radius = 0.1 + 0.01 * torch.randn(theta.shape[:-1])
        moon = torch.stack([radius * angle.cos() + 0.25, radius * angle.sin()], -1)
        total, difference = theta.sum(-1), theta[..., 1] - theta[..., 0]
        return moon + torch.stack([-total.abs(), difference], -1) / math.sqrt(2)
    mean, scale = theta[..., :2], theta[..., 2:4].square()
    rho = theta[..., 4].tanh()
    noise = torch.randn(theta.shape[:-1] + (4, 2))
    first = noise[..., 0]
    second = rho[..., None] * first + (1 - rho.square()).sqrt()[..., None] * noise[..., 1]
    points = mean[..., None, :] + scale[..., None, :] * torch.stack([first, second], -1)
    return points.flatten(-2)


def observe(task: str, seed: int) -> Tensor:
    """Return the data of an observation."""
    with torch.random.fork_rng():
        torch.manual_seed(1000 + seed)
        theta = LOW[task] * (1 - 2 * torch.rand(DIM[task]))
        return simulate(task, theta)


def log_likelihood(theta: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return that of SLCP at parameters ``(n, 5)``."""
    points = y.reshape(4, 2)
    scale = theta[:, 2:4] ** 2
    rho = np.tanh(theta[:, 4])
    white = (points - theta[:, None, :2]) / scale[:, None]
    rest = 1 - rho**2
    cross = white[..., 0] ** 2 + white[..., 1] ** 2 - 2 * rho[:, None] * white.prod(-1)
    return -0.5 * cross.sum(-1) / rest - 4 * (np.log(scale).sum(-1) + 0.5 * np.log(rest))


def reference(task: str, y: Tensor, number: int) -> np.ndarray:
    """Return exact draws (two moons), or resampled prior draws after many Metropolis steps."""
    random = np.random.default_rng(0)
    if task == "two_moons":
        angle = np.pi * (random.random(4 * number) - 0.5)
        radius = 0.1 + 0.01 * random.standard_normal(4 * number)
        moon = np.stack([radius * np.cos(angle) + 0.25, radius * np.sin(angle)], -1)
        shift = math.sqrt(2) * (y.numpy() - moon)  # -|sum| and difference
        total = random.choice([-1, 1], 4 * number) * shift[:, 0]
        theta = np.stack([total - shift[:, 1], total + shift[:, 1]], -1) / 2
        inside = (shift[:, 0] <= 0) & (np.abs(theta) <= 1).all(-1)
        return theta[inside][:number]
    data = y.double().numpy()
    pool, heights = [], []
    for _ in range(40):
        theta = random.uniform(-3, 3, (100_000, 5))
        height = log_likelihood(theta, data)
        kept = height > height.max() - 30
        pool.append(theta[kept])
        heights.append(height[kept])
    pool, heights = np.concatenate(pool), np.concatenate(heights)
    shares = np.exp(heights - heights.max())
    theta = pool[random.choice(len(pool), number, p=shares / shares.sum())]
    height = log_likelihood(theta, data)
    accepted = 0.0
    half = number // 2
    for step in range(4000):  # differential evolution: one half moves by differences of the other
        mine = np.arange(number)[(step % 2) * half : (step % 2 + 1) * half]
        other = np.setdiff1d(np.arange(number), mine)
        first, second = random.choice(other, half), random.choice(other, half)
        size = random.choice([0.1, 0.3, 0.75, 1.0])
        noise = 1e-4 * random.standard_normal((half, 5))
        proposal = theta[mine] + size * (theta[first] - theta[second]) + noise
        proposal[:, 2:4] *= random.choice([-1, 1], (half, 2))  # symmetries of the posterior
        new = log_likelihood(proposal, data)
        new[(np.abs(proposal) > 3).any(-1)] = -np.inf
        moves = np.log(random.random(half)) < new - height[mine]
        theta[mine[moves]], height[mine[moves]] = proposal[moves], new[moves]
        accepted += moves.mean() / 4000
    print(f"# slcp reference: {len(pool)} weighted, {accepted:.2f} accepted", flush=True)
    return theta


def c2st(x: np.ndarray, y: np.ndarray) -> float:
    """Return the accuracy of sbibm's classifier: an MLP with 10 d units, 5-fold."""
    from sklearn.model_selection import KFold, cross_val_score
    from sklearn.neural_network import MLPClassifier

    loc, scale = x.mean(0), x.std(0)
    both = np.concatenate([(x - loc) / scale, (y - loc) / scale])
    label = np.r_[np.zeros(len(x)), np.ones(len(y))]
    width = 10 * x.shape[1]
    model = MLPClassifier((width, width), max_iter=1000, random_state=1)
    folds = KFold(5, shuffle=True, random_state=1)
    return float(cross_val_score(model, both, label, cv=folds, scoring="accuracy").mean())


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return the options of both scripts."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--tasks", nargs="+", default=list(DIM))
    options.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    options.add_argument("--observations", type=int, nargs="+", default=SCORE)
    options.add_argument("--number", type=int, default=10_000)
    options.add_argument("--draws", type=int, default=3000)
    return options


def print_score(exact: np.ndarray, draws: Tensor, cpu_training: float, **key: Any) -> None:
    """Print one JSON line."""
    score = {"c2st": round(c2st(exact, draws.numpy()), 3), "cpu_training": round(cpu_training, 1)}
    print(json.dumps(key | score), flush=True)
