# SPDX-License-Identifier: Apache-2.0
"""Generators for networks with many weights, which transform matrices instead of vectors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pyro_implicit.generators.base import Generator
from pyro_implicit.runtime.messages import refuse_counts

__all__ = ["MMNN", "CorrelatedMMNN", "near_square_shape"]

Shape = tuple[int, int]


def near_square_shape(size: int) -> Shape:
    """Return the most nearly square matrix shape with at least ``size`` entries.

    **Example:**

    >>> near_square_shape(44426)
    (211, 211)

    :param size: number of entries needed.
    :returns: rows and columns; their product is ``size`` or a little more.
    """
    refuse_counts(size=size)
    rows = math.isqrt(size - 1) + 1
    return rows, -(-size // rows)


class MMNN(Generator):
    r"""Matrix multiplication network. The noise is a matrix X, and every layer is

    .. math:: X \leftarrow A_l X + B_l, \quad X \leftarrow X A_r + B_r,

    followed by a ReLU, except for the last. A layer from an r x c to an R x C matrix has
    Rr + Rc + cC + RC parameters, a fully connected layer rcRC: a generator for the 44,426 weights
    of a LeNet has 612,450 parameters.

    Initially the outputs have mean zero and root mean square ``output_scale``, averaged over
    initialisations. The noise accounts for all of this variance without hidden layers, for about
    two thirds with one and for half with two; the remainder is a random offset of each output.

    **Example:**

    >>> generator = MMNN(
    ...     noise_shape=(65, 65),
    ...     hidden=((250, 250), (250, 250)),
    ...     output_shape=(350, 127),
    ...     output_dim=44426,
    ... )
    >>> generator(torch.randn(2, 65 * 65)).shape
    torch.Size([2, 44426])

    :param noise_shape: rows and columns of the noise matrix; ``noise_dim`` is their product.
    :param hidden: shapes of the hidden matrices, one per hidden layer.
    :param output_shape: shape of the last matrix; see :func:`near_square_shape`.
    :param output_dim: size of the value, the leading entries of the last matrix, row by row. By
        default all entries.
    :param output_scale: root mean square of the initial outputs.
    :raises ValueError: if a size is not positive or ``output_shape`` has fewer than
        ``output_dim`` entries.

    **References:**

    1. Shi, Sun and Zhu (2018), *Kernel Implicit Variational Inference*, algorithm 2.
       https://arxiv.org/abs/1705.10119
    2. Uppal, Stensbo-Smidt, Boomsma and Frellsen (2023), *Implicit Variational Inference for
       High-Dimensional Posteriors*, section 6.4.
       https://arxiv.org/abs/2310.06643
    """

    def __init__(
        self,
        noise_shape: Shape = (65, 65),
        hidden: Sequence[Shape] = ((250, 250), (250, 250)),
        output_shape: Shape = (350, 127),
        output_dim: int | None = None,
        output_scale: float = 0.1,
    ) -> None:
        entries = math.prod(output_shape)
        super().__init__(math.prod(noise_shape), entries if output_dim is None else output_dim)
        if self.output_dim > entries:
            raise ValueError(
                f"output_shape {tuple(output_shape)} has {entries} entries but output_dim is "
                f"{output_dim}. Cure: output_shape=near_square_shape({output_dim}) or larger"
            )
        self.noise_shape = tuple(noise_shape)
        self.network = _MatrixNetwork([noise_shape, *hidden, output_shape], output_scale)

    def forward(self, noise: Tensor, context: Tensor | None = None) -> Tensor:
        self._check_inputs(noise, context)
        matrix = self.network(noise.unflatten(-1, self.noise_shape))
        return matrix.flatten(-2)[..., : self.output_dim]


class CorrelatedMMNN(Generator):
    r"""Correlated matrix multiplication network.

    The first matrix layers are shared. Then every block of outputs, such as the weights of one
    layer of a Bayesian network, has its own small :class:`MMNN`. The sub-network represents
    correlations within its block, the shared layers correlations between blocks.

    Each column of the last shared matrix belongs to one sub-network, in proportion to the square
    roots of the block sizes. The output matrix of a sub-network has the :func:`near_square_shape`
    of its block, and the sides of its hidden matrices are at most twice the sides of its output, so
    that a block of ten biases is cheap. The initialisation is that of :class:`MMNN`.

    **Example:** one sub-network for each layer of a LeNet.

    >>> generator = CorrelatedMMNN(
    ...     block_sizes=[156, 2416, 30840, 10164, 850],
    ...     noise_shape=(65, 65),
    ...     shared=((250, 250),),
    ...     hidden=((120, 120),),
    ... )
    >>> generator(torch.randn(2, generator.noise_dim)).shape
    torch.Size([2, 44426])

    :param block_sizes: number of outputs of each block, in the order of the value.
    :param noise_shape: rows and columns of the noise matrix; ``noise_dim`` is their product.
    :param shared: shapes of the shared matrices, at least one; the last has a column or more for
        each block.
    :param hidden: shapes of the hidden matrices of each sub-network, one per hidden layer.
    :param output_scale: root mean square of the initial outputs.
    :raises ValueError: if a size is not positive, or if the last shared matrix has fewer columns
        than there are blocks.

    **References:**

    1. Uppal, Stensbo-Smidt, Boomsma and Frellsen (2023), *Implicit Variational Inference for
       High-Dimensional Posteriors*, appendix D. https://arxiv.org/abs/2310.06643
    """

    def __init__(
        self,
        block_sizes: Sequence[int],
        noise_shape: Shape = (130, 130),
        shared: Sequence[Shape] = ((250, 500),),
        hidden: Sequence[Shape] = ((200, 200),),
        output_scale: float = 0.1,
    ) -> None:
        for size in block_sizes:
            refuse_counts(block_sizes=size)
        super().__init__(math.prod(noise_shape), sum(block_sizes))
        if not shared or shared[-1][1] < len(block_sizes):
            raise ValueError(
                f"shared is {tuple(shared)}, but each of the {len(block_sizes)} blocks needs a "
                "column of the last shared matrix. Cure: a last shape with as many columns as "
                "blocks, or better several times as many"
            )
        self.noise_shape = tuple(noise_shape)
        self.block_sizes = tuple(block_sizes)
        self.columns = _deal(shared[-1][1], [math.sqrt(size) for size in block_sizes])
        self.shared = _MatrixNetwork([noise_shape, *shared])
        self.blocks = nn.ModuleList()
        for size, columns in zip(block_sizes, self.columns, strict=True):
            output = near_square_shape(size)
            cut = [(min(r, 2 * output[0]), min(c, 2 * output[1])) for r, c in hidden]
            shapes = [(shared[-1][0], columns), *cut, output]
            self.blocks.append(_MatrixNetwork(shapes, output_scale, after_relu=True))

    def forward(self, noise: Tensor, context: Tensor | None = None) -> Tensor:
        self._check_inputs(noise, context)
        matrix = torch.relu(self.shared(noise.unflatten(-1, self.noise_shape)))
        parts = zip(self.blocks, matrix.split(self.columns, dim=-1), self.block_sizes, strict=True)
        return torch.cat([block(x).flatten(-2)[..., :size] for block, x, size in parts], dim=-1)


class _MatrixNetwork(nn.Module):
    def __init__(
        self, shapes: Sequence[Shape], output_scale: float = 1.0, after_relu: bool = False
    ) -> None:
        super().__init__()
        layers = [_MatrixLayer(*pair) for pair in itertools.pairwise(shapes)]
        with torch.no_grad():
            # A ReLU halves the mean square of its input; the layer after it compensates.
            for layer in layers if after_relu else layers[1:]:
                layer.right.mul_(math.sqrt(2.0))
            layers[-1].right.mul_(output_scale)
        self.layers = nn.ModuleList(layers)

    def forward(self, matrix: Tensor) -> Tensor:
        first, *rest = self.layers
        matrix = first(matrix)
        for layer in rest:
            matrix = layer(torch.relu(matrix))
        return matrix


class _MatrixLayer(nn.Module):
    def __init__(self, shape_in: Shape, shape_out: Shape) -> None:
        super().__init__()
        (rows_in, columns_in), (rows, columns) = shape_in, shape_out
        refuse_counts(rows=rows_in, columns=columns_in)
        refuse_counts(rows=rows, columns=columns)
        self.left = nn.Parameter(torch.randn(rows, rows_in) / math.sqrt(rows_in))
        self.left_bias = nn.Parameter(torch.zeros(rows, columns_in))
        self.right = nn.Parameter(torch.randn(columns_in, columns) / math.sqrt(columns_in))
        self.right_bias = nn.Parameter(torch.zeros(rows, columns))

    def forward(self, matrix: Tensor) -> Tensor:
        return (self.left @ matrix + self.left_bias) @ self.right + self.right_bias


def _deal(total: int, weights: Sequence[float]) -> list[int]:
    spare = total - len(weights)
    shares = [0.0, *itertools.accumulate(weights)]
    marks = [round(spare * share / shares[-1]) for share in shares]
    return [1 + end - start for start, end in itertools.pairwise(marks)]
