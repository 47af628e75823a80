# SPDX-License-Identifier: Apache-2.0
"""Images and labels for the benchmarks of networks, from published files."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

__all__ = ["cifar", "digits", "of_classes"]


def digits(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """MNIST, or data in its format: images standardised by the moments of MNIST.

    :param folder: with the idx files.
    :param part: ``"train"`` or ``"t10k"``.
    """

    def read(name: str) -> np.ndarray:
        content = gzip.decompress((folder / f"{part}-{name}-ubyte.gz").read_bytes())
        shape = np.frombuffer(content, ">i4", content[3], 4)
        return np.frombuffer(content, np.uint8, offset=4 + 4 * content[3]).reshape(shape)

    pixels = torch.tensor(read("images-idx3").astype(np.float32) / 255).unsqueeze(1)
    return pixels.sub(0.1307).div(0.3081), torch.tensor(read("labels-idx1").astype(np.int64))


def cifar(folder: Path, part: str, number: int | None = None) -> tuple[Tensor, Tensor]:
    """CIFAR-10 from a file of JPEG images, a lossy copy.

    :param folder: with ``train.npz`` and ``test.npz``.
    :param part: ``"train"`` or ``"test"``.
    :param number: number of images, from the first on.
    """
    from PIL import Image

    file = np.load(folder / f"{part}.npz")
    jpeg, offsets, labels = file["jpeg"], file["offsets"], file["labels"][:number]
    pixels = np.stack(
        [
            np.asarray(Image.open(io.BytesIO(jpeg[start:end].tobytes())))
            for start, end in zip(offsets, offsets[1 : len(labels) + 1], strict=False)
        ]
    )
    x = torch.tensor(pixels).permute(0, 3, 1, 2).float().div(255).sub(0.473).div(0.251)
    return x, torch.tensor(labels.astype(np.int64))


def of_classes(x: Tensor, y: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Select the rows of some classes, counted from 0.

    :param first: first class.
    :param last: last class.
    """
    rows = (y >= first) & (y <= last)
    return x[rows], y[rows] - first
