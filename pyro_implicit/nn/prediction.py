# SPDX-License-Identifier: Apache-2.0
"""Predictions of a network by posterior draws, one minibatch at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import site_is_subsample
from pyro.util import get_rng_state, set_rng_state
from torch import Tensor

from pyro_implicit.density.batched_runs import BatchedRuns
from pyro_implicit.density.checks.observations import explain, refuse_unfit_targets
from pyro_implicit.density.model import Model
from pyro_implicit.guides.posterior_draws import draw
from pyro_implicit.guides.sampler import StoredDraws
from pyro_implicit.nn.policy import ACTIVATIONS_PER_INPUT, DRAWS_AT_ONCE
from pyro_implicit.nn.predictive_means import LabelMean, NumberMean, Prediction, fitting_target
from pyro_implicit.ops.policy import MAX_ENTRIES
from pyro_implicit.runtime.global_state import seeded
from pyro_implicit.runtime.messages import refuse_counts, refuse_no_probability
from pyro_implicit.runtime.sites import unmasked_elements, without_mask

__all__ = [
    "FunctionValues",
    "PosteriorDraws",
    "model_and_posterior",
    "predict",
    "predictions",
]


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

    :param result: what :func:`~pyro_implicit.fit` returned. Or, together with ``model``: a guide,
        the result of :func:`~pyro_implicit.refine`, an ``MCMC``, or draws by site
        ``(num_draws, *site_shape)``, such as the members of an ensemble.
    :param loader: minibatches of inputs, or tuples whose first part is the input.
    :param num_samples: posterior draws; stored draws are thinned evenly to at most this number.
    :param model: the model, if ``result`` does not know it: from
        :func:`~pyro_implicit.nn.classifier` or :func:`~pyro_implicit.nn.regressor`, or any model
        ``(x, y=None)`` with one observed site of labels (``Categorical``, ``Bernoulli``) or
        numbers.
    :param seed: seed of all random numbers, which leaves the caller's random streams as they are.
        With ``None`` the caller's streams are used: the draws of a guide differ between calls.
    :param interval: probability of the central interval of numbers; ``None`` for no interval.
    :param draws: whether to draw one target for each posterior draw.
    :returns: an iterator over one prediction for each minibatch, on the posterior's device.
    :raises TypeError: for an invalid posterior or loader, or a missing model.
    :raises ValueError: for an autoguide that was never called, a model without exactly one site of
        targets, an ``interval`` outside of (0, 1), or ``draws`` of a distribution that its
        parameters do not determine.
    """
    refuse_no_probability(interval=interval)
    model, posterior = model_and_posterior(result, model)
    found = predictions(model, posterior, loader, num_samples, False, interval, draws)
    streams = None
    for index in itertools.count():
        # The caller draws between two steps: continue in the streams of the last step.
        with seeded(None if seed is None else seed + index):
            if seed is not None and streams is not None:
                set_rng_state(streams)
            prediction, *_ = next(found, (None,))
            streams = get_rng_state()
        if prediction is None:
            return
        yield prediction


def model_and_posterior(result: Any, model: Callable[..., Any] | None) -> tuple[Callable, Any]:
    """Return model and posterior of a fit, or the arguments."""
    if hasattr(result, "source"):
        model = model or result.source[0]
        is_streamed = hasattr(result.refined, "stream")  # possibly from files
        result = result.refined if is_streamed else result.posterior
    if model is None:
        raise TypeError(
            f"a {type(result).__name__} does not know its model. Cure: model=, as in "
            "predict(guide, loader, model=model)"
        )
    return model, result


def _target_runner(
    model: Callable[..., Any], values: dict[str, Tensor], x: Tensor
) -> tuple[Model, str, dict[str, Any]]:
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
            f"the model has the sites {drawn} in addition to the sites of the posterior, but needs "
            "exactly one, the targets. Cure: a model (x, y=None) whose latents are all in the "
            "posterior, such as classifier(net, num_data)"
        )
    (name,) = drawn
    site = trace.nodes[name]
    # Sampling inside vmap fails, and only the targets' distribution is used: fix their value.
    fixed = poutine.condition(model, {name: site["value"]})
    return Model(fixed, (x,), {}, latents), name, site


def _draws_at_once(x: Tensor, draw_size: int) -> int:
    """Limit the draws in one vectorised run by the memory of weights and activations."""
    numbers = len(x) * draw_size + ACTIVATIONS_PER_INPUT * x.numel()
    return max(DRAWS_AT_ONCE, MAX_ENTRIES // max(1, numbers))


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
    """Yield predictions, targets if given, and a mask of the targets that the model counts."""
    runs = BatchedRuns("predict")
    latents, device = None, None
    for x, y in _rows(loader, with_targets):
        if latents is None:
            latents = PosteriorDraws(posterior, num_samples, (x,))
            device = next(iter(latents.example.values())).device
        x, y = x.to(device), None if y is None else y.to(device)
        try:
            prediction, unmasked = _predict(runs, model, latents, x, y, interval, draws)
        except Exception as error:
            found = explain(error, model, (x,), {})
            if found is error:
                raise
            raise found from error
        yield prediction, y, unmasked


def _rows(loader: Iterable[Any], with_targets: bool) -> Iterator[tuple[Tensor, Tensor | None]]:
    single = "[(x, y)]" if with_targets else "[x]"
    if isinstance(loader, (Tensor, Mapping, str)) or not isinstance(loader, Iterable):
        raise TypeError(
            f"the loader must yield minibatches, but this is a {type(loader).__name__}. Cure: a "
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
        for part in parts[: 1 + with_targets]:
            if not isinstance(part, Tensor):
                raise TypeError(
                    f"the loader gives a {type(part).__name__}, not a tensor. Cure: "
                    "torch.as_tensor of it, or a DataLoader, which converts arrays"
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
    runner, name, site = _target_runner(model, latents.example, x)
    fn = site["fn"]
    is_label = isinstance(without_mask(fn), (dist.Categorical, dist.Bernoulli))
    mean = LabelMean(None, draws) if is_label else NumberMean(interval, draws)
    target = None if y is None else fitting_target(y, fn)
    if target is not None:
        refuse_unfit_targets(name, site, target)

    def read(trace: Trace) -> dict[str, Tensor]:
        return mean.read(trace.nodes[name]["fn"], target)

    for values in latents.chunks(_draws_at_once(x, latents.draw_size)):
        known = {key: value for key, value in values.items() if key in runner.replayed}
        mean.add(runs.map(runner, known, read))
    return mean.prediction(), unmasked_elements(site)


Draws = dict[str, Tensor]


class PosteriorDraws:
    """Posterior draws that repeat in each pass, with only a few in memory at a time.

    Draws of a guide are repeated from one seed, or kept in memory if they are small; stored draws
    are thinned evenly.

    **Example:**

    >>> members = {"weight": torch.arange(5.0).reshape(5, 1)}
    >>> draws = PosteriorDraws(members, 4, ())
    >>> [part["weight"].flatten().tolist() for part in draws.chunks(3)]
    [[0.0, 1.0, 3.0], [4.0]]

    :param posterior: a guide, draws by site ``(num_draws, *site_shape)``, or what has
        ``get_samples``: an ``MCMC`` and what :func:`~pyro_implicit.refine` returns.
    :param num_samples: number of draws; fewer if fewer are stored.
    :param args: arguments of the guide.
    :raises TypeError: for anything else.
    :raises ValueError: for an autoguide that was never called.
    """

    def __init__(self, posterior: Any, num_samples: int, args: tuple) -> None:
        refuse_counts(num_samples=num_samples)
        if isinstance(posterior, StoredDraws):
            posterior = posterior.samples
        is_streamed = hasattr(posterior, "stream")  # possibly from files
        if hasattr(posterior, "get_samples") and not is_streamed:
            posterior = posterior.get_samples()
        self._take: Callable[[Tensor], Draws] | None = None
        stored = num_samples
        if is_streamed:
            stored = posterior.num_chains * posterior.num_draws
            self._take = posterior.take
        elif isinstance(posterior, Mapping):
            stored = len(StoredDraws(posterior).samples[next(iter(posterior))])
            self._take = partial(_rows_of, posterior)
        elif not callable(posterior):
            raise TypeError(
                "a posterior must be a guide, a dict of draws by site, or what fit, refine or MCMC "
                f"made, but got {type(posterior).__name__}"
            )
        if isinstance(posterior, AutoGuide) and posterior.prototype_trace is None:
            raise ValueError(
                f"the guide {type(posterior).__name__} was never called, and would take the "
                "targets for latents. Cure: train it first; if all of its parts are trained, call "
                "it once, guide(x, y)"
            )
        self.num_samples = min(num_samples, stored)
        rows = torch.linspace(0, stored - 1, self.num_samples, device="cpu")  # index any device
        self._rows = rows.round().long()
        self._guide, self._args = posterior, args
        self._seed = int(torch.randint(2**31, ()))
        first = next(self._made())
        #: One draw, by site.
        self.example = {name: value[0] for name, value in first.items()}
        if self._take is None and self.num_samples * self.draw_size <= MAX_ENTRIES:
            parts = list(self._made())
            kept = {name: torch.cat([part[name] for part in parts]) for name in first}
            self._take = partial(_rows_of, kept)

    @property
    def draw_size(self) -> int:
        """Number of entries of one draw."""
        return sum(value.numel() for value in self.example.values())

    @torch.no_grad()
    def chunks(self, size: int) -> Iterator[Draws]:
        """Yield all draws by site, ``(n, *site_shape)`` with at most ``size`` draws at a time."""
        if self._take is not None:
            yield from map(self._take, self._rows.split(size))
            return
        for made in self._made():
            number = len(next(iter(made.values())))
            for rows in torch.arange(number, device="cpu").split(size):
                yield _rows_of(made, rows)

    def _made(self) -> Iterator[Draws]:
        """Yield a few draws at a time, the same in each pass."""
        for index, rows in enumerate(self._rows.split(DRAWS_AT_ONCE)):
            if self._take is not None:
                yield self._take(rows)
                continue
            with seeded(self._seed + index):
                found = draw(self._guide, len(rows), *self._args)
            yield found


def _rows_of(draws: Mapping[str, Tensor], rows: Tensor) -> Draws:
    return {name: value[rows] for name, value in draws.items()}


class FunctionValues:
    """A network's predictions at given inputs, as a function of draws of its weights.

    Single weights have no meaning: hidden units are exchangeable, and many weights represent one
    function. Guides and chains should therefore be compared by their predictions. Pass an instance
    as ``quantities`` to :func:`~pyro_implicit.compare`, :func:`~pyro_implicit.diagnose` or
    :func:`~pyro_implicit.refine`.

    **Example:**

    >>> from torch import nn
    >>> from pyro_implicit.nn import regressor, to_bayesian_
    >>> model = regressor(to_bayesian_(nn.Linear(2, 1)), num_data=150, noise=0.1)
    >>> values = FunctionValues(model, torch.randn(5, 2))
    >>> values({"weight": torch.randn(7, 1, 2), "bias": torch.randn(7, 1)})["mean"].shape
    torch.Size([7, 5])

    :param model: model of :func:`~pyro_implicit.nn.classifier` or
        :func:`~pyro_implicit.nn.regressor`, or one of your own ``(x, y=None)``, as
        :func:`~pyro_implicit.nn.predict` takes it.
    :param x: inputs, ``(num_inputs, ...)``.
    :param max_inputs: most inputs; more are thinned evenly.
    """

    def __init__(self, model: Callable[..., Any], x: Tensor, max_inputs: int = 50) -> None:
        self.model, self.num_given = model, len(x)
        self.x = x[:: -(-len(x) // max_inputs)]
        self._runs = BatchedRuns("FunctionValues")

    @torch.no_grad()
    def __call__(self, draws: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute the predictions of each draw.

        :param draws: draws by site, ``(num_draws, *site_shape)``.
        :returns: for labels ``"probability"`` of all classes but the first, ``(num_draws,
            num_inputs, num_classes - 1)``; for numbers their ``"mean"``, ``(num_draws,
            num_inputs)`` or ``(num_draws, num_inputs, num_targets)``.
        """
        example = {name: value[0] for name, value in draws.items()}
        runner, site, _ = _target_runner(self.model, example, self.x)
        known = {name: value for name, value in draws.items() if name in runner.replayed}
        size = _draws_at_once(self.x, sum(value.numel() for value in example.values()))
        parts = []
        for start in range(0, len(next(iter(draws.values()))), size):
            some = {name: value[start : start + size] for name, value in known.items()}
            parts.append(self._runs.map(runner, some, lambda trace: _value(trace, site)))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def __str__(self) -> str:
        of_all = f" of {self.num_given}" if len(self.x) < self.num_given else ""
        return f"predictions at {len(self.x)}{of_all} inputs"


def _value(trace: Trace, site: str) -> dict[str, Tensor]:
    fn = trace.nodes[site]["fn"]
    if isinstance(without_mask(fn), dist.Categorical):
        return {"probability": without_mask(fn).probs[..., 1:]}
    return {"probability" if isinstance(without_mask(fn), dist.Bernoulli) else "mean": fn.mean}
