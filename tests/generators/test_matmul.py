# SPDX-License-Identifier: Apache-2.0
"""Matrix multiplication networks: layer formula, sizes, start, and the correlated split."""

from __future__ import annotations

import math

import pytest
import torch

from pyro_implicit.generators import MMNN, CorrelatedMMNN, near_square_shape

LENET5 = 44426


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def randomize(generator: torch.nn.Module) -> None:
    for parameter in generator.parameters():
        torch.nn.init.normal_(parameter, std=0.5)


def apply_layers(layers, matrix):
    """The two assignments of a layer, entry by entry, for one matrix."""
    for i, layer in enumerate(layers):
        matrix = torch.relu(matrix) if i else matrix
        matrix = torch.einsum("Rr,rc->Rc", layer.left, matrix) + layer.left_bias
        matrix = torch.einsum("Rc,cC->RC", matrix, layer.right) + layer.right_bias
    return matrix


def test_mmnn_formula():
    torch.manual_seed(0)
    generator = MMNN((2, 3), ((4, 5),), (3, 4), output_dim=10).double()
    randomize(generator)
    noise = torch.randn(6, dtype=torch.float64)
    last = apply_layers(generator.network.layers, noise.reshape(2, 3))
    torch.testing.assert_close(generator(noise), last.reshape(12)[:10])


def test_mmnn_for_lenet():
    generator = MMNN((65, 65), ((250, 250), (250, 250)), (350, 127), output_dim=LENET5)
    assert count(generator) == 612_450
    assert count(MMNN()) == 612_450
    assert (generator.noise_dim, generator.output_dim) == (4225, LENET5)
    assert (MMNN().noise_dim, MMNN().output_dim) == (4225, 350 * 127)
    with torch.no_grad():
        assert generator(torch.randn(2, 4225)).shape == (2, LENET5)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_hidden, share", [(0, 1.0), (1, 0.68), (2, 0.51)])
def test_mmnn_start(num_hidden, share, seed):
    torch.manual_seed(seed)
    generator = MMNN((40, 40), ((120, 120),) * num_hidden, (60, 60), output_scale=0.3)
    with torch.no_grad():
        value = generator(torch.randn(64, generator.noise_dim)) / 0.3
    assert value.square().mean().sqrt().item() == pytest.approx(1, abs=0.25)
    assert value.var(0).mean().item() == pytest.approx(share, abs=0.15)


def test_mmnn_errors():
    with pytest.raises(ValueError, match=r"has 12 entries but output_dim is 13.*near_square_shape"):
        MMNN((2, 3), (), (3, 4), output_dim=13)
    with pytest.raises(ValueError, match="rows must be at least 1, but got 0"):
        MMNN((2, 3), ((0, 4),), (3, 4))
    with pytest.raises(ValueError, match="rows must be at least 1, but got -2"):
        MMNN((-2, -3), (), (3, 4))


@pytest.mark.parametrize("size", [*range(1, 50), 441, LENET5, 2_745_274])
def test_near_square_shape(size):
    rows, columns = near_square_shape(size)
    assert 0 <= rows * columns - size < rows
    assert 0 <= rows - columns <= 1


def correlated() -> CorrelatedMMNN:
    torch.manual_seed(0)
    generator = CorrelatedMMNN([5, 1, 12], (2, 3), ((4, 5), (4, 9)), ((3, 4), (20, 20))).double()
    randomize(generator)
    return generator


def test_correlated_formula():
    generator = correlated()
    noise = torch.randn(6, dtype=torch.float64)
    matrix = torch.relu(apply_layers(generator.shared.layers, noise.reshape(2, 3)))
    assert sum(generator.columns) == 9
    start, values = 0, []
    for block, columns, size in zip(generator.blocks, generator.columns, [5, 1, 12], strict=True):
        values.append(apply_layers(block.layers, matrix[:, start : start + columns]))
        values[-1] = values[-1].flatten()[:size]
        start += columns
    torch.testing.assert_close(generator(noise), torch.cat(values))


def test_correlated_parameter_count():
    # Blocks get 3, 2 and 4 of the 9 columns; hidden sides are at most twice the output's.
    generator = correlated()
    assert generator.columns == [3, 2, 4]

    def layer(r, c, rows, columns):
        return rows * r + rows * c + c * columns + rows * columns

    expected = layer(2, 3, 4, 5) + layer(4, 5, 4, 9)
    expected += layer(4, 3, 3, 4) + layer(3, 4, 6, 4) + layer(6, 4, 3, 2)
    expected += layer(4, 2, 2, 2) + layer(2, 2, 2, 2) + layer(2, 2, 1, 1)
    expected += layer(4, 4, 3, 4) + layer(3, 4, 8, 6) + layer(8, 6, 4, 3)
    assert count(generator) == expected


def test_blocks_share_only_the_shared_layers():
    generator = correlated()
    noise = torch.randn(7, 6, dtype=torch.float64)
    for i, block in enumerate(generator(noise).split(generator.block_sizes, dim=-1)):
        generator.zero_grad()
        block.square().sum().backward(retain_graph=True)
        for j, network in enumerate(generator.blocks):
            for parameter in network.parameters():
                assert parameter.grad.any() == (i == j)
        shared = generator.shared.layers
        assert all(layer.left.grad.abs().sum() > 0 for layer in shared)

    before = generator(noise)
    with torch.no_grad():
        generator.shared.layers[0].left.add_(0.1)
    changed = (generator(noise) != before).any(0).split(generator.block_sizes)
    assert all(block.any() for block in changed)


def test_correlated_for_wide_resnet():
    # The 17 layers of a WRN-16-4: 2.7M weights, "about 7 million" generator parameters.
    sizes = [432]
    for width_in, width in ((16, 64), (64, 128), (128, 256)):
        sizes += [9 * width_in * width, 9 * width**2, width_in * width, 9 * width**2, 9 * width**2]
    sizes.append(256 * 10 + 10)
    generator = CorrelatedMMNN(sizes)
    assert generator.noise_dim == 130 * 130
    assert generator.output_dim == 2_745_274
    assert 7.0e6 < count(generator) < 8.0e6
    assert sum(generator.columns) == 500
    ratio = generator.columns[-2] / generator.columns[3]
    assert ratio == pytest.approx(math.sqrt(sizes[-2] / sizes[3]), rel=0.3)


@pytest.mark.parametrize("seed", range(3))
def test_correlated_start(seed):
    torch.manual_seed(seed)
    generator = CorrelatedMMNN([900, 2500, 1600], (40, 40), ((100, 120),), ((100, 100),), 0.3)
    with torch.no_grad():
        value = generator(torch.randn(64, generator.noise_dim)) / 0.3
    for block in value.split(generator.block_sizes, dim=-1):
        assert block.square().mean().sqrt().item() == pytest.approx(1, abs=0.3)
        assert block.var(0).mean().item() == pytest.approx(0.51, abs=0.2)


def test_correlated_errors():
    with pytest.raises(ValueError, match=r"each of the 3 blocks needs a column .* as many columns"):
        CorrelatedMMNN([5, 1, 12], (2, 3), ((4, 2),))
    with pytest.raises(ValueError, match="needs a column of the last shared matrix"):
        CorrelatedMMNN([5], (2, 3), ())
    with pytest.raises(ValueError, match="block_sizes must be at least 1, but got 0"):
        CorrelatedMMNN([5, 0], (2, 3))
