# SPDX-License-Identifier: Apache-2.0
"""A Bayesian LeNet-5: predictions for test images and for out-of-distribution images.

LeNet-5 (44,426 weights, 28x28 pixels) gets priors, is fitted by minibatches, and is evaluated on
test images and on out-of-distribution images: Fashion-MNIST, if available, and the test images
upside down. ``--data-dir`` has folders ``mnist`` and ``fashion_mnist`` with the published idx
files; without it the images are scikit-learn's digits, enlarged::

    python examples/lenet_mnist.py
    python examples/lenet_mnist.py --data-dir /path/to/data --epochs 6 --refine
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

import numpy as np
import pyro
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pyro_implicit import fit
from pyro_implicit.nn import classifier, evaluate, to_bayesian_


def lenet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


def read_idx(path: Path) -> np.ndarray:
    """Read an array from an idx file; see http://yann.lecun.com/exdb/mnist."""
    content = gzip.decompress(path.read_bytes())
    shape = np.frombuffer(content, ">i4", content[3], 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * content[3]).reshape(shape)


def images(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Return images, standardised by the moments of MNIST, and labels."""
    pixels = read_idx(folder / f"{part}-images-idx3-ubyte.gz").astype(np.float32) / 255
    labels = read_idx(folder / f"{part}-labels-idx1-ubyte.gz").astype(np.int64)
    return torch.tensor(pixels).unsqueeze(1).sub(0.1307).div(0.3081), torch.tensor(labels)


def load(data_dir: Path | None) -> tuple[TensorDataset, TensorDataset, dict[str, Tensor]]:
    """Return training data, test data and out-of-distribution images."""
    if data_dir is not None:
        x, y = images(data_dir / "mnist", "train")
        test = TensorDataset(*images(data_dir / "mnist", "t10k"))
        fashion = data_dir / "fashion_mnist"
        ood = {"fashion": images(fashion, "t10k")[0]} if fashion.exists() else {}
        return TensorDataset(x, y), test, ood | {"upside down": test.tensors[0].flip(-2)}
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.target))
    x = torch.tensor(data.images, dtype=torch.float32)[order].unsqueeze(1) / 16
    x = nn.functional.interpolate(x, (28, 28), mode="bilinear").sub(0.3).div(0.35)
    y = torch.tensor(data.target)[order]
    upside_down = {"upside down": x[1200:].flip(-2)}
    return TensorDataset(x[:1200], y[:1200]), TensorDataset(x[1200:], y[1200:]), upside_down


def main(args: argparse.Namespace) -> None:
    pyro.set_rng_seed(args.seed)
    train, test, ood = load(args.data_dir)
    train = TensorDataset(*(part[: args.subset] for part in train.tensors))
    device = torch.device(args.device)
    train = TensorDataset(*(part.to(device) for part in train.tensors))
    loader = DataLoader(train, args.batch_size, shuffle=True)

    net = to_bayesian_(lenet().to(device))
    model = classifier(net, num_data=len(train))
    result = fit(
        model, "auto", batches=loader, epochs=args.epochs, lr=args.lr, refine=args.refine,
        seed=args.seed,
    )  # fmt: skip
    print(result)
    report = evaluate(
        result,
        DataLoader(test, 500),
        ood={name: DataLoader(x, 500) for name, x in ood.items()},
        num_samples=args.num_samples,
    )
    print(report)
    args.out.mkdir(parents=True, exist_ok=True)
    report.plot(args.out / "lenet_mnist.png")
    result.save(args.out / "lenet_mnist.pt")
    print(f"Figure: {args.out / 'lenet_mnist.png'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, help="with mnist/ and fashion_mnist/")
    parser.add_argument("--subset", type=int, help="number of training images")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--refine", action="store_true", help="move the draws by SGHMC, too")
    parser.add_argument("--num-samples", type=int, default=30, help="posterior draws")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the figure")
    main(parser.parse_args())
