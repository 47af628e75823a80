# SPDX-License-Identifier: Apache-2.0
"""``fit`` for networks: an ensemble, chains that start from its members, and held-out rows."""

from __future__ import annotations

import copy
import inspect
import math
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from pyro_implicit.compiled import has_compiler
from pyro_implicit.density.target import Target
from pyro_implicit.fitting.candidates import set_up
from pyro_implicit.fitting.held_out import HeldOut
from pyro_implicit.fitting.policy import HeldOutPolicy, NetworkPolicy
from pyro_implicit.fitting.result import Fit
from pyro_implicit.fitting.stages import Stages, TrainingData
from pyro_implicit.fitting.training import default_loss
from pyro_implicit.guides import AutoEnsemble, AutoImplicit, AutoMixture, init_to_shuffled
from pyro_implicit.guides.auto_draws import Frame, own_names
from pyro_implicit.guides.sampler import Sampler
from pyro_implicit.mcmc.policy import DEFAULT
from pyro_implicit.mcmc.refine import refine_target
from pyro_implicit.mcmc.refined import Refined
from pyro_implicit.mcmc.spaces.choice import ChainSetup
from pyro_implicit.nn import (
    FunctionValues,
    LabelReport,
    NetworkModel,
    NumberReport,
    evaluate,
    start_values,
)
from pyro_implicit.runtime.clock import TimeLimit
from pyro_implicit.runtime.messages import first_line, warn_user
from pyro_implicit.runtime.minibatches import BatchStream

__all__ = ["fit_network", "refuse_missing_targets", "score_validation", "train_by_minibatches"]


def fit_network(stages: Stages, target: Target, must_refine: bool) -> Fit:
    """Train an ensemble of networks, then run a chain from each member.

    The chains are those of :func:`~pyro_implicit.mcmc.kernels.mclmc.step`. They are tracked by
    predictions at training inputs, because single weights have no meaning. The ensemble and the
    first chains do not see the held-out rows, by which they are compared; the chains that follow
    see all rows.

    :param must_refine: whether chains run even if the budget allows few gradients or the held-out
        rows speak against them.
    """
    policy, model = stages.policy.network, stages.model
    assert isinstance(model, NetworkModel)
    # A limit of time that the user sets replaces the budget, and ends the chains by itself.
    is_timed = math.isfinite(stages.limit.end)
    members = affordable_members(target, policy)
    cost = policy.cost_ratio * target.seconds(members)
    if is_timed and not target.is_vectorized:  # such gradients are not recorded
        cost = _measured_seconds(target, members)
    left = stages.limit.left(1 - policy.training_share)
    gradients = int((left if is_timed else policy.chain_seconds) / cost)
    has_chains = must_refine or gradients >= policy.least_gradients
    least = 0 if must_refine else policy.least_gradients
    rows = None
    if stages.validation is not None:
        x, y = rows_of(model, stages.args, stages.kwargs)
        rows = HeldOutRows(model, x, y, stages.validation)
    elif has_chains:
        # Without chains there is nothing to compare, and the ensemble needs all rows.
        rows = split_rows(model, stages.args, stages.kwargs, policy)
    share = policy.training_share if has_chains else 1.0
    _train_ensemble(stages, model, rows, members, share)
    if rows is not None:
        _score(stages, rows.model, rows.held, stages.result.guide.get_samples())
    _warn_of_few_steps(stages)
    if not has_chains:
        stages.result.stages[-1].outcome += (
            f"; no chains, because the time left allows {gradients} gradients of each, fewer than "
            f"{policy.least_gradients}"
        )
        return stages.result
    gradients = sys.maxsize if is_timed else max(2, min(gradients, policy.most_gradients))
    return _run_chains(stages, target, gradients, rows, least)


def _new_ensemble(model: NetworkModel, num_members: int) -> AutoEnsemble:
    return own_names(AutoEnsemble(model, num_members, init_to_shuffled(start_values(model))))


def _warn_of_few_steps(stages: Stages) -> None:
    number = len(stages.result.losses)
    if number < stages.policy.budget.fewest_steps and math.isfinite(stages.limit.end):
        warn_user(
            f"max_seconds ended the training of the networks after {number} steps: they are close "
            "to their initial values. Cure: a larger max_seconds"
        )


def train_by_minibatches(stages: Stages, time_share: float) -> Fit:
    """Train an ensemble of networks by minibatches.

    No chains follow by themselves: on airfoil and MNIST those of stochastic gradients predict no
    better than the members from which they start (:doc:`/networks`).

    :param time_share: the share of the remaining time that the training may take.
    """
    policy, model = stages.policy.network, stages.model
    assert isinstance(model, NetworkModel) and stages.batches is not None
    guide = _new_ensemble(model, policy.fewest_members)
    loss = default_loss(guide, policy.fewest_members)
    result = stages.train_alone("ensemble", guide, loss, time_share)
    if time_share == 1:
        result.stages[-1].outcome += "; no chains, which need all data or refine=True"
    score_validation(stages, guide.get_samples())
    return result


def score_validation(stages: Stages, posterior: Any) -> None:
    """Add scores of the rows for validation to the result of a network trained by minibatches."""
    if stages.validation is not None and stages.result.chosen == "ensemble":
        _score(stages, stages.model, stages.validation, posterior)


def affordable_members(target: Target, policy: NetworkPolicy) -> int:
    """Return the number of members: more than the least if they are cheap.

    Members are cheap while they cost less than the overhead of a gradient.

    :param target: all data; its estimate of seconds counts operations and their sizes.
    """
    if policy.num_members is not None:
        return policy.num_members
    least, ratio = policy.least_members, policy.cost_ratio
    first, second = ratio * target.seconds(least), ratio * target.seconds(2 * least)
    one = (second - first) / least
    if one <= 0:
        return least
    overhead = first - least * one
    return max(least, min(policy.most_members, int(overhead / one)))


def _measured_seconds(target: Target, members: int) -> float:
    """Return the seconds of one gradient by the clock."""
    points, found = target.init_loc.expand(members, -1), math.inf
    for _ in range(2):  # the first one sets up
        began = time.perf_counter()
        target.score(points)[0].sum().item()  # waits for a GPU
        found = min(found, time.perf_counter() - began)
    return found


def _train_ensemble(
    stages: Stages,
    model: NetworkModel,
    rows: HeldOutRows | None,
    members: int,
    time_share: float,
) -> None:
    """Train on the rows that are not held out, until the ensemble predicts the others best."""
    policy, lr_factor = stages.policy.network, 1.0
    guide = _new_ensemble(model, members)
    loss = default_loss(guide, members)
    data = stages.data if rows is None else TrainingData(rows.model, (rows.x, rows.y))
    x, y = rows_of(model, data.args, data.kwargs)
    if len(x) > policy.most_rows:
        data = TrainingData(data.model, (), batches=_shuffled(x, y, policy.batch_rows))
        lr_factor = policy.minibatch_lr_factor
    steps = stages.steps_for(guide, loss, policy.training_seconds / policy.cost_ratio, data)
    if data.batches is not None and time_share == 1 and math.isfinite(stages.limit.end):
        steps = sys.maxsize  # nothing follows, and many rows take many steps
    if rows is not None:
        patience = max(1, int(policy.patience_share * steps / policy.score_interval))
        limits = HeldOutPolicy(patience, num_samples=members)
        held_out = HeldOut(rows.model, rows.held, policy=limits, interval=policy.score_interval)
        data = replace(data, held_out=held_out)
    stages.train_alone(
        "ensemble", guide, loss, time_share, data=data, num_steps=steps, lr_factor=lr_factor
    )


def _shuffled(x: Tensor, y: Tensor, size: int) -> BatchStream:
    """Return endless minibatches of rows in random order, all of one size."""
    rows = TensorDataset(x, y)
    order = BatchSampler(RandomSampler(rows), size, drop_last=True)
    return BatchStream(DataLoader(rows, batch_size=None, sampler=order))


def _score(stages: Stages, model: Any, held: Iterable[Any], posterior: Any) -> None:
    """Add scores of the held-out rows to the result; random streams do not advance."""
    line, held_out = stages.result.stages[-1], stages.result.held_out
    number = stages.policy.network.num_scored
    held_out[line.name] = evaluate(posterior, held, model=model, num_samples=number, seed=0)
    line.outcome += f"; {describe_score(held_out[line.name])}"


def _run_chains(
    stages: Stages, target: Target, gradients: int, rows: HeldOutRows | None, least: int
) -> Fit:
    """Run chains on the training rows, score them, and continue from their ends with all rows.

    :param least: the smallest number of gradients; if ``max_seconds`` ends chains earlier, the
        ensemble remains. 0 if the user requires chains.
    """
    # If the held-out rows are no training rows, all gradients are those of the first chains.
    result, policy = stages.result, stages.policy.network
    starts, is_trial = result.guide.get_samples(), stages.validation is None
    if rows is not None:
        share = policy.trial_share if is_trial else 1.0
        trial = round(share * gradients)
        part = Target(rows.model, rows.x, rows.y) if is_trial else target
        name = "mclmc, held out" if is_trial else "mclmc"
        found = _walk(stages, name, part, starts, trial, share)
        if found is None:
            return result
        _score(stages, rows.model, rows.held, found)
        scores = list(result.held_out.values())
        fault = _too_short(found, round(share * least))
        if not fault and least and is_worse(scores[-1], scores[0], policy):
            fault = "significantly worse than the ensemble, which stays the result"
        if fault:
            result.stages[-1].outcome += f"; {fault}"
            result.held_out["ensemble"] = result.held_out.pop("ensemble")  # the result's is last
            return result
        result.refined = found
        if result.interrupted:
            return result
        starts = {name: value[:, -1] for name, value in found.samples.items()}
        gradients -= trial
    if rows is None or is_trial:
        found = _walk(stages, "mclmc", target, starts, gradients)
        if found is not None and rows is None and (fault := _too_short(found, least)):
            result.stages[-1].outcome += f"; {fault}"
        elif found is not None:
            result.refined = found
    if stages.teaches and result.refined is not None:
        _distil(stages, target, result.refined, rows)
    return result


def _too_short(chains: Refined, least: int) -> str:
    """Say why chains that ``max_seconds`` ended do not replace the ensemble; empty if they may."""
    is_short = chains.stopped == "max_seconds" and chains.num_gradients < least
    return f"fewer than {least} gradients: the ensemble stays the result" if is_short else ""


def _distil(stages: Stages, target: Target, chains: Refined, rows: HeldOutRows | None) -> None:
    """Make a mixture of generators from the chains, and state what it loses on held-out rows."""
    # The last chains may have seen these rows, so that the loss of new rows is smaller.
    result, number = stages.result, stages.policy.network.num_scored
    with result.attempt("teach") as line:
        limits = stages.policy.network
        guide = generators_of(target, chains, limits.window_draws, limits.generator_width)
        stages.guides.append(guide)
        line.outcome = f"{len(guide.components)} linear generators"
        if rows is not None:
            old, new = (
                evaluate(one, rows.held, model=rows.model, num_samples=number, seed=0)
                for one in (chains, guide.sample_posterior(number))
            )
            falls = old.log_prob.double() - new.log_prob.double()
            error = falls.std().item() / math.sqrt(len(falls))
            line.outcome += (
                f"; lost held-out log-likelihood, against the chains: {falls.mean().item():.4f} "
                f"+- {error:.4f}"
            )
        result.guide, result.chosen = guide, "generators"
    if line.error is not None:
        warn_user(f"fit made no generators from its chains: {first_line(line.error)}")


def generators_of(target: Target, chains: Refined, size: int, width: float) -> AutoMixture:
    """Make a mixture of generators, one for each window of each chain.

    A component is a linear map from noise to the unconstrained latent variables, with the mean of
    the window's draws, and ``width`` squared times their covariance. It has as many noise
    dimensions as the window has draws. In longer windows a chain leaves the range of a linear map.

    :param target: the posterior of the chains.
    :param size: about the number of consecutive draws in a window.
    :param width: the ratio of standard deviations.
    """
    draws = chains.get_samples(group_by_chain=True)
    parts = []
    for index in range(chains.num_chains):
        latent = target.unconstrain({name: value[index] for name, value in draws.items()})
        for window in latent.tensor_split(max(1, len(latent) // size)):
            mean, number = window.mean(0), len(window)
            linear = torch.nn.Linear(number, window.shape[-1], bias=False)
            factor = width / math.sqrt(max(1, number - 1))
            linear.weight.data = (factor * (window - mean)).T.contiguous()
            frame = Frame(mean, scale=torch.ones_like(mean))
            parts.append(AutoImplicit(target.model, linear, number, frame=frame))
    return set_up(AutoMixture(target.model, parts), target.args, target.kwargs)


def _walk(
    stages: Stages,
    name: str,
    target: Target,
    starts: dict[str, Tensor],
    gradients: int,
    time_share: float = 1.0,
) -> Refined | None:
    """Run a chain from each start; return None, after a warning, if that fails."""
    result, left = stages.result, stages.limit.left(time_share)
    network = stages.policy.network
    kernel = replace(DEFAULT.mclmc, energy_error=network.energy_error)
    inputs = next((one for one in target.args if isinstance(one, Tensor)), None)
    number, compile = len(next(iter(starts.values()))), stages.options["compile"]
    seconds = min(left, gradients * network.cost_ratio * target.seconds(number))
    if compile == "auto" and seconds >= network.compiled_seconds:
        compile = True if has_compiler() else "auto"
    with result.attempt(name) as line:
        plan = ChainSetup(
            Sampler(target, starts),
            number,
            max(1, gradients),
            limit=TimeLimit(left),
            kernel="mclmc",
            policy=replace(DEFAULT, mclmc=kernel),
            quantities=None if inputs is None else FunctionValues(target.model, inputs),
            compile=compile,
        )
        refined = refine_target(plan)
        result.interrupted = refined.stopped == "interrupted"
        line.outcome = (
            f"{refined.num_chains} chains x {refined.num_gradients} gradients; of the predictions: "
            f"{refined.drift or 'too few draws to estimate their errors'}"
        )
        return refined
    warn_user(f"fit did not move the members of its ensemble: {first_line(line.error)}")
    return None


class HeldOutRows(NamedTuple):
    """Training and held-out rows of a network's data.

    ``model`` is the model of the training rows ``x``, ``y``: it has the priors and parameters of
    the whole model, and the ``num_data`` of these rows. ``held`` are minibatches ``(x, y)`` of the
    other rows.
    """

    model: NetworkModel
    x: Tensor
    y: Tensor
    held: Iterable[Any]


def split_rows(
    model: NetworkModel, args: tuple, kwargs: Mapping[str, Any], policy: NetworkPolicy
) -> HeldOutRows | None:
    """Split the rows of a network's data, equally in each call.

    Every ``1 / share``-th row in the order of the targets is held out, so that both parts have
    similar targets. A class with a single row stays in the training part.

    **Example:**

    >>> from torch import nn
    >>> from pyro_implicit.nn import classifier, to_bayesian_
    >>> model = classifier(to_bayesian_(nn.Linear(1, 2)), num_data=200)
    >>> x, y = torch.randn(200, 1), torch.arange(200) % 2
    >>> rows = split_rows(model, (x, y), {}, NetworkPolicy())
    >>> len(rows.x), rows.held[0][1].bincount(), rows.model.num_data
    (180, tensor([10, 10]), 180)

    :param model: model of all rows, with its ``args`` and ``kwargs``.
    :param policy: the share of held-out rows and their least number.
    :returns: None if there would be too few held-out rows.
    """
    x, y = rows_of(model, args, kwargs)
    if policy.held_out_share * len(x) < policy.least_held_out:
        return None
    stride = round(1 / policy.held_out_share)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0), device="cpu")
    labels = y.detach().reshape(len(y), -1)[:, 0].cpu()
    order = order[labels[order].argsort(stable=True)]
    held = order[stride // 2 :: stride]
    if not y.is_floating_point():
        held = held[labels.long().bincount()[labels[held].long()] > 1]
    kept = torch.ones(len(x), dtype=torch.bool)
    kept[held] = False
    held, rest = held.to(x.device), kept.nonzero().squeeze(-1).to(x.device)
    part = copy.copy(model)
    part.num_data = max(len(rest), round(model.num_data * len(rest) / len(x)))
    return HeldOutRows(part, x[rest], y[rest], [(x[held], y[held])])


def refuse_missing_targets(model: NetworkModel, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Check that the arguments of a network have targets, which would be drawn otherwise.

    :raises ValueError: if they have none.
    """
    try:
        given = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    except TypeError:  # which the model's call explains
        return
    if isinstance(given.get("x"), Tensor) and given.get("y") is None:
        raise ValueError(
            "the network has inputs x but no targets y to learn from. Cure: fit(model, 'auto', x, "
            "y), or minibatches (x, y)"
        )


def rows_of(model: NetworkModel, args: tuple, kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return inputs and targets among the arguments of a network."""
    given = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    return given["x"], given["y"]


def describe_score(report: LabelReport | NumberReport) -> str:
    """Describe the held-out negative log-likelihood with its standard error."""
    error = report.log_prob.std().item() / math.sqrt(report.num_rows)
    return f"held-out NLL {-report.log_prob.mean().item():.3f} +- {error:.3f}"


def is_worse(
    new: LabelReport | NumberReport, old: LabelReport | NumberReport, policy: NetworkPolicy
) -> bool:
    """Return whether scores of the same rows have fallen significantly.

    The mean fall must exceed ``num_errors`` standard errors of the mean difference over rows, and
    ``least_fall``. If some rows are impossible, scores with more of them are worse.
    """
    impossible = [int((~one.log_prob.isfinite()).sum()) for one in (new, old)]
    if any(impossible):
        return impossible[0] > impossible[1]
    falls = (old.log_prob - new.log_prob).double()
    if len(falls) < 2:
        return False
    error = falls.std().item() / math.sqrt(len(falls))
    return falls.mean().item() > max(policy.least_fall, policy.num_errors * error)
