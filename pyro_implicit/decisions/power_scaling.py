# SPDX-License-Identifier: Apache-2.0
"""Sensitivity of a posterior to its prior and its likelihood, by power-scaling."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from pyro import poutine
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_implicit.decisions.pointwise import refuse_point
from pyro_implicit.decisions.policy import DECISIONS
from pyro_implicit.density.labels import element_labels
from pyro_implicit.density.model import compute_log_prob, trace_model
from pyro_implicit.density.policy import RUNS
from pyro_implicit.density.target import Target
from pyro_implicit.diagnostics.policy import REPORT
from pyro_implicit.diagnostics.quantities import Function, values_of
from pyro_implicit.export import as_datatree, as_inferencedata, joined, quiet_arviz
from pyro_implicit.ops import LogWeights
from pyro_implicit.ops.policy import RELIABLE_KHAT
from pyro_implicit.runtime.messages import Printed, Table, refuse_string
from pyro_implicit.runtime.sites import is_data, names_in_plates_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PowerScaling", "Sensitivity", "power_scaling"]


@dataclass(frozen=True, eq=False)
class PowerScaling:
    """Moments of a posterior whose prior or likelihood has an exponent.

    :ivar exponents: ``(num_exponents,)``; 1 is the posterior itself.
    :ivar mean: weighted means of the quantities, ``(num_exponents, num_quantities)``.
    :ivar sd: their weighted standard deviations.
    :ivar khat: Pareto k-hat of the weights, ``(num_exponents,)``.
    """

    exponents: Tensor
    mean: Tensor
    sd: Tensor
    khat: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Sensitivity(Printed):
    """How much a posterior changes if its prior or its likelihood counts more or less.

    ``print`` shows the table.

    :ivar labels: the names of the quantities.
    :ivar prior: the sensitivity of each quantity to the prior, ``(num_quantities,)``: the gradient
        of the cumulative Jensen-Shannon distance by the binary logarithm of the exponent.
    :ivar likelihood: the sensitivity to the likelihood.
    :ivar prior_sites: the sites whose prior was scaled.
    :ivar curves: moments by exponent, of ``"prior"`` and ``"likelihood"``.
    """

    labels: tuple[str, ...]
    prior: Tensor
    likelihood: Tensor
    prior_sites: tuple[str, ...]
    curves: dict[str, PowerScaling]

    @property
    def diagnosis(self) -> dict[str, str]:
        """By quantity, ``"prior-data conflict"``, ``"strong prior"`` (or a weak likelihood), or
        ``"-"``."""
        limit = DECISIONS.sensitive
        words = {(True, True): "prior-data conflict", (True, False): "strong prior"}
        pairs = zip(
            (self.prior >= limit).tolist(), (self.likelihood >= limit).tolist(), strict=True
        )
        return {
            label: words.get((pair[0], pair[1]), "-")
            for label, pair in zip(self.labels, pairs, strict=True)
        }

    @property
    def khat(self) -> dict[str, float]:
        """The largest k-hat of the weights, for the prior and the likelihood."""
        return {name: curve.khat.max().item() for name, curve in self.curves.items()}

    def _order(self) -> list[int]:
        return self.prior.argsort(descending=True, stable=True)[: REPORT.max_rows].tolist()

    def _blocks(self) -> Iterator[str | Table]:
        found = self.diagnosis
        rows = [("sensitivity", "prior", "likelihood", "diagnosis")]
        for index in self._order():
            label = self.labels[index]
            numbers = f"{self.prior[index]:.3f}", f"{self.likelihood[index]:.3f}"
            rows.append((label, *numbers, found[label]))
        yield Table(rows, header=True, align="lrrl")
        if len(self.labels) > len(rows) - 1:
            yield f"{len(self.labels) - len(rows) + 1} more are less sensitive to the prior"
        yield f"Priors that were scaled: {', '.join(self.prior_sites)}"
        for name, khat in self.khat.items():
            if not khat <= RELIABLE_KHAT:
                low, high = self.curves[name].exponents[[0, -1]].tolist()
                yield (
                    f"The curves of the {name} are unreliable at exponents near {low:g} or "
                    f"{high:g} (k-hat {khat:.2f}); the sensitivities are not affected"
                )

    def plot(self, max_quantities: int = 4, path: str | PathLike[str] | None = None) -> Figure:
        """Plot mean and standard deviation by exponent, of the quantities most sensitive to the
        prior. Crosses show unreliable weights.

        :param max_quantities: the number of quantities.
        :param path: where to save the picture, if anywhere.
        :returns: the matplotlib figure, which belongs to no window.
        """
        from matplotlib.figure import Figure

        chosen = self._order()[:max_quantities]
        figure = Figure(figsize=(2.6 * len(chosen) + 1, 4.2), layout="constrained")
        axes = figure.subplots(2, len(chosen), squeeze=False, sharex=True)
        for column, index in enumerate(chosen):
            for name, colour in (("prior", "C0"), ("likelihood", "C1")):
                curve = self.curves[name]
                bad = curve.khat > RELIABLE_KHAT
                for row, moment in enumerate((curve.mean, curve.sd)):
                    axis = axes[row, column]
                    axis.plot(curve.exponents, moment[:, index], color=colour, label=name)
                    points = curve.exponents[bad], moment[bad, index]
                    axis.plot(*points, "x", color=colour)
            axes[0, column].set_title(self.labels[index])
            axes[1, column].set_xlabel("exponent")
            axes[1, column].set_xscale("log", base=2)
        axes[0, 0].set_ylabel("mean")
        axes[1, 0].set_ylabel("sd")
        axes[0, 0].legend()
        if path is not None:
            figure.savefig(path)
        return figure


@torch.no_grad()
def power_scaling(
    target: Target,
    draws: Mapping[str, Tensor],
    prior_sites: Collection[str] | None = None,
    quantities: Function | None = None,
) -> Sensitivity:
    """Compute the sensitivity of a posterior from its draws.

    :param target: the posterior.
    :param draws: draws by site, ``(num_chains, num_draws, *site_shape)``.
    :param prior_sites: the sites whose prior is scaled; see :meth:`Fit.sensitivity
        <pyro_implicit.fitting.Fit.sensitivity>`.
    :param quantities: a function of draws by site; by default all elements of all sites.
    :raises TypeError: for ``prior_sites`` that are a string.
    :raises ValueError: for draws that are all one point, an unknown site, no top-level prior, or
        densities that are not finite.
    """
    refuse_string(prior_sites=prior_sites)
    refuse_point(draws)
    flat = {name: draws[name].flatten(0, 1) for name in target.shapes}
    if prior_sites is None:
        prior_sites = _top_level(target, flat)
    unknown = [name for name in prior_sites if name not in target.shapes]
    if unknown or not prior_sites:
        what = f"no latent site '{unknown[0]}'" if unknown else "no prior that could be scaled"
        raise ValueError(
            f"the model has {what}. Cure: prior_sites= with some of {sorted(target.shapes)}"
        )
    parts = _log_densities(target, flat)
    components = {
        "prior": torch.stack([parts[name] for name in prior_sites]).sum(0),
        "likelihood": parts[""],
    }
    for name, value in components.items():
        if not value.isfinite().all():
            raise ValueError(
                f"the log-density of the {name} is not finite at {int((~value.isfinite()).sum())} "
                f"of {len(value)} draws, so that it cannot be scaled. Cure: finite weights "
                "(poutine.scale), and draws inside of the support"
            )
    found = flat if quantities is None else values_of(quantities, flat)
    labels = [label for name, v in found.items() for label in element_labels(name, v.shape[1:])]
    rows = torch.cat([v.reshape(len(v), -1).double().cpu() for v in found.values()], -1)
    lead = next(iter(draws.values())).shape[:2]
    with torch.device("cpu"):
        return Sensitivity(
            tuple(labels),
            **_distances(rows, components, lead),
            prior_sites=tuple(prior_sites),
            curves={name: _curve(rows, value) for name, value in components.items()},
        )


def _top_level(target: Target, draws: Mapping[str, Tensor]) -> list[str]:
    """Return the latent sites whose prior depends on no other site, outside of plates of data."""
    some = {name: value[: RUNS.num_compared_runs] for name, value in draws.items()}
    fixed = {name: value[0] for name, value in some.items()}

    def of_fixed(trace: Trace) -> dict[str, Tensor]:
        return {n: trace.nodes[n]["fn"].log_prob(v).sum() for n, v in fixed.items()}

    own = target.read_at(some, of_fixed)
    model = poutine.condition(target.model, fixed)
    trace = trace_model(model, target.args, target.kwargs).nodes
    data = [site for name, site in trace.items() if name not in fixed and is_data(site)]
    local = names_in_plates_of(data, {name: trace[name] for name in fixed})
    return [n for n in fixed if torch.isclose(own[n], own[n][0]).all() and n not in local]


def _log_densities(target: Target, draws: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the log-prior of each latent site, and all other terms as ``""``, by draw."""

    def read(trace: Trace) -> dict[str, Tensor]:
        compute_log_prob(trace)
        found = {name: trace.nodes[name]["log_prob"].sum() for name in target.shapes}
        priors = [s["log_prob"].sum() for s in trace.nodes.values() if _is_prior_factor(s)]
        rest = torch.as_tensor(trace.log_prob_sum()) - sum([*found.values(), *priors])
        return {**found, "": rest}

    number = len(next(iter(draws.values())))
    parts = [
        target.read_at({name: value[rows] for name, value in draws.items()}, read)
        for rows in torch.arange(number).split(RUNS.draws_at_once)
    ]
    return {name: torch.cat([part[name] for part in parts]).double().cpu() for name in parts[0]}


def _is_prior_factor(site: dict[str, Any]) -> bool:
    return site["type"] == "sample" and bool(site["infer"].get("is_prior"))


def _distances(
    rows: Tensor, components: Mapping[str, Tensor], lead: torch.Size
) -> dict[str, Tensor]:
    """Return the sensitivities of all quantities, by ArviZ."""
    # ArviZ scales any variable of this group, so that the prior needs no group of its own.
    logs = {name: value.unflatten(0, lead) for name, value in components.items()}
    groups = {"posterior": {"x": rows.unflatten(0, lead)}, "log_likelihood": logs}
    tree = as_datatree({name: joined(values, 4) for name, values in groups.items()})
    with quiet_arviz() as arviz:
        data = as_inferencedata(tree)
        return {
            name: torch.as_tensor(
                arviz.psens(data, component="likelihood", component_var_names=[name])["x"].values
            ).flatten()
            for name in components
        }


def _curve(rows: Tensor, component: Tensor) -> PowerScaling:
    exponents = torch.logspace(
        -DECISIONS.max_log2_exponent, DECISIONS.max_log2_exponent, DECISIONS.num_exponents, base=2.0
    )
    means, sds, khats = [], [], []
    for exponent in exponents.tolist():
        weights = LogWeights((exponent - 1) * (component - component.mean()))
        shares = weights.shares.unsqueeze(-1).to(rows)
        means.append((shares * rows).sum(0))
        sds.append((shares * (rows - means[-1]).square()).sum(0).sqrt())
        khats.append(weights.khat if exponent != 1 else 0.0)
    return PowerScaling(exponents, torch.stack(means), torch.stack(sds), torch.tensor(khats))
