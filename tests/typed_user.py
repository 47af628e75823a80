# SPDX-License-Identifier: Apache-2.0
"""A user's program against the public API, for ``mypy --strict`` (tox -e lint); it is not run."""

from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pyro_implicit import (
    LIVI_ELBO,
    AutoImplicit,
    AutoregressiveGenerator,
    AutoSemiImplicit,
    compare,
    diagnose,
    evidence_bound,
    fit,
    refine,
)
from pyro_implicit.density import Target, find_modes
from pyro_implicit.fitting import Fit
from pyro_implicit.generators import Generator
from pyro_implicit.guides import Frame
from pyro_implicit.nn import classifier, evaluate, predict, to_bayesian_


def model(x: Tensor, y: Tensor | None = None) -> Tensor:
    slope: Tensor = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(x)):
        value: Tensor = pyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)
    return value


class Shift(Generator):
    def __init__(self, size: int) -> None:
        super().__init__(noise_dim=size, output_dim=size)
        self.shift = nn.Parameter(torch.zeros(size))

    def forward(self, noise: Tensor, context: Tensor | None = None) -> Tensor:
        return noise + self.shift


def by_hand(x: Tensor, y: Tensor) -> float:
    frame = Frame(torch.zeros(1), scale=torch.ones(1))
    guide = AutoSemiImplicit(model, Shift, frame=frame)
    svi = SVI(model, guide, pyro.optim.ClippedAdam({"lr": 1e-2}), LIVI_ELBO(8, compile="trace"))
    loss: float = svi.step(x, y)
    draws: dict[str, Tensor] = guide.sample_posterior(10, x, y)
    exact = AutoImplicit(model, AutoregressiveGenerator)
    bound: float = evidence_bound(model, exact, x, y).value
    return loss + bound + draws["slope"].mean().item()


def by_fit(x: Tensor, y: Tensor, path: Path) -> str:
    result: Fit = fit(model, "auto", x, y, seed=0, checkpoint=path)
    result.save(path)
    verdict: str = result.diagnose(num_samples=500, modes=None).verdict
    result = result.update(model, x, y, num_steps=500, seed=0)
    error: float = result.compare(result.sample(100), num_samples=100).floor_ratio
    refined = refine(model, result.guide, x, y, max_seconds=10.0)
    ratio: float = compare(model, result.guide, refined.get_samples(), x, y).floor_ratio
    again: str = diagnose(model, result.guide, x, y).verdict
    modes = find_modes(Target(model, x, y))
    return f"{verdict} {again} {ratio:.1f} {error:.1f} {len(modes.loc)} {refined.stopped}"


def of_a_network(x: Tensor, y: Tensor) -> float:
    net = to_bayesian_(nn.Sequential(nn.Linear(2, 2)))
    network = classifier(net, num_data=100)
    loader = DataLoader(TensorDataset(x, y), batch_size=10)
    result = fit(network, "auto", batches=loader)
    evaluate(result, loader).plot()
    return sum(len(one.probability) for one in predict(result, [x]) if one.probability is not None)
