# SPDX-License-Identifier: Apache-2.0
"""Predictions of a network by posterior draws, one minibatch at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import site_is_subsample
from pyro.util import get_rng_state, set_rng_state
from torch import Tensor

from pyro_implicit.density.batched_runs import BatchedRuns
from pyro_implicit.density.model import Model
from pyro_implicit.nn.posterior import PosteriorDraws
from pyro_implicit.nn.predictive_means import LabelMean, NumberMean, Prediction, fitting_target
from pyro_implicit.runtime.random_stream import seeded
from pyro_implicit.runtime.sites import unmasked_elements, without_mask

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
    seed: int | None = None,
    interval: float | None = 0.9,
    draws: bool = False,
) -> Iterator[Prediction]:
    """Predict by the mean over posterior draws, one minibatch after the other.

    Memory does not grow with the number of minibatches. Only a few posterior draws are in memory at
    a time; intervals and draws keep the targets' distribution given each draw for one minibatch.

    **Example:**

    >>> from torch import nn
    >>> from pyro_implicit.nn import classifier, to_bayesian_
    >>> model = classifier(to_bayesian_(nn.Linear(4, 3)), num_data=150)
    >>> ensemble = {"weight": torch.randn(5, 3, 4), "bias": torch.randn(5, 3)}
    >>> for batch in predict(ensemble, torch.randn(20, 4).split(10), model=model):
    ...     print(tuple(batch.probability.shape), bool((batch.mutual_information > 0).all()))
    (10, 3) True
    (10, 3) True

    Numbers come with a variance and a central interval:

    >>> from pyro_implicit.nn import regressor
    >>> model = regressor(to_bayesian_(nn.Linear(4, 1)), num_data=150, noise=0.5)
    >>> ensemble = {"weight": torch.zeros(5, 1, 4), "bias": torch.ones(5, 1)}
    >>> found = next(predict(ensemble, [torch.randn(2, 4)], model=model, interval=0.95))
    >>> found.mean, found.variance
    (tensor([1., 1.]), tensor([0.2500, 0.2500]))
    >>> found.interval  # 1 -+ 1.96 * 0.5
    tensor([[0.0200, 0.0200],
            [1.9800, 1.9800]])

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
    :param seed: of all random numbers, which leaves the caller's random streams as they are. With
        ``None`` the caller's streams are used: the draws of a guide differ between calls.
    :param interval: probability of the central interval of numbers; ``None`` for no interval.
    :param draws: whether to draw one target for each posterior draw.
    :returns: an iterator, one prediction for each minibatch, on the posterior's device.
    :raises TypeError: for a posterior that is none, no model, or what is no loader.
    :raises ValueError: for an autoguide that was never called, a model in which not one site alone
        is neither latent nor observed, an ``interval`` outside of (0, 1), or ``draws`` of a
        distribution that its parameters do not determine.
    """
    if interval is not None and not 0 < interval < 1:
        raise ValueError(f"interval must be a probability between 0 and 1, but got {interval}")
    model, posterior = model_and_posterior(result, model)
    found = predictions(model, posterior, loader, num_samples, False, interval, draws)
    streams = None
    for index in itertools.count():
        # A generator runs in turn with its caller: each step goes on in the streams of the last.
        with seeded(None if seed is None else seed + index):
            if seed is not None and streams is not None:
                set_rng_state(streams)
            prediction, *_ = next(found, (None,))
            streams = get_rng_state()
        if prediction is None:
            return
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
    interval: float | None = None,
    draws: bool = False,
) -> Iterator[tuple[Prediction, Tensor | None, Tensor]]:
    """Predictions, targets if they are wanted, and which elements of these no mask leaves out."""
    runs = BatchedRuns("predict")
    latents, device = None, None
    for x, y in _rows(loader, with_targets):
        if latents is None:
            latents = PosteriorDraws(posterior, num_samples, (x,))
            device = next(iter(latents.example.values())).device
        x, y = x.to(device), None if y is None else y.to(device)
        prediction, unmasked = _predict(runs, model, latents, x, y, interval, draws)
        yield prediction, y, unmasked


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
    runs: BatchedRuns,
    model: Callable[..., Any],
    latents: PosteriorDraws,
    x: Tensor,
    y: Tensor | None,
    interval: float | None,
    draws: bool,
) -> tuple[Prediction, Tensor]:
    """One minibatch."""
    runner, name, site = target_runner(model, latents.example, x)
    fn = site["fn"]
    is_label = isinstance(without_mask(fn), (dist.Categorical, dist.Bernoulli))
    mean = LabelMean(None, draws) if is_label else NumberMean(interval, draws)
    target = None if y is None else fitting_target(y, fn)

    def read(trace: Trace) -> dict[str, Tensor]:
        return mean.read(trace.nodes[name]["fn"], target)

    numbers = len(x) * latents.draw_size + WIDTH * x.numel()
    for values in latents.chunks(max(LEAST_AT_ONCE, NUMBERS_AT_ONCE // max(1, numbers))):
        known = {key: value for key, value in values.items() if key in runner.replayed}
        mean.add(runs.map(runner, known, read))
    return mean.prediction(), unmasked_elements(site)


def target_runner(
    model: Callable[..., Any], values: dict[str, Tensor], x: Tensor
) -> tuple[Model, str, dict[str, Any]]:
    """The model with its latents to be given, the name of the site that is predicted, and it."""
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
    return Model(_Undrawn(name, site["value"])(model), (x,), {}, latents), name, site


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
