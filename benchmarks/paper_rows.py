# SPDX-License-Identifier: Apache-2.0
"""The rows of `long_runs.py`: the papers' tables at the papers' lengths.

``--paper`` of each script sets the paper's settings; the words after it are the reductions that a
CPU needs. Hours are CPU hours of one thread, extrapolated from some steps on a machine that other
jobs kept busy. Values are relative: the first seed of a target of the project counts most.
"""

from __future__ import annotations

from typing import Any

from benchmarks.long_runs import Row

LATER = 0.4  # value of the second and third seed in units of the first
POTENTIALS = ("two moons", "sinusoid", "bisected", "split")
#: An MMNN for 44,426 weights or each layer of a perceptron that trains in hours (KIVI: 500 or 800).
SMALL = ("--noise", "30", "--hidden", "64", "--solver", "20")


def row(
    script: str,
    out: str,
    name: str,
    words: list[str],
    hours: float,
    value: float,
    seed: int | None,
    *lines: dict[str, Any],
) -> Row:
    """One row, of one seed unless that is ``None``."""
    command = ["-m", f"benchmarks.{script}", "--runs", "{runs}", *words]
    if seed is not None:
        command += ["--first-seed", str(seed), "--seeds", str(seed + 1)]
        name, value = f"{name} {seed}", value * (LATER if seed else 1.0)
        lines = tuple(line | {"seed": seed} for line in lines)
    return Row(name, tuple(command), hours, value, f"benchmarks/results/{out}.jsonl", lines)


def energy(potential: str, method: str, hours: float, value: float) -> Row:
    """GPVI's appendix D.1: 200,000 steps of 100 particles, two layers of 500 units."""
    words = ["--paper", "--noise-sd", "6", "--potentials", potential, "--methods", method]
    line = {"potential": potential, "method": method, "steps": 200_000, "noise_sd": 6.0}
    out, name = "paper_energy_potentials", f"energy {potential} {method}"
    return row("energy_potentials", out, name, words, hours, value, 0, line)


def network(
    script: str, kind: str, method: str, hours: float, value: float, seed: int, *words: str
) -> Row:
    """A network of ``lenet.py``, or a data set of ``open_category.py``."""
    option = "--network" if script == "lenet" else "--data"
    all_words = ["--paper", "--data-dir", "{data}", option, kind, "--rows", method, *words]
    out = f"paper_{kind}" if script == "lenet" else f"paper_open_{kind}"
    line: dict[str, Any] = {"row": method}
    if "--epochs" in words:
        line["epochs"] = int(words[words.index("--epochs") + 1])
    name = " ".join([out.removeprefix("paper_"), method])
    return row(f"networks.{script}", out, name, all_words, hours, value, seed, line)


def autoencoder(
    encoder: str, latents: int, hidden: int, hours: float, value: float, seed: int, draws: int = 20
) -> Row:
    """KIVI's section 6.3 (8 latents, 500 units) and UIVI's sizes (10 and 200), 200 epochs."""
    words = ["--paper", "--epochs", "200", "--data-dir", "{data}/mnist", "--encoders", encoder]
    line = {"encoder": encoder, "latent_dim": latents, "hidden": hidden, "entropy_particles": draws}
    line["epochs"] = 200
    for name in ("latent_dim", "hidden", "entropy_particles"):
        words += [f"--{name.replace('_', '-')}", str(line[name])]
    name = f"vae {latents}-{hidden} {encoder} {draws}"
    return row("vae_mnist", "paper_vae_mnist", name, words, hours, value, seed, line)


def regression(seed: int) -> Row:
    """GPVI's table 2."""
    methods = ["GPVI, exact Jacobian", "GPVI, helper network", "InjectiveELBO"]
    methods += ["amortised SVGD", "amortised GFSF", "AutoNormal (mean field)"]
    lines = [{"table": "regression", "method": name, "steps": 50_000} for name in methods]
    words = ["--paper", "--tables", "regression", "--methods", *methods]
    name = "GPVI regression table"
    return row("gpvi_tables", "paper_gpvi_tables", name, words, 0.45, 1.5, seed, *lines)


def classification() -> list[Row]:
    """GPVI's section 4.3: three seeds of the shortened runs, and two methods at full length."""
    methods = ["LIVI", "SIVI", "InjectiveELBO", "GPVI", "KIVI", "AVB", "amortised SVGD"]
    lines = [{"method": name, "seed": seed, "steps": 2000} for name in methods for seed in range(3)]
    words, out = ["--methods", *methods, "--seeds", "3"], "toy_classification"
    rows = [row(out, out, "GPVI classification, 3 seeds", words, 0.2, 1.0, None, *lines)]
    for method, hours in (("InjectiveELBO", 1.9), ("GPVI", 2.9)):
        name, words = f"GPVI classification {method}", ["--paper", "--methods", "NUTS", method]
        line = {"method": method, "steps": 500_000}
        rows.append(row(out, f"paper_{out}", name, words, hours, 0.7, 0, line))
    return rows


ROWS = [
    *(energy(potential, "InjectiveELBO", 0.9, 3.0) for potential in POTENTIALS),
    *(energy(potential, "GPVI", 1.0, 3.0) for potential in POTENTIALS),
    *(energy(potential, "amortised SVGD", 0.4, 0.7) for potential in POTENTIALS),
    *(
        network("lenet", "lenet", method, hours, value, seed)
        for seed in range(3)
        for method, hours, value in (
            ("MAP", 0.15, 2.0),
            ("ensemble", 0.4, 2.0),
            ("last-layer Laplace", 0.1, 0.7),
            ("mean field", 0.2, 0.7),
            ("LIVI L'", 0.6, 3.0),
            ("LIVI L''", 1.0, 2.0),
            ("injective", 0.2, 2.0),
            ("mixture", 0.85, 1.0),
        )
        if seed == 0 or method not in ("mixture", "LIVI L''", "mean field")
    ),
    *(
        network("open_category", "mnist", method, hours, value, seed, *SMALL, *words)
        for seed in range(3)
        for method, hours, value, words in (
            ("MAP", 0.4, 1.0, ()),
            ("ensemble", 0.85, 1.5, ()),
            ("mean field", 0.6, 0.7, ()),
            # With 1e-3, as in other rows, its folded generator diverges after 3,000 steps.
            ("GPVI", 1.5, 3.0, ("--lr", "0.0001", "--epochs", "75")),
            ("injective", 1.1, 3.0, ("--particles", "2")),
            ("LIVI L'", 1.0, 1.0, ("--particles", "2")),
        )
        if seed == 0 or method in ("ensemble", "GPVI", "injective")
    ),
    *(
        network("open_category", "cifar10", method, hours, value, 0, *SMALL, *words)
        for method, hours, value, words in (
            ("MAP", 1.1, 1.5, ()),
            ("ensemble", 4.2, 2.0, ()),
            ("GPVI", 7.6, 3.0, ("--particles", "4", "--lr", "0.0001")),
            ("injective", 7.8, 2.0, ("--particles", "2")),
            ("LIVI L'", 4.4, 1.0, ("--particles", "2")),
        )
    ),
    *(
        network("lenet", f"mlp-{units}", method, hours, value, 0, *SMALL, *words)
        for units, method, hours, value, words in (
            (400, "MAP", 0.9, 1.5, ()),
            (400, "mean field", 1.1, 0.7, ()),
            (400, "ensemble", 1.8, 1.5, ()),
            # A third of the paper's epochs and fewer particles.
            (400, "KIVI", 3.7, 3.0, ("--epochs", "100", "--particles", "4")),
            (400, "LIVI L'", 2.0, 2.0, ("--epochs", "100", "--particles", "2")),
            (400, "LIVI L', fixed widths", 2.0, 2.0, ("--epochs", "100", "--particles", "2")),
            (800, "MAP", 1.5, 1.0, ()),
            (800, "KIVI", 3.7, 1.0, ("--epochs", "40", "--particles", "4")),
            (1200, "MAP", 1.8, 0.5, ()),
        )
    ),
    *(
        autoencoder(encoder, 8, 500, hours, value, seed)
        for seed in range(3)
        for encoder, hours, value in (
            ("gaussian", 0.5, 3.0),
            ("injective", 0.6, 3.0),
            ("livi", 0.8, 3.0),
            ("kivi", 2.4, 3.0),
            ("sivi", 2.4, 1.0),
        )
        if seed == 0 or encoder != "sivi"
    ),
    autoencoder("kivi", 8, 500, 10.4, 4.0, 0, draws=100),
    *(
        autoencoder(encoder, 10, 200, hours, value, seed)
        for seed in range(3)
        for encoder, hours, value in (
            ("gaussian", 0.25, 2.0),
            ("injective", 0.3, 2.0),
            ("livi", 0.35, 2.0),
            ("sivi", 0.5, 2.0),
            ("uivi", 2.5, 2.0),
        )
        if seed == 0 or encoder not in ("sivi", "uivi")
    ),
    # Importance-weighted bounds of five draws, which correct a part of the encoder's shape.
    *(
        autoencoder(encoder, latents, hidden, hours, 2.0, seed, draws=5)
        for seed in range(3)
        for latents, hidden, encoder, hours in (
            (10, 200, "gaussian-iw", 0.6),
            (10, 200, "injective-iw", 1.0),
            (8, 500, "gaussian-iw", 1.3),
        )
    ),
    *(regression(seed) for seed in range(3)),
    *classification(),
]
