# SPDX-License-Identifier: Apache-2.0
"""The UCI regression sets with their standard splits, standardised by the training rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import numpy as np
import torch
from torch import Tensor

__all__ = ["SETS", "Data", "MissingData", "UCISet", "load"]


class UCISet(NamedTuple):
    """A set of the benchmark: the name of its file, and its treatment in the papers."""

    file: str
    num_splits: int = 20
    hidden: int = 50
    # KIVI, Table 3: (noise, hidden units) of the generators of the two layers' weights.
    kivi_generators: tuple[tuple[int, int], tuple[int, int]] = ((100, 500), (50, 100))
    # If the repository has it as text: the file, how NumPy reads it, and the target's column.
    source: tuple[str, dict[str, Any], int] | None = None
    shape: tuple[int, int] | None = None


SETS = {
    "boston": UCISet(
        "bostonHousing",
        kivi_generators=((20, 30), (20, 30)),
        source=("housing/housing.data", {}, -1),
        shape=(506, 14),
    ),
    "concrete": UCISet("concrete", kivi_generators=((30, 50), (30, 50))),
    "energy": UCISet("energy"),
    "kin8nm": UCISet("kin8nm"),
    "naval": UCISet("naval-propulsion-plant"),
    "protein": UCISet(
        "protein-tertiary-structure",
        num_splits=5,
        hidden=100,
        source=("00265/CASP.csv", {"delimiter": ",", "skiprows": 1}, 0),
        shape=(45730, 10),
    ),
}


REPOSITORY = "https://archive.ics.uci.edu/ml/machine-learning-databases/"


class MissingData(Exception):
    """The file of a set is missing."""


class Data(NamedTuple):
    """Training and test rows, standardised by the training rows, and the scale of ``y``."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    y_mean: Tensor
    y_sd: Tensor


def load(name: str, split: int, data_dir: Path | None, device: str = "cpu") -> Data:
    """Read one split of a set from ``data_dir/uci/<file>.npz``.

    :raises MissingData: if there is no such file.
    :raises ValueError: if the file has no such split.
    """
    path = (data_dir or Path()) / "uci" / f"{SETS[name].file}.npz"
    if not path.exists():
        if data_dir is None or not _download(SETS[name], path):
            raise MissingData(
                f"{path} not found. Cure: point --data-dir to the folder that holds uci/. The file "
                "has the arrays X (N, D), y (N,), train_idx (S, N_train) and test_idx (S, N_test); "
                "for the standard splits see _download in uci_data.py. Boston and protein are "
                "downloaded into --data-dir where the UCI repository can be reached"
            )
    with np.load(path) as file:
        x, y = (torch.tensor(file[key], dtype=torch.get_default_dtype()) for key in "Xy")
        rows = file["train_idx"], file["test_idx"]
    if not 0 <= split < len(rows[0]):
        raise ValueError(f"{path} has the splits 0 to {len(rows[0]) - 1}, but got {split}")
    train, test = (torch.tensor(index[split], dtype=torch.long) for index in rows)
    x_sd, y_mean, y_sd = x[train].std(0), y[train].mean(), y[train].std()
    x = (x - x[train].mean(0)) / torch.where(x_sd > 0, x_sd, 1.0)  # naval has constant columns
    y = (y - y_mean) / y_sd
    return Data(*(part.to(device) for part in (x[train], y[train], x[test], y[test], y_mean, y_sd)))


def _download(uci_set: UCISet, path: Path) -> bool:
    """Make the file of a set from the repository's table; return whether this was possible."""
    if uci_set.source is None:
        return False
    file, options, target = uci_set.source
    try:
        with urlopen(REPOSITORY + file, timeout=30) as response:
            table = np.loadtxt(response, **options)
    except (OSError, ValueError) as error:
        print(f"{REPOSITORY + file}: {error}")
        return False
    if table.shape != uci_set.shape:
        print(f"{REPOSITORY + file} has the shape {table.shape}, not {uci_set.shape}")
        return False
    num_rows = len(table)
    random = np.random.RandomState(1)  # the splits of all papers
    rows = np.stack([random.permutation(num_rows) for _ in range(uci_set.num_splits)])
    cut = round(0.9 * num_rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(
        path,
        X=np.delete(table, target, axis=1),
        y=table[:, target],
        train_idx=rows[:, :cut],
        test_idx=rows[:, cut:],
    )
    return True
