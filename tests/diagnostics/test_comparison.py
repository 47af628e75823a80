# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from matplotlib.colors import to_hex

from pyro_implicit.diagnostics import compare, plot_posteriors
from pyro_implicit.diagnostics.comparison import _regions


def draws(scale=1.0, num_samples=400):
    return {
        "mu": scale * torch.randn(num_samples),
        "theta": scale * torch.randn(num_samples, 3),
        "w": scale * torch.randn(num_samples, 2, 2),
    }


def axis_labels(figure):
    return [axes.get_xlabel() for axes in figure.axes if axes.get_xlabel()]


def test_writes_a_picture_of_any_number_of_posteriors(tmp_path):
    labels = ["NUTS", "A", "B", "C"]
    figure = plot_posteriors(
        {label: draws(1 + i) for i, label in enumerate(labels)},
        max_coordinates=4,
        reference="NUTS",
        path=tmp_path / "posteriors.png",
    )
    assert (tmp_path / "posteriors.png").stat().st_size > 10_000
    assert len(figure.axes) == 10
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == labels
    colours = [to_hex(handle.get_edgecolor()) for handle in legend.get_patches()]
    colours += [to_hex(line.get_color()) for line in legend.get_lines()]
    assert len(set(colours)) == 4


def test_coordinates_are_taken_in_turn():
    assert axis_labels(plot_posteriors({"A": draws()})) == [
        "mu",
        "theta[0]",
        "theta[1]",
        "theta[2]",
        "w[0, 0]",
        "w[0, 1]",
    ]
    chosen = plot_posteriors({"A": draws()}, sites=["w", "mu"], max_coordinates=3)
    assert axis_labels(chosen) == ["w[0, 0]", "w[0, 1]", "mu"]


def test_the_comparison_plots_its_draws(tmp_path):
    report = compare(None, draws(), draws(num_samples=300))
    path = tmp_path / "report.png"
    figure = report.plot(sites=["theta"], max_coordinates=2, path=path)
    assert path.exists() and axis_labels(figure) == ["theta[0]", "theta[1]"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["reference", "guide"]


def test_histograms_hold_the_share_of_draws_inside_the_axes():
    reference = {"x": torch.linspace(0.0, 1.0, 1000)}
    half_outside = {"x": torch.cat([torch.rand(500), torch.full((500,), 9.0)])}
    figure = plot_posteriors({"R": reference, "G": half_outside}, reference="R")
    areas = []
    for patch in figure.axes[0].patches:
        values, edges, _ = patch.get_data()
        areas.append(float((values * (edges[1:] - edges[:-1])).sum()))
    assert areas == pytest.approx([1.0, 0.5], abs=1e-6)


def test_regions_hold_half_and_nine_tenths_of_the_draws():
    pair = (
        torch.randn(20_000, 2, dtype=torch.float64)
        @ torch.tensor([[2.0, 1.0], [0.0, 0.5]]).double()
    )
    x, y, density, levels = _regions(pair, (-8.0, 8.0), (-5.0, 5.0))
    i = torch.bucketize(pair[:, 0].contiguous(), x + (x[1] - x[0]) / 2).clamp(max=len(x) - 1)
    j = torch.bucketize(pair[:, 1].contiguous(), y + (y[1] - y[0]) / 2).clamp(max=len(y) - 1)
    at_draws = density[i, j]
    inside = [(at_draws >= level).double().mean().item() for level in levels]
    assert inside == pytest.approx([0.9, 0.5], abs=0.005)


def test_regions_are_those_of_a_gaussian():
    factor = torch.tensor([[2.0, 1.0], [0.0, 0.5]], dtype=torch.float64)
    pair = torch.randn(200_000, 2, dtype=torch.float64) @ factor
    x, y, density, levels = _regions(pair, (-16.0, 16.0), (-4.0, 4.0))
    grid = torch.cartesian_prod(x, y)
    distance = torch.linalg.solve(factor.T, grid.T).square().sum(dim=0).reshape(density.shape)
    for level, mass, tolerance in zip(levels, [0.9, 0.5], [0.11, 0.09], strict=True):
        truth = distance <= -2 * torch.tensor(1 - mass).log()
        mismatch = (truth != (density >= level)).sum() / truth.sum()
        assert mismatch < tolerance


def test_each_axis_is_smoothed_by_its_own_bandwidth():
    pair = torch.randn(2000, 2, dtype=torch.float64) * torch.tensor([4.0, 0.5])
    x, y, density, _ = _regions(pair, (-16.0, 16.0), (-16.0, 16.0))
    # Bins are 0.4 wide, the least bandwidth; 0.7 of Scott's for x is 0.79.
    torch.testing.assert_close(
        density.sum(dim=0) @ y**2, pair[:, 1].square().mean() + 0.4**2, rtol=0.1, atol=0
    )
    torch.testing.assert_close(
        density.sum(dim=1) @ x**2, pair[:, 0].square().mean() + 0.79**2, rtol=0.02, atol=0
    )


def test_degenerate_posteriors_can_be_drawn(tmp_path):
    point = {"mu": torch.ones(100), "theta": torch.zeros(100, 3), "w": torch.zeros(100, 2, 2)}
    far = {name: value + 50 for name, value in draws().items()}
    all_draws = {"R": draws(), "point": point, "far": far}
    figure = plot_posteriors(all_draws, None, 2, reference="R", path=tmp_path / "a.png")
    # The point shows, as two coinciding contours; what lies elsewhere does not.
    assert [len(axes.collections) for axes in figure.axes[:2]] == [0, 3]
    # Its needle leaves the axes.
    (top, peak) = figure.axes[0].get_ylim()[1], figure.axes[0].patches[0].get_data().values.max()
    assert top == pytest.approx(4.2 * peak)
    plot_posteriors({"point": point}, None, 2, path=tmp_path / "b.png")


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"cannot plot the sites \['no'\].*in common: \['mu'"):
        plot_posteriors({"A": draws()}, sites=["no"])
    with pytest.raises(TypeError, match=r"sites must be a list.*Cure: sites=\['mu'\]"):
        plot_posteriors({"A": draws()}, sites="mu")
    with pytest.raises(ValueError, match=r"in common: \[\]"):
        plot_posteriors({"A": {"x": torch.zeros(5)}, "B": {"y": torch.zeros(5)}})
    with pytest.raises(ValueError, match=r"'NUTS' is not among the labels \['A'\]"):
        plot_posteriors({"A": draws()}, reference="NUTS")
