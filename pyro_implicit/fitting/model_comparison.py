# SPDX-License-Identifier: Apache-2.0
"""Comparison of models: leave-one-out and K-fold cross-validation, weights, log evidence."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyro_implicit.decisions.leave_one_out import LeaveOneOut, leave_one_out
from pyro_implicit.decisions.pointwise import (
    Pointwise,
    WeightedObservations,
    observed_sites,
    refuse_point,
)
from pyro_implicit.decisions.policy import DECISIONS
from pyro_implicit.decisions.subsampled import (
    Subsample,
    difference_estimate,
    subsample_batches,
    subsample_observations,
)
from pyro_implicit.density.model import SubsampledError
from pyro_implicit.density.target import Target
from pyro_implicit.export import import_arviz, quiet_arviz
from pyro_implicit.fitting.log_evidence import LogEvidence, log_evidence
from pyro_implicit.fitting.result import Fit
from pyro_implicit.infer import EvidenceBound, evidence_bound
from pyro_implicit.ops.importance_weights import pareto_smoothed
from pyro_implicit.ops.log_space import log_mean_exp
from pyro_implicit.ops.policy import MAX_ENTRIES, RELIABLE_KHAT
from pyro_implicit.runtime.global_state import in_turn, with_seed
from pyro_implicit.runtime.messages import (
    Printed,
    Table,
    refuse_counts,
    refuse_nonpositive,
    warn_user,
)
from pyro_implicit.runtime.minibatches import BatchStream
from pyro_implicit.runtime.progress import watching

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ModelComparison", "compare_models"]


@dataclass(frozen=True, eq=False, repr=False)
class ModelComparison(Printed):
    """Comparison of models by their predictions of the same observations.

    ``print`` shows the table.

    :ivar table: ArviZ's table of ``arviz.compare``, best model first, with columns ``stacking`` and
        ``pseudo_bma`` (weights of models, pseudo-BMA by the Bayesian bootstrap). With
        ``subsample``, ``subsampling_se`` and ``subsampling_dse`` are the standard errors of the
        elpd and of its difference by the choice of the observations.
    :ivar elpd: by model, the expected log predictive density of each observation,
        ``(num_observations,)``; with ``subsample``, of the chosen ones.
    :ivar labels: the names of these observations.
    :ivar loo: by model, the leave-one-out result; empty for K-fold cross-validation.
    :ivar evidence: by model, the log evidence; None if it is unknown.
    :ivar bounds: by model, the certified lower bound of its guide; None if it is unknown.
    :ivar notes: by model, why the evidence or the bound is unknown.
    """

    table: Any
    elpd: dict[str, Tensor]
    labels: tuple[str, ...]
    loo: dict[str, LeaveOneOut]
    evidence: dict[str, LogEvidence | None] = field(default_factory=dict)
    bounds: dict[str, EvidenceBound | None] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def bad(self) -> dict[str, dict[str, str]]:
        """By model, the observations whose elpd is unreliable, with the reason."""
        return {name: loo.bad for name, loo in self.loo.items() if loo.bad}

    def _blocks(self) -> Iterator[str | Table]:
        kind = "LOO" if self.loo else "K-fold"
        shown = {"elpd_loo": "elpd", "se": "se", "elpd_diff": "difference", "dse": "se"}
        if "subsampling_se" in self.table:
            shown = {
                "elpd_loo": "elpd", "subsampling_se": "subsampling se", "se": "se",
                "elpd_diff": "difference", "subsampling_dse": "subsampling se", "dse": "se",
            }  # fmt: skip
        head = [kind, *shown.values(), "stacking", "pseudo-BMA"]
        head += ["repaired, bad"] if self.loo else []
        head += ["log evidence", "bound"] if self.evidence else []
        rows = [head]
        for name, one in self.table.iterrows():
            row = [name, *(f"{one[key]:.1f}" for key in shown)]
            row += [f"{one[key]:.2f}" for key in ("stacking", "pseudo_bma")]
            if self.loo:
                loo = self.loo[name]
                row.append(f"{int(loo.is_repaired.sum())}, {len(loo.bad)}")
            if self.evidence:
                bound = self.bounds[name]
                row.append(str(self.evidence[name] or "-"))
                row.append(f"{bound.value:.2f}" if bound else "-")
            rows.append(row)
        yield Table(rows, header=True)
        for name, bad in self.bad.items():
            yield f"Unreliable observations of {name}:"
            yield from (f"  {label}: {why}" for label, why in bad.items())
        yield from (f"{name} has {note}" for name, note in self.notes.items())

    def plot(self, path: str | PathLike[str] | None = None) -> Figure:
        """Plot elpd with standard errors (ArviZ), and k-hat of each observation.

        :param path: where to save the picture, if anywhere.
        :returns: the matplotlib figure, which belongs to no window.
        """
        from matplotlib.figure import Figure

        number = 2 if self.loo else 1
        figure = Figure(figsize=(4.5 * number, 3), layout="constrained")
        first, *others = figure.subplots(1, number, squeeze=False)[0]
        columns = ["rank", "elpd_loo", "p_loo", "elpd_diff", "weight", "se", "dse", "scale"]
        with quiet_arviz() as arviz:
            arviz.plot_compare(self.table[columns], ax=first, textsize=9)
        first.set(title="", xlabel="elpd in nats, with standard errors", ylabel="")
        for axis in others:
            for name, loo in self.loo.items():
                axis.plot(loo.khat.clamp(max=2.0), ".", label=name, alpha=0.7)
            axis.axhline(min(one.good_khat for one in self.loo.values()), color="0.5", ls="--")
            axis.set(xlabel="observation", ylabel="Pareto k-hat (at most 2)")
            axis.legend()
        if path is not None:
            figure.savefig(path)
        return figure


@with_seed  # not in turn: threads of an executor call fit, which waits for its turn
def compare_models(
    results: Mapping[str, Fit],
    *,
    folds: int | None = None,
    executor: Executor | None = None,
    fit_options: Mapping[str, Any] | None = None,
    subsample: int | None = None,
    batches: Iterable[Any] | None = None,
    evidence: bool = True,
    max_seconds: float = 60.0,
    seed: int | None = None,
    progress: bool = False,
) -> ModelComparison:
    r"""Compare models of the same data by cross-validation, model weights and log evidence.

    Leave-one-out cross-validation (LOO) by Pareto-smoothed importance sampling needs no further
    fit. An observation whose Pareto k-hat is too large is repaired: draws that are resampled by its
    weights start short chains on the posterior of all other observations, and bridge sampling
    between both posteriors gives its elpd. The report names the observations that stay unreliable.

    The log evidence comes from bridge sampling with chains; ``bound`` next to it is
    :func:`~pyro_implicit.evidence_bound` of the guide, a lower bound of the log evidence up to its
    standard error.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro_implicit import fit
    >>> def model(y, scale):
    ...     x = pyro.sample("x", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("rows", len(y)):
    ...         pyro.sample("y", dist.Normal(x, scale), obs=y)
    >>> y = torch.tensor([0.1, 1.3, -0.8, 0.4, 0.9])
    >>> results = {
    ...     f"scale {scale:g}": fit(model, "auto", y, scale, seed=0, progress=False)
    ...     for scale in (1.0, 5.0)
    ... }
    >>> print(compare_models(results, seed=0))
    LOO       elpd  ...  stacking  pseudo-BMA  repaired, bad      log evidence   bound
    scale 1   -6.6  ...      1.00        1.00           0, 0   -6.84... +- 0.00...  -6.84
    scale 5  -12.8  ...      0.00        0.00           0, 0  -12.79... +- 0.00...  -12.80

    :param results: at least two results of :func:`~pyro_implicit.fit`, by the names of their
        models. All models observe the same sites with the same values; an event of a distribution
        (``to_event``) is one observation.
    :param folds: the number K of folds. By default LOO; K-fold cross-validation fits each model K
        times, and a warning names the observations at which it is unreliable.
    :param executor: runs the fits of K-fold cross-validation, for instance a
        ``concurrent.futures.ProcessPoolExecutor``, which needs models that can be pickled
        (functions of a module). By default the fits run one after the other.
    :param fit_options: options of :func:`~pyro_implicit.fit` in K-fold cross-validation.
    :param subsample: the number of randomly chosen observations whose LOO is computed, for large
        data. A cheap surrogate of all observations makes the estimate of their sum precise, and
        the table has its standard error by subsampling (Magnusson et al., 2020).
    :param batches: the minibatches, for results of ``fit(batches=...)``; needs ``subsample``. Each
        row of a minibatch must be one observation. The draws of the guides, or of ``refine`` by
        minibatches, are taken as the posterior, and nothing is repaired.
    :param evidence: whether to compute the log evidence.
    :param max_seconds: wall time for the repair of the observations of each model.
    :param seed: of all random numbers; by default the current streams are used.
    :param progress: whether to show a bar.
    :raises ImportError: without ArviZ 0.x.
    :raises TypeError: for a value that is not a result of ``fit``.
    :raises ValueError: for fewer than two models, different data or observed sites, a result
        without draws, observations that depend on discrete latent variables, log-likelihoods that
        are not finite, or constant data; the message names the model.
    :raises SubsampledError: for a model that was fitted by minibatches.

    **References:**

    1. Vehtari, Gelman and Gabry (2017), *Practical Bayesian model evaluation using leave-one-out
       cross-validation and WAIC*.
    2. Yao, Vehtari, Simpson and Gelman (2018), *Using stacking to average Bayesian predictive
       distributions*.
    3. Meng and Wong (1996), *Simulating ratios of normalizing constants via a simple identity: a
       theoretical exploration*.
    4. Magnusson, Vehtari, Jonasson and Andersen (2020), *Leave-one-out cross-validation for
       Bayesian model comparison in large data*.
    """
    refuse_nonpositive(max_seconds=max_seconds)
    _refuse_results(results)
    parts: dict[str, Subsample] = {}
    if subsample is None:
        if batches is not None:
            raise ValueError("batches need subsample. Cure: compare_models(..., subsample=1000)")
        found = {name: pointwise_of(name, one) for name, one in results.items()}
    else:
        refuse_counts(2, subsample=subsample)
        if folds is not None:
            raise ValueError("folds and subsample exclude each other. Cure: leave out one of them")
        parts = _subsamples(results, subsample, batches)
        found = {name: part.found for name, part in parts.items()}
    first = next(iter(found))
    for name in found:
        _refuse_other_data(first, found[first], name, found[name])
    loo: dict[str, LeaveOneOut] = {}
    with watching(progress):
        if folds is None:
            for name, one in results.items():
                with one.own_parameters():
                    target = one.target if batches is None else None
                    loo[name] = leave_one_out(
                        target, found[name], max_seconds, one.resampling_efficiency
                    )
            elpd = {name: one.elpd for name, one in loo.items()}
        else:
            elpd = _k_fold(results, found, folds, executor, dict(fit_options or {}))
    table = _table(elpd, loo, found)
    if parts:
        table = _extrapolated(table, parts, elpd)
    labels = found[first].labels
    if not evidence:
        return ModelComparison(table, elpd, labels, loo)
    values: dict[str, LogEvidence | None] = {}
    bounds: dict[str, EvidenceBound | None] = {}
    notes: dict[str, str] = {}
    for name, one in results.items():
        values[name] = bounds[name] = None
        try:
            values[name] = log_evidence(one)
        except ValueError as error:
            notes[name] = f"no log evidence: {error}"
            continue
        try:
            _, args, kwargs = one.source
            with one.own_parameters():
                bounds[name] = evidence_bound(
                    one.model, one.guide, *args, progress=False, model_kwargs=kwargs
                )
        except (TypeError, ValueError) as error:  # usually, the guide has no density
            notes[name] = f"no bound: {error}"
    return ModelComparison(table, elpd, labels, loo, values, bounds, notes)


def _refuse_results(results: Mapping[str, Fit]) -> None:
    if not isinstance(results, Mapping) or len(results) < 2:
        raise ValueError(
            "compare_models needs at least two results by name. Cure: "
            'compare_models({"a": fit(...), "b": fit(...)})'
        )
    for name, one in results.items():
        if not isinstance(one, Fit):
            raise TypeError(
                f"model '{name}': compare_models needs results of fit, but got "
                f'{type(one).__name__}. Cure: fit(model, "auto", ...)'
            )


def pointwise_of(name: str, result: Fit) -> Pointwise:
    """Return draws of a result with the log-likelihood of each observation; errors name it."""
    try:
        with result.own_parameters():
            target, number = result.target, DECISIONS.num_draws
            few = result.draws_by_chain(number)
            refuse_point(few)
            is_cheap = not (
                result.refined is None and result.correction is None and result.draws is None
            )
            if is_cheap and target.is_vectorized:
                sites = observed_sites(target, {name: value[0] for name, value in few.items()})
                size = sum(int(site.used.sum()) for site in sites.values())
                number = max(number, min(DECISIONS.most_draws, MAX_ENTRIES // size))
            return Pointwise.of(target, result.draws_by_chain(number))
    except (TypeError, ValueError) as error:
        raise type(error)(f"model '{name}': {error}") from error


def _refuse_other_data(name: str, one: Pointwise, other_name: str, other: Pointwise) -> None:
    if one.sites.keys() != other.sites.keys():
        raise ValueError(
            f"model '{name}' observes {sorted(one.sites)}, and model '{other_name}' observes "
            f"{sorted(other.sites)}: only predictions of the same observations can be compared. "
            "Cure: the same observed sites in all models"
        )
    for site, value in one.sites.items():
        its = other.sites[site]
        if value.is_discrete != its.is_discrete:
            kinds = ("continuous", "discrete")
            raise ValueError(
                f"site '{site}' is {kinds[value.is_discrete]} in model '{name}' and "
                f"{kinds[its.is_discrete]} in model '{other_name}': densities and probabilities "
                "cannot be compared. Cure: distributions of one kind"
            )
        same = value.used.shape == its.used.shape and bool((value.used == its.used).all())
        if not same or not torch.equal(value.events.double(), its.events.double()):
            raise ValueError(
                f"the data of site '{site}' differ between model '{name}' and model "
                f"'{other_name}', by value, shape or mask. Cure: fit all models to the same data; "
                "write a transformed response as a TransformedDistribution of the original one"
            )


def _table(
    elpd: Mapping[str, Tensor], loo: Mapping[str, LeaveOneOut], found: Mapping[str, Pointwise]
) -> Any:
    """Return ArviZ's comparison, with both kinds of weights."""
    import xarray

    arviz, compared = import_arviz(), {}
    for name, values in elpd.items():
        logs = found[name].log_likelihood.flatten(0, 1)
        in_sample = log_mean_exp(logs).sum().item()
        error = math.sqrt(len(values) * values.var(unbiased=False).item())
        entries = {
            "elpd_loo": values.sum().item(), "se": error,
            "p_loo": in_sample - values.sum().item(),
            "n_samples": len(logs), "n_data_points": len(values),
            "warning": name in loo and bool(loo[name].bad),
            "loo_i": xarray.DataArray(values.numpy()), "scale": "log",
        }  # fmt: skip
        compared[name] = arviz.ELPDData(data=list(entries.values()), index=list(entries))
    seed = int(torch.randint(2**31, ()))
    with quiet_arviz():
        table = arviz.compare(compared, ic="loo", method="stacking")
        bma = arviz.compare(compared, ic="loo", method="BB-pseudo-BMA", seed=seed)
    table["stacking"] = table["weight"]
    table["pseudo_bma"] = bma["weight"]
    return table


# Subsampled leave-one-out cross-validation


def _subsamples(
    results: Mapping[str, Fit], number: int, batches: Iterable[Any] | None
) -> dict[str, Subsample]:
    draws = {name: one.draws_by_chain(DECISIONS.num_draws) for name, one in results.items()}
    if batches is not None:
        targets, stream = {}, BatchStream(batches)
        for name, one in results.items():
            _, args, kwargs = one.source
            targets[name] = Target.of_minibatches(
                _with_own_parameters(one), *args, batch=stream.probed[0], model_kwargs=kwargs
            )
        return subsample_batches(targets, draws, batches, number)
    for name, one in results.items():
        if one.minibatches:
            raise SubsampledError(
                f"model '{name}' was fitted by minibatches, and compare_models needs them. Cure: "
                "compare_models(..., subsample=1000, batches=loader)"
            )
    order, parts = None, {}
    for name, one in results.items():
        with one.own_parameters():
            sites = observed_sites(one.target, {k: value[0] for k, value in draws[name].items()})
            size = sum(int(site.used.sum()) for site in sites.values())
            if order is None or len(order) != size:  # other data are refused later
                order = torch.randperm(size, device="cpu")
            parts[name] = subsample_observations(one.target, draws[name], order, number)
    return parts


def _with_own_parameters(result: Fit) -> Callable[..., Any]:
    """Return the model of a result; each run has the parameters of its fit."""
    if not result.parameters:
        return result.model

    @functools.wraps(result.model, updated=())
    def model(*args: Any, **kwargs: Any) -> Any:
        with result.own_parameters():
            return result.model(*args, **kwargs)

    return model


def _extrapolated(table: Any, parts: Mapping[str, Subsample], elpd: Mapping[str, Tensor]) -> Any:
    """Replace sums over the chosen observations by estimates of the sums over all."""
    table = table.copy()
    estimates = {
        name: difference_estimate(part.surrogate, part.found.places, elpd[name])
        for name, part in parts.items()
    }
    best = max(estimates, key=lambda name: estimates[name].total)
    for name, found in estimates.items():
        surrogate = parts[best].surrogate - parts[name].surrogate
        places = parts[name].found.places
        gap = difference_estimate(surrogate, places, elpd[best] - elpd[name])
        columns = {
            "elpd_loo": found.total, "se": found.error, "subsampling_se": found.subsampling_error,
            "elpd_diff": gap.total, "dse": gap.error, "subsampling_dse": gap.subsampling_error,
        }  # fmt: skip
        for column, value in columns.items():
            table.loc[name, column] = value
    table = table.sort_values("elpd_loo", ascending=False)
    table["rank"] = range(len(table))
    return table


# K-fold cross-validation


def _k_fold(
    results: Mapping[str, Fit],
    found: Mapping[str, Pointwise],
    folds: int,
    executor: Executor | None,
    options: dict[str, Any],
) -> dict[str, Tensor]:
    number = len(next(iter(found.values())).labels)
    if not 2 <= folds <= number:
        raise ValueError(
            f"folds must be from 2 to the number of observations, {number}, but got {folds}"
        )
    parts = torch.randperm(number, device="cpu").tensor_split(folds)
    options = {"progress": False, "seed": int(torch.randint(2**31, ())), **options}
    tasks = [
        (*results[name].source, one.weights_with(part, 0.0), part, options)
        for name, one in found.items()
        for part in parts
    ]
    # A list: meanwhile, threads run their models, and this one runs none.
    scores = list((map if executor is None else executor.map)(_score_fold, tasks))
    elpd = {}
    for index, (name, one) in enumerate(found.items()):
        own = torch.cat(scores[index * folds : (index + 1) * folds])[torch.cat(parts).argsort()]
        elpd[name] = own[:, 0]
        bad = (own[:, 1] > RELIABLE_KHAT).nonzero().flatten().tolist()
        if bad:
            rows = ", ".join(one.labels[row] for row in bad)
            warn_user(
                f"K-fold cross-validation of '{name}' is unreliable at {len(bad)} of {number} "
                f"observations ({rows}; Pareto k-hat above {RELIABLE_KHAT}): few draws of the "
                "other folds' posterior explain them, and their elpd may be nats too low. Cure: "
                "leave-one-out cross-validation (folds=None), which repairs such observations"
            )
    return elpd


@in_turn
def _score_fold(task: tuple[Any, ...]) -> Tensor:
    """Return log predictive densities of the observations of one fold, given all others, and the
    Pareto k-hat of their densities at the draws, ``(num_observations, 2)``."""
    model, args, kwargs, weights, part, options = task
    weighted = WeightedObservations(model, weights)
    result = Fit._fit(weighted, "auto", *args, model_kwargs=kwargs, **options)
    draws = result.draws_by_chain(DECISIONS.num_draws)
    target = Target(model, *args, model_kwargs=kwargs)
    logs = Pointwise.of(target, draws).log_likelihood.flatten(0, 1)[:, part]
    khat = torch.tensor([pareto_smoothed(row).khat for row in logs.mT], dtype=torch.float64)
    return torch.stack([log_mean_exp(logs).double().cpu(), khat], -1)
