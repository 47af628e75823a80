# SPDX-License-Identifier: Apache-2.0
"""Each page of the gallery runs to its end, with budgets that are too small for anything else."""

from __future__ import annotations

import importlib
import math
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pyro.infer
import pytest
import sklearn.ensemble
import sklearn.gaussian_process
from pyro import poutine
from pyro.infer.autoguide import AutoNormal

import pyro_implicit
from pyro_implicit import diagnose, fit
from pyro_implicit.decisions.policy import DECISIONS
from pyro_implicit.fitting import Fit, FitPolicy, SimulatorPolicy
from pyro_implicit.fitting.policy import HierarchyPolicy
from pyro_implicit.guides.auto_draws import own_names
from pyro_implicit.runtime.sites import is_discrete_latent

ROOT = Path(__file__).parents[1]
SHORT = replace(
    FitPolicy(),
    budget=replace(
        FitPolicy().budget, most_chains=32, most_gradients=60, least_gradients=60, patience=1,
        patient_seconds=0.0,
    ),
    choice=replace(FitPolicy().choice, num_weighed=100),
    correction=replace(
        FitPolicy().correction, num_weighed=100, num_weighed_again=100, least_proposals=100,
        oversampling=1,
    ),
    hierarchy=HierarchyPolicy(
        num_pilot=16, num_starts=1, search_rounds=1, search_iterations=1,
        num_weighed=32, num_samples=64,
        max_khat=math.inf, least_effective=0.0,  # tests/fitting/test_hierarchy.py runs the chains
    ),
    integration=replace(
        FitPolicy().integration, num_samples=128, least_draws=128, least_weighed=100,
        weigh_seconds=1e-3, step_seconds=1e-4,
    ),
)  # fmt: skip
GALLERY = ROOT / "docs" / "gallery"
PAGES = sorted(path.relative_to(GALLERY).as_posix() for path in GALLERY.rglob("*.py"))

# What they warn of with such budgets is for their reader.
pytestmark = pytest.mark.filterwarnings("default")


def within(function: Callable[..., Any], **budget: Any) -> Callable[..., Any]:
    return lambda *args, **options: function(*args, **{**options, **budget})


def fit_something(model: Any, guide: Any = "auto", *args: Any, **options: Any) -> Any:
    """A few steps of a mean field: a search and chains have tests of their own."""
    options = {name: value for name, value in options.items() if value is not None}  # of update
    if isinstance(guide, str) and args and has_counts(model, args):
        return fit(model, guide, *args, **options, policy=SHORT)
    if isinstance(guide, str) and "batches" not in options:
        guide = own_names(AutoNormal(poutine.block(model, hide_fn=is_discrete)))
    length = {"epochs": 1} if "batches" in options else {"num_steps": 2}
    return fit(model, guide, *args, **{"policy": SHORT, **options, **length})


def has_counts(model: Any, args: tuple) -> bool:
    """Tell whether a model has counts, which no automatic guide has."""
    nodes = poutine.trace(model).get_trace(*args).nodes.values()
    return any(is_discrete_latent(site) and not is_discrete(site) for site in nodes)


def is_discrete(site: dict[str, Any]) -> bool:
    return site["type"] == "sample" and site["fn"].has_enumerate_support


@pytest.fixture(autouse=True)
def small_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    def patch(owner: Any, name: str, **budget: Any) -> None:
        monkeypatch.setattr(owner, name, within(getattr(owner, name), **budget))

    quick = {"num_samples": 100, "num_transitions": 0, "modes": None}
    monkeypatch.setattr(pyro_implicit, "fit", fit_something)
    monkeypatch.setattr(Fit, "_fit", staticmethod(fit_something))
    monkeypatch.setattr(importlib.import_module("pyro_implicit.sklearn"), "fit", fit_something)
    patch(pyro_implicit, "refine", num_chains=8, max_gradients=40)
    patch(pyro_implicit, "simulation_based_calibration", num_simulations=10, num_bins=2)
    patch(pyro_implicit, "diagnose", **quick)
    patch(pyro_implicit, "compare_models", max_seconds=0.01, evidence=False)
    few_draws = replace(DECISIONS, num_draws=400, most_draws=400, repair_chains=16)
    for name in ("fitting.model_comparison", "decisions.leave_one_out"):
        module = importlib.import_module(f"pyro_implicit.{name}")
        monkeypatch.setattr(module, "DECISIONS", few_draws)
    module = importlib.import_module("pyro_implicit.decisions.leave_one_out")
    patch(module, "refine", max_gradients=40)
    few = SimulatorPolicy(num_networks=1, num_steps=5)
    patch(pyro_implicit, "fit_simulator", num_simulations=200, policy=few)
    monkeypatch.setattr(
        importlib.import_module("pyro_implicit.fitting.result"),
        "diagnose",
        within(diagnose, **quick),
    )
    patch(Fit, "diagnose", num_samples=100)
    for name in ("check_prior_predictive", "check_posterior_predictive"):
        patch(Fit, name, num_samples=50)
    jumps = importlib.import_module("pyro_implicit.ops.jumps")
    monkeypatch.setattr(jumps, "JUMPS", replace(jumps.JUMPS, num_halvings=4))
    # Chains with such budgets stay apart.
    refinement = importlib.import_module("pyro_implicit.mcmc.refine")
    monkeypatch.setattr(refinement, "_can_anneal", lambda *args: False)
    patch(sklearn.gaussian_process, "GaussianProcessRegressor", optimizer=None)
    patch(sklearn.ensemble, "HistGradientBoostingRegressor", max_iter=2)
    patch(pyro.infer, "NUTS", jit_compile=False, max_tree_depth=1)
    patch(pyro.infer, "MCMC", num_samples=8, warmup_steps=4)


@pytest.mark.parametrize("page", PAGES)
def test_page_runs(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(GALLERY / page), run_name="__main__")
    plt.close("all")
    has_verdict = "Verdict: " in capsys.readouterr().out
    assert has_verdict == (page != "networks/lenet_ood.py"), "which says why it has none"


def test_every_section_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    settings = runpy.run_path(str(ROOT / "docs" / "conf.py"))
    assert sorted(settings["SECTIONS"]) == sorted({page.split("/")[0] for page in PAGES})
