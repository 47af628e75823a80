# SPDX-License-Identifier: Apache-2.0
"""Predictions of a network by all draws of its posterior, one minibatch at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_implicit.density.batched_runs import BatchedRuns
from pyro_implicit.density.engine import Model
from pyro_implicit.nn.posterior import PosteriorDraws
from pyro_implicit.nn.predictive_means import LabelMean, NumberMean, Prediction, fitting_target
from pyro_implicit.runtime.wrappers import without_event

__all__ = ["model_and_posterior", "predict", "predictions", "target_runner"]

LEAST_AT_ONCE = 8  # draws
NUMBERS_AT_ONCE = 2**24  # of inputs and weights, from which on the draws in one run are few
WIDTH = 32  # of a network's layers, per number of its input, about


def predict(
    result: Any,
    loader: Iterable[Any],
    num_samples: int = 100,
    *,
    model: Callable[..., Any] | None = None,
) -> Iterator[Prediction]:
    """Predicts by the mean over draws of a posterior, one minibatch after the other.

    Neither the predictions nor the draws of the posterior are kept: memory does not grow with the
    rows of the loader, nor with ``num_samples``.

    **Example:**

    >>> from torch import nn
    >>> from pyro_implicit.nn import classifier, to_bayesian_
    >>> model = classifier(to_bayesian_(nn.Linear(4, 3)), num_data=150)
    >>> ensemble = {"weight": torch.randn(5, 3, 4), "bias": torch.randn(5, 3)}
    >>> for batch in predict(ensemble, torch.randn(20, 4).split(10), model=model):
    ...     print(tuple(batch.probability.shape), bool((batch.mutual_information > 0).all()))
    (10, 3) True
    (10, 3) True

    :param result: what :func:`~pyro_implicit.fit` returned. Or, with its ``model``: a guide, what
        :func:`~pyro_implicit.refine` or an ``MCMC`` gave, or draws by site
        ``(num_draws, *site_shape)``, such as the members of an ensemble.
    :param loader: minibatches of inputs; of tuples the first is the input, and no other is read.
    :param num_samples: draws of the posterior; of stored ones at most as many as there are, evenly
        spaced.
    :param model: of a ``result`` that does not know it: of
        :func:`~pyro_implicit.nn.classifier` or :func:`~pyro_implicit.nn.regressor`, or one of your
        own ``(x, y=None)`` with one observed site, of labels (``Categorical``, ``Bernoulli``) or of
        numbers.
    :returns: an iterator, one prediction for each minibatch, on the posterior's device.
    :raises TypeError: for a posterior that is none, no model, or what is no loader.
    :raises ValueError: for an autoguide that was never called, and for a model in which not one
        site alone is neither latent nor observed.
    """
    model, posterior = model_and_posterior(result, model)
    for prediction, _ in predictions(model, posterior, loader, num_samples, with_targets=False):
        yield prediction


def model_and_posterior(result: Any, model: Callable[..., Any] | None) -> tuple[Callable, Any]:
    """Both, from a fit, or as they are."""
    if hasattr(result, "source"):
        model = model or result.source[0]
        is_streamed = hasattr(result.refined, "stream")  # from files, perhaps
        result = result.refined if is_streamed else result.posterior
    if model is None:
        raise TypeError(
            f"a {type(result).__name__} does not know its model. Cure: model=, as in "
            "predict(guide, loader, model=model)"
        )
    return model, result


@torch.no_grad()
def predictions(
    model: Callable[..., Any],
    posterior: Any,
    loader: Iterable[Any],
    num_samples: int,
    with_targets: bool,
) -> Iterator[tuple[Prediction, Tensor | None]]:
    """Predictions, and the targets if they are wanted."""
    runs = BatchedRuns("predict")
    draws, device = None, None
    for x, y in _rows(loader, with_targets):
        if draws is None:
            draws = PosteriorDraws(posterior, num_samples, (x,))
            device = next(iter(draws.example.values())).device
        x, y = x.to(device), None if y is None else y.to(device)
        yield _predict(runs, model, draws, x, y), y


def _rows(loader: Iterable[Any], with_targets: bool) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Inputs, and targets if they are wanted."""
    single = "[(x, y)]" if with_targets else "[x]"
    if isinstance(loader, (Tensor, Mapping, str)) or not isinstance(loader, Iterable):
        raise TypeError(
            f"a loader of minibatches is wanted, but this is a {type(loader).__name__}. Cure: a "
            f"DataLoader, or {single} for a single one"
        )
    for batch in loader:
        if isinstance(batch, Mapping):
            raise TypeError(
                "the loader gives dicts. Cure: tuples, or a generator (batch['x'], batch['y']) for "
                "each of them"
            )
        parts = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
        if with_targets and len(parts) != 2:
            raise ValueError(
                f"the loader must give tuples (inputs, targets), but gave one of {len(parts)}. "
                f"Cure: {single} for a single minibatch"
            )
        yield parts[0], parts[1] if with_targets else None


def _predict(
    runs: BatchedRuns, model: Callable[..., Any], draws: PosteriorDraws, x: Tensor, y: Tensor | None
) -> Prediction:
    """One minibatch."""
    runner, site, fn = target_runner(model, draws.example, x)
    is_label = isinstance(without_event(fn), (dist.Categorical, dist.Bernoulli))
    mean = LabelMean() if is_label else NumberMean()
    target = None if y is None else fitting_target(y, fn)

    def read(trace: Trace) -> dict[str, Tensor]:
        return mean.read(trace.nodes[site]["fn"], target)

    numbers = len(x) * draws.draw_size + WIDTH * x.numel()
    for values in draws.chunks(max(LEAST_AT_ONCE, NUMBERS_AT_ONCE // max(1, numbers))):
        known = {name: value for name, value in values.items() if name in runner.replayed}
        mean.add(runs.map(runner, known, read))
    return mean.prediction()


def target_runner(
    model: Callable[..., Any], values: dict[str, Tensor], x: Tensor
) -> tuple[Model, str, dist.TorchDistribution]:
    """The model with its latents to be given, the site that is predicted, and its distribution."""
    with poutine.block():
        trace = poutine.trace(poutine.condition(model, values)).get_trace(x)
    latents, drawn = Trace(), []
    for name, site in trace.nodes.items():
        if site["type"] != "sample" or site_is_subsample(site):
            continue
        if name in values:
            latents.add_node(name, **{**site, "is_observed": False})
        elif not site["is_observed"]:
            drawn.append(name)
    if len(drawn) != 1:
        raise ValueError(
            f"the model's sites beside those of the posterior are {drawn}, but one is wanted, the "
            "targets. Cure: a model (x, y=None) with all of its latents in the posterior, such as "
            "classifier(net, num_data)"
        )
    (name,) = drawn
    site = trace.nodes[name]
    return Model(_Undrawn(name, site["value"])(model), (x,), {}, latents), name, site["fn"]


class _Undrawn(Messenger):
    """Leaves the targets undrawn, of which only the distribution is wanted.

    :param name: of their site.
    :param value: that they have in its place, as a model may go on with them.
    """

    def __init__(self, name: str, value: Tensor) -> None:
        super().__init__()
        self.name, self.value = name, value

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] == self.name:
            msg["value"] = self.value
            msg["is_observed"] = True
