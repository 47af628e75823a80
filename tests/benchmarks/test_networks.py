# SPDX-License-Identifier: Apache-2.0
"""The scripts of networks: their methods on a tiny network, their images, and their tables."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.common import parse_arguments
from benchmarks.networks import lenet, memory, methods, open_category, tabular
from benchmarks.networks import run as run_module
from benchmarks.networks.data import of_classes
from benchmarks.networks.methods import posterior_of
from benchmarks.networks.run import Run
from pyro_implicit.nn import predict

TINY = "--epochs 1 --batch-size 5 --noise 2 --hidden 3 --solver 2 --chains 2 --draws 3 --test 5"


def arguments(script, folder, *words):
    options = [*TINY.split(), "--out", str(folder / "runs.jsonl"), "--runs", str(folder / "runs")]
    return script.parser().parse_args([*options, *words])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("networks")


@pytest.mark.filterwarnings("ignore:the chains ran for only")  # so few epochs
@pytest.mark.parametrize(
    "row",
    [
        *("mixture", "ensemble", "last-layer Laplace", "KIVI", "GPVI", "MAP, refined"),
        "LIVI L', fixed widths",
    ],
)
def test_methods(row, folder, monkeypatch):
    """The others are parts of these."""
    monkeypatch.setattr(methods, "MEMBERS", 2)
    torch.manual_seed(0)
    x, y = torch.randn(20, 4), torch.arange(20) % 3

    def network():
        return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))

    run = Run(network, (x, y), arguments(lenet, folder), 0)
    model, posterior = posterior_of(run, row)
    (found,) = predict(posterior, [x], 4, model=model)
    assert found.probability.shape == (20, 3)
    assert found.probability.sum(-1).allclose(torch.ones(20), atol=1e-5)
    assert found.mutual_information.max() > 1e-6
    kept = json.loads((run.folder / "seconds.json").read_text())
    first = run.seconds
    assert 0 < first <= sum(kept.values()) + 1e-9
    posterior_of(run, row)  # nothing is trained again
    assert run.seconds == first


def write_images(folder, part, number):
    """Idx files as published: a magic number, sizes, bytes."""
    folder.mkdir(exist_ok=True)
    random = np.random.default_rng(0)
    sizes = np.array([number, 28, 28], ">i4").tobytes()
    pixels = random.integers(0, 256, (number, 28, 28), np.uint8).tobytes()
    labels = np.array([number], ">i4").tobytes() + (np.arange(number) % 10).astype("u1").tobytes()
    for name, content in (
        ("images-idx3", b"\x00\x00\x08\x03" + sizes + pixels),
        ("labels-idx1", b"\x00\x00\x08\x01" + labels),
    ):
        (folder / f"{part}-{name}-ubyte.gz").write_bytes(gzip.compress(content))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_images(folder / "mnist", "train", 20)
    for name in ("mnist", "fashion_mnist", "notmnist"):
        write_images(folder / name, "t10k", 20)
    return folder


@pytest.mark.parametrize("script", [lenet, open_category])
def test_scripts(script, data, tmp_path, capsys):
    args = arguments(script, tmp_path, "--data-dir", str(data), "--rows", "MAP")
    script.main(args)
    script.main(args)  # repeats nothing
    (record,) = map(json.loads, args.out.read_text().splitlines())
    assert record["row"] == "MAP" and record["test"] == 5 and record["seconds"] > 0
    text = args.out.with_suffix(".md").read_text()
    assert "| MAP |" in text and text in capsys.readouterr().out


def test_classes(data):
    train, test, others = open_category.sets("mnist", data, 7)
    assert len(train[0]) == 7 and train[1].tolist() == [0, 1, 2, 3, 4, 5, 0]
    assert len(test[0]) == 12 and test[1].max() == 5 and len(others) == 8
    x, y = of_classes(torch.arange(10.0), torch.arange(10), 6, 9)
    assert x.tolist() == [6, 7, 8, 9] and y.tolist() == [0, 1, 2, 3]


def test_table_by_hand():
    common = {"row": "MAP", "subset": 9, "epochs": 1, "nll": 0.5, "ece": 0.25, "device": "cpu"}
    records = [
        common
        | {
            "accuracy": accuracy,
            "seconds": 3.0,
            "auroc": {name: {"max-probability": accuracy - 0.1} for name in lenet.FOREIGN},
            "confidence": {name: 0.75 for name in lenet.FOREIGN},
        }
        for accuracy in (0.5, 0.75, 1.0)
    ]
    row = lenet.table(records).splitlines()[2]
    foreign = "65.0 (40.0 to 90.0), 75"
    wanted = f"| MAP | 9 | 1 | 0.7500 | 0.5000 | 0.2500 | {foreign} | {foreign} | {foreign} |"
    assert row == f"{wanted} 3 | cpu | 3 |"
    for record in records:
        del record["auroc"]["notmnist"]
    header, _, row = lenet.table(records).splitlines()
    assert "| Fashion-MNIST | CIFAR-10 |" in header and row.count(foreign) == 2


def test_colour_images_become_grey_digits(monkeypatch):
    """White, and a pixel of pure green in a corner that stays."""
    colours = torch.ones(2, 3, 32, 32)
    colours[1, :, 2, 2] = torch.tensor([0.0, 1.0, 0.0])
    seen = []
    monkeypatch.setattr(
        lenet, "cifar", lambda *args: (seen.append(args), (colours.sub(0.473).div(0.251), None))[1]
    )
    grey = lenet.foreign_images(lenet.Path("data"), "cifar10", 2)
    assert seen == [(lenet.Path("data/cifar10"), "test", 2)]
    assert grey.shape == (2, 1, 28, 28)
    pixels = grey * 0.3081 + 0.1307
    torch.testing.assert_close(pixels[0], torch.ones(1, 28, 28))
    assert pixels[1, 0, 0, 0].item() == pytest.approx(0.587, abs=1e-5)


@pytest.mark.parametrize("network, epochs, hidden", [("mlp-800", 300, 800), ("lenet", 20, 250)])
def test_paper_settings(network, epochs, hidden):
    words = ["--paper", "--network", network, "--solver", "7"]
    args = parse_arguments(lenet.parser(), lenet.paper_settings, words)
    assert (args.epochs, args.hidden, args.solver) == (epochs, hidden, 7)
    assert args.out.name == f"paper_{network}.jsonl"


def test_paper_network_of_open_category():
    words = ["--paper", "--data", "cifar10"]
    args = parse_arguments(open_category.parser(), open_category.paper_settings, words)
    network = open_category.convolutional(args.sizes)
    assert network(torch.zeros(1, 3, 32, 32)).shape == (1, 6)
    assert sum(weight.numel() for weight in network.parameters()) == 188_294
    assert (args.epochs, args.batch_size, args.particles) == (100, 50, 10)


def test_particles_are_a_part_of_the_key(folder):
    args = arguments(lenet, folder)
    assert "particles" not in run_module._settings(args)
    args.particles = 3
    assert run_module._settings(args)["particles"] == 3


def test_tables_of_networks(tmp_path):
    (tmp_path / "tabular").mkdir()
    values = np.random.RandomState(0).randn(50, 6)
    np.savetxt(tmp_path / "tabular" / "airfoil.csv", values, delimiter=",", header="names")
    data = tabular.load(tmp_path, "airfoil", 3)
    assert data.x.shape == (40, 5) and data.test_y.shape == (10,)
    assert data.x.mean(0).abs().max() < 1e-6 and abs(data.y.std(correction=0) - 1) < 1e-6
    for name, outputs in (("airfoil", 2), ("protein", 1)):
        model = tabular.make_model(name, 5, 40)
        assert model.net(data.x).shape == (40, outputs)
    record = {
        "data": "boston",
        "method": "fit",
        "commit": "abc",
        "max_seconds": 30.0,
        "members": 10,
    }
    record |= {"seed": 0, "rmse": 0.25, "nll": 0.1, "cpu_seconds": 30.0}
    runs = [record | {"split": split, "log_likelihood": -2.0 - split} for split in range(3)]
    out = tmp_path / "runs.jsonl"
    out.write_text("".join(f"{json.dumps(one)}\n" for one in runs))
    line = tabular.report(out).splitlines()[2]
    assert "| boston | fit, 30 s (abc) | 0, 1, 2 | 3 |" in line and "-3.000 +- 1.000" in line


@pytest.mark.filterwarnings("ignore:the chains ran for only")  # so few epochs
def test_memory_of_a_small_network(monkeypatch):
    monkeypatch.setattr(memory, "SIZES", (12, 8, 5, 3))
    found = memory.run(2)
    peaks = [found[name] for name in ("start", "ensemble", "chains", "predictions")]
    assert peaks == sorted(peaks) and 0.05 < peaks[0] < 100  # GB
    assert (found["weights"], found["members"]) == (104 + 45 + 18, 10)
    assert 10 * 167 * 4 < 1e9 * found["disk"] < 1e7  # a draw of each member in float32, at least
