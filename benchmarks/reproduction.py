# SPDX-License-Identifier: Apache-2.0
"""The table "Reproduction of the papers", from the results of the other benchmarks.

Runs at the length of the paper replace shorter ones of the same row as soon as they exist::

    python -m benchmarks.reproduction   # results/reproduction.md
    python -m benchmarks.evidence       # the same table in docs/evidence
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import mean, stdev

from benchmarks.common import RESULTS, Record, markdown_table, read_records
from benchmarks.energy_potentials import AUTOMATIC, NOISE_SD, POTENTIALS, floor
from benchmarks.gpvi_tables import COLUMNS
from benchmarks.gpvi_tables import PAPER as MOMENTS
from benchmarks.networks import lenet, open_category

HEADER = ["experiment", "method", "measure", "paper", "ours", "seeds", "length", "CPU hours"]
Value = Callable[[Record], float]
Measures = Mapping[str, tuple[Value, int]]


@dataclass(frozen=True)
class Comparison:
    """Numbers of a paper, and where the results have ours.

    :param paper: the published numbers, in the order of ``measures``; empty if there are none.
    :param files: names of result files; the first one that has records is used.
    :param where: what the records must have.
    :param measures: our number from a record, in the unit of ``paper``, and its decimals.
    :param full: the epochs or steps of the paper; 0 if it does not state them.
    """

    experiment: str
    method: str
    paper: str
    files: tuple[str, ...]
    where: Record
    measures: Measures
    full: int

    def records(self) -> list[Record]:
        """Return the longest runs: shorter ones are no other seeds."""
        for name in self.files:
            path = RESULTS / f"{name}.jsonl"
            found = [one for one in read_records(path) if self._fits(one)] if path.exists() else []
            if found:
                longest = max(map(_steps, found))
                return [one for one in found if _steps(one) == longest]
        return []

    def _fits(self, record: Record) -> bool:
        return "error" not in record and self.where.items() <= record.items()

    def cells(self) -> list[str]:
        title = [self.experiment, self.method, ", ".join(self.measures), self.paper]
        runs = self.records()
        if not runs:
            return [*title, "not run", "", "", ""]
        ours = (_spread([f(one) for one in runs], n) for f, n in self.measures.values())
        seconds: float = sum(one.get("cpu_seconds", one.get("seconds", 0.0)) for one in runs)
        rest = [str(len(runs)), self._length(runs[0]), f"{seconds / 3600:.2g}"]
        return [*title, ", ".join(ours), *rest]

    def _length(self, record: Record) -> str:
        if self.method == AUTOMATIC:
            return "automatic"
        name = "epochs" if "epochs" in record else "steps"
        of = f" of {self.full:,}" if self.full > record[name] else ""
        return f"{record[name]:,}{of} {name}"


def _steps(record: Record) -> int:
    return record.get("epochs", record.get("steps", 0))


def _spread(values: list[float], digits: int) -> str:
    error = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{error}"


def number(name: str, factor: float = 1.0) -> Value:
    """A field of the record times a factor."""
    return lambda record: factor * record[name]


def error_rate(record: Record) -> float:
    """Test error in %."""
    return 100 * (1 - record["accuracy"])


def foreign_auroc(record: Record) -> float:
    """Mean AUROC in % over the sets of foreign images, by the largest probability."""
    return 100 * mean(one["max-probability"] for one in record["auroc"].values())


def foreign_confidence(record: Record) -> float:
    """Mean confidence in % on foreign images."""
    return 100 * mean(value for name, value in record["confidence"].items() if name != "test")


def open_auc(record: Record) -> float:
    """AUC of unknown classes by the variance, as the paper's; older runs by mutual information."""
    found = record["auc"]
    if record["draws"] == 1:
        return found["max-probability"]
    return found.get("epistemic variance", found["mutual information"])


def autoencoders() -> list[Comparison]:
    """KIVI's section 6.3, and UIVI's autoencoder."""
    rows, files, measures = [], ("paper_vae_mnist",), {"log p(test)": (number("log_likelihood"), 2)}
    for latents, hidden, full, papers in (
        (8, 500, 3000, {"gaussian": "-97.3", "kivi": "-94.8"}),
        (10, 200, 0, {"gaussian": "-98.29", "sivi": "-97.77", "uivi": "-94.09"}),
    ):
        for encoder in (*papers, "livi", "injective", "gaussian-iw", "injective-iw"):
            where = {"encoder": encoder, "latent_dim": latents, "hidden": hidden}
            title, paper = f"VAE, {latents} latents", papers.get(encoder, "")
            rows.append(Comparison(title, encoder, paper, files, where, measures, full))
    return rows


def lenets() -> list[Comparison]:
    """LIVI's LeNet; the paper does not say which of its bounds it uses there."""
    measures: Measures = {
        "accuracy": (number("accuracy", 100), 1),
        "confidence on foreign images": (foreign_confidence, 1),
        "AUROC, %": (foreign_auroc, 1),
    }
    rows = []
    for method, name in (
        *(("MAP", "MAP"), ("ensemble", "ensemble"), ("LIVI L'", "LIVI"), ("LIVI L''", "LIVI")),
        *(("mean field", ""), ("injective", ""), ("mixture", ""), ("last-layer Laplace", "")),
    ):
        paper = ", ".join(f"{one:.1f}" for one in lenet.PAPER[name]) if name else ""
        files, where = ("paper_lenet", "networks_lenet"), {"subset": None, "row": method}
        rows.append(Comparison("LeNet, MNIST", method, paper, files, where, measures, 0))
    return rows


PERCEPTRON_ROWS = (
    *("MAP", "mean field", "ensemble", "KIVI", "KIVI, adaptive contrast"),
    *("injective", "LIVI L'", "LIVI L', fixed widths"),
)


def perceptrons() -> list[Comparison]:
    """KIVI's section 6.2.2."""
    rows = []
    for network, error in lenet.KIVI_PAPER.items():
        for method in PERCEPTRON_ROWS:
            files = (f"paper_{network}", f"networks_{network}")
            where, paper = {"subset": None, "row": method}, str(error) if method == "KIVI" else ""
            measures = {"error, %": (error_rate, 2)}
            row = Comparison(f"MNIST, {network}", method, paper, files, where, measures, 300)
            if paper or row.records():
                rows.append(row)
    return rows


def open_categories() -> list[Comparison]:
    """GPVI's tables 3 and 4: networks that know six of ten classes."""
    rows = []
    measures = {"accuracy, %": (number("accuracy", 100), 1), "AUC": (open_auc, 3)}
    for data, title in (("mnist", "MNIST 6/4"), ("cifar10", "CIFAR-10 6/4")):
        for method in ("ensemble", "mean field", "GPVI", "injective", "LIVI L'"):
            accuracy, auc, _ = open_category.PAPER[data].get(method, ("", "", ""))
            files = (f"paper_open_{data}", f"networks_open_{data}")
            where, paper = {"subset": None, "row": method}, f"{accuracy}, {auc}" if auc else ""
            rows.append(Comparison(title, method, paper, files, where, measures, 100))
    return rows


def moments() -> list[Comparison]:
    """GPVI's tables 1, 2 and 5."""
    rows, files = [], ("paper_gpvi_tables", "gpvi_tables")
    for table, title, columns in (
        ("gaussian2", "Gaussian, 2-d", (0,)),
        ("gaussian5", "Gaussian, 5-d", (1,)),
        ("regression", "Bayesian regression", (2, 3)),
    ):
        measures = {
            f"error of {COLUMNS[i][2][0]}": (number(COLUMNS[i][1]), 5 if i == 2 else 3)
            for i in columns
        }
        for method, numbers in (*MOMENTS.items(), ("InjectiveELBO", ("",) * 4)):
            if numbers[columns[0]] or method == "InjectiveELBO":
                where, paper = {"table": table, "method": method}, [numbers[i] for i in columns]
                text = ", ".join(filter(None, paper))
                rows.append(Comparison(title, method, text, files, where, measures, 50_000))
    return rows


def potentials() -> list[Comparison]:
    """GPVI's appendix D.1, which has pictures only."""
    rows, files = [], ("paper_energy_potentials", "energy_potentials")
    for name, energy in POTENTIALS.items():
        nearest = floor(energy)
        measures = {"SW2, floors": (number("sw2", 1 / nearest), 1)}
        for method in ("GPVI", "InjectiveELBO", "LIVI", "amortised SVGD", AUTOMATIC):
            where = {"potential": name, "method": method, "noise_sd": NOISE_SD}
            title = f"potential, {name}"
            rows.append(Comparison(title, method, "", files, where, measures, 200_000))
    return rows


NOTE = """
Mean ± standard deviation over seeds; CPU hours of all seeds, trainings only. Each seed of the
moments has its own target. A floor is the distance between two sets of draws from the grid. The 100
epochs of CIFAR-10 ran on an H100, all other rows on CPUs.
The papers' settings, after `python -m benchmarks.`:

* VAE: `vae_mnist --paper --epochs 200 --latent-dim 8 --hidden 500 --entropy-particles 20`, and
  `--latent-dim 10 --hidden 200`
* LeNet: `networks.lenet --paper`; perceptrons: `networks.lenet --paper --network mlp-400`
* 6/4: `networks.open_category --paper --data mnist`, and `--data cifar10`
* Gaussian and regression: `gpvi_tables --paper`
* potential: `energy_potentials --paper`

`python -m benchmarks.long_runs --list` has the rows that wait, with their CPU hours.
"""


def main() -> None:
    parts = (autoencoders, lenets, perceptrons, open_categories, moments, potentials)
    rows = [row.cells() for part in parts for row in part()]
    (RESULTS / "reproduction.md").write_text(markdown_table(HEADER, rows) + NOTE)


if __name__ == "__main__":
    main()
