# SPDX-License-Identifier: Apache-2.0
"""A Bayesian network trained by Lightning, in one process or several.

An ELBO of model and guide is a module (``ELBOModule``) whose parameters are those of the guide, so
Lightning's trainer, its callbacks and its ``DistributedDataParallel`` work as with any module.
Requires ``pip install lightning scikit-learn``; the images are scikit-learn's digits::

    python examples/lightning_network.py
    python examples/lightning_network.py --processes 2
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning
import pyro
import torch
from pyro.infer.autoguide import AutoNormal, init_to_value
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pyro_implicit.infer import ImplicitELBO
from pyro_implicit.nn import NetworkModel, classifier, evaluate, start_values, to_bayesian_


class BayesianNetwork(lightning.LightningModule):
    """A model and its guide; ``guide`` is the posterior after ``Trainer.fit``.

    :param model: a model of :func:`~pyro_implicit.nn.classifier` or ``regressor``.
    :param batch: a minibatch, from which the guide creates its parameters.
    :param lr: Adam's learning rate.
    """

    def __init__(self, model: NetworkModel, batch: tuple[Tensor, Tensor], lr: float) -> None:
        super().__init__()
        start = init_to_value(values=start_values(model))
        self.guide = AutoNormal(model, init_loc_fn=start, init_scale=0.02)
        self.loss = ImplicitELBO(num_particles=2)(model, self.guide)
        self.loss(*batch)
        self.lr = lr

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        pyro.set_rng_seed(self.global_step)  # the same particles in all processes
        loss = self.loss(*batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), self.lr)


def main(args: argparse.Namespace) -> None:
    # Set this before creating modules: parameters then belong to the modules, not to Pyro's store.
    pyro.settings.set(module_local_params=True)
    pyro.set_rng_seed(args.seed)
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32).sub(4.9).div(6.0)
    data = TensorDataset(x, torch.tensor(digits.target))
    train, test = torch.utils.data.random_split(data, [1200, len(data) - 1200])
    loader = DataLoader(train, args.batch_size, shuffle=True)

    net = to_bayesian_(nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10)))
    model = classifier(net, num_data=len(train))
    network = BayesianNetwork(model, next(iter(loader)), args.lr)
    trainer = lightning.Trainer(
        max_epochs=args.epochs,
        accelerator="cpu",
        devices=args.processes,
        strategy="auto" if args.processes == 1 else "ddp",
        default_root_dir=args.out,
        enable_progress_bar=args.progress,
        logger=False,
    )
    trainer.fit(network, loader)
    if trainer.is_global_zero:
        print(evaluate(network.guide, DataLoader(test, 100), model=model))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--progress", action="store_true", help="show Lightning's bar")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of checkpoints")
    main(parser.parse_args())
