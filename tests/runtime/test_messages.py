# SPDX-License-Identifier: Apache-2.0
"""What users see: results that they print, short and exact; warnings at their own line."""

from __future__ import annotations

import inspect
import io
from pathlib import Path
from xml.etree import ElementTree

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_implicit
from pyro_implicit import AVB_ELBO, LIVI_ELBO, MLP, AutoImplicit, Implicit
from pyro_implicit.density import Modes, Target
from pyro_implicit.diagnostics import Diagnosis, compare
from pyro_implicit.fitting import Candidate, Fit
from pyro_implicit.guides import Frame, StoredDraws
from pyro_implicit.infer import EvidenceBound, WeightedDraws
from pyro_implicit.nn import Prediction
from pyro_implicit.ops import LogWeights


def model():
    pyro.sample("a", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    pyro.sample("b", dist.HalfNormal(1.0))


THINGS = {
    "Frame(loc=(200,), scale=(200,), scale_tril=None)": lambda: Frame(
        torch.zeros(200), torch.ones(200)
    ),
    "Modes(loc=(2, 3), scale_tril=(2, 3, 3), elbo=(2,))": lambda: Modes(
        torch.zeros(2, 3), torch.zeros(2, 3, 3), torch.zeros(2)
    ),
    "WeightedDraws(log_weights=(9,), draws={'x': (9, 2)})": lambda: WeightedDraws(
        torch.zeros(9), {"x": torch.zeros(9, 2)}
    ),
    "EvidenceBound(value=-1.235, standard_error=0.1, khat=0.2, effective_sample_size=9, "
    "num_samples=10)": (lambda: EvidenceBound(-1.23456, 0.1, 0.2, 9.0, 10)),
    "Candidate(name='a', guide=AutoImplicit, log_weights=LogWeights(values=(5,)), draws=(5, 3), "
    "losses=[6 values])": lambda: Candidate(
        "a", AutoImplicit(model), LogWeights(torch.zeros(5)), torch.zeros(5, 3), [0.0] * 6, {"x": 1}
    ),
    "StoredDraws(7 draws of a, b)": lambda: StoredDraws(
        {"a": torch.zeros(7, 2), "b": torch.ones(7)}
    ),
    "Target(3 latents of a, b)": lambda: Target(model),
    "LIVI_ELBO(num_particles=8)": LIVI_ELBO,
    "LIVI_ELBO(num_particles=4, compile='trace', log_det='exact')": lambda: LIVI_ELBO(
        4, log_det="exact", compile="trace"
    ),
    "AVB_ELBO(num_particles=2, contrast='prior')": lambda: AVB_ELBO(2, contrast="prior"),
    "Implicit(MLP, noise_dim=3, batch_shape=(4,), event_shape=(5,))": lambda: Implicit(
        MLP(3, 5), 3
    ).expand([4]),
}


@pytest.mark.parametrize("text", THINGS)
def test_the_repr_is_one_short_line(text):
    assert repr(THINGS[text]()) == text


def test_predictions_show_shapes():
    text = repr(Prediction(5, probability=torch.rand(20, 2), entropy=torch.rand(20)))
    assert text.startswith("Prediction(num_samples=5, probability=(20, 2), entropy=(20,), ")


def test_reports_show_their_table_wherever_they_are_shown():
    fit = Fit(AutoImplicit(model), losses=[1.0] * 1000)
    assert repr(fit) == str(fit) == "stage                 seconds  outcome"
    diagnosis = Diagnosis(num_samples=10, latent_dim=3)
    assert repr(diagnosis) == str(diagnosis)
    assert diagnosis.verdict in repr(diagnosis).splitlines()[-1]


def judged(broken):
    return Diagnosis(10, 3, broken=broken, no_density="it folds")


def test_notebooks_show_the_verdict_in_colour():
    text = judged("<inf> & NaN")._repr_html_()
    assert '>Verdict: <b style="color: red">do not trust</b>: &lt;inf&gt; &amp; NaN\n' in text
    assert 'Verdict: <b style="color: #b58900">check</b>: no' in judged("")._repr_html_()
    assert "<b" not in Fit(None)._repr_html_()


def parsed(report):
    """Rows of the tables of a notebook's output, and its text outside of them."""
    root = ElementTree.fromstring(f"<div>{report._repr_html_().replace('&nbsp;', ' ')}</div>")
    tables = [[[cell.text or "" for cell in row] for row in table] for table in root.iter("table")]
    return tables, ["".join(part.itertext()) for part in root if part.tag != "table"]


def test_notebooks_align_tables_without_a_fixed_font():
    """The cells of the printed table, in the cells of an HTML table; the rest as it is printed."""
    torch.manual_seed(0)
    report = compare(None, {"a<b": torch.randn(50, 2)}, {"a<b": torch.randn(50, 2)})
    (sites, joint), text = parsed(report)
    lines = str(report).splitlines()
    assert sites[0][:3] == ["", "mean", "sd"] and sites[0][-1] == "quantile err"
    assert [row[0] for row in sites[1:]] == ["a<b[0]", "a<b[1]"]
    for row, line in zip(sites, lines, strict=False):
        assert "".join(row).replace(" ", "") == line.replace(" ", "") and len(row) == 8
    assert [row[0] for row in joint][0] == "sliced W2, standardised"
    assert text[-1].splitlines()[-1] == lines[-1] == f"Verdict: {report.verdict}"

    (rows,), (head, verdict) = parsed(judged("<inf> & NaN"))
    assert head == "Diagnosis of 10 draws in 3 dimensions"
    assert rows[0] == ["importance weights", "none: it folds"] and all(len(r) == 2 for r in rows)
    assert verdict.startswith("Verdict: do not trust: <inf> & NaN\n  try: ")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("file", "terminal", "style"),
    [(Terminal, "xterm", "\x1b[1;31m"), (Terminal, "dumb", ""), (io.StringIO, "xterm", "")],
)
def test_rich_shows_it_on_terminals_alone(file, terminal, style, monkeypatch):
    """And the string has no colours, wherever it goes."""
    rich = pytest.importorskip("rich.console")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", terminal)
    report = judged(r"a[red] \[/] x[0] is infinite")
    console = rich.Console(file=file(), highlight=False, width=200)
    console.print(report)
    end = style and "\x1b[0m"
    expected = str(report).replace("do not trust", f"{style}do not trust{end}", 1)
    assert console.file.getvalue() == expected + "\n"


#: Library code that warns behind a context manager, which torch's Module.__call__ runs.
SOURCE = """
import contextlib, torch
from pyro_implicit.runtime.messages import warn_user

@contextlib.contextmanager
def room():
    warn_user("mind the step", FutureWarning)
    yield

class Deep(torch.nn.Module):
    @torch.no_grad()
    def forward(self, function=None):
        if function is not None:
            return function()
        with room():
            pass
"""


@pytest.fixture(scope="module")
def deep():
    names = {}
    file = Path(pyro_implicit.__file__).with_name("made_up.py")
    exec(compile(SOURCE, str(file), "exec"), names)
    return names["Deep"]()


def here() -> int:
    return inspect.currentframe().f_back.f_lineno


def test_the_users_line_is_named(deep: torch.nn.Module) -> None:
    with pytest.warns(FutureWarning, match="mind") as record:
        line = here() + 1
        deep()
    assert (record[0].filename, record[0].lineno) == (__file__, line)


def test_a_model_that_the_library_calls_is_the_users(deep: torch.nn.Module) -> None:
    def model() -> int:
        deep()
        return here() - 1

    with pytest.warns(FutureWarning, match="mind") as record:
        line = deep(model)
    assert (record[0].filename, record[0].lineno) == (__file__, line)
