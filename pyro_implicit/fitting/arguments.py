# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of ``fit``."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Literal

import pyro
import torch
from pyro import poutine
from pyro.infer import ELBO, Trace_ELBO, TraceEnum_ELBO
from pyro.infer.autoguide import AutoGuide
from pyro.poutine.trace_struct import Trace
from torch import Tensor, distributed

from pyro_implicit.density.checks.observations import explain, refuse_unfit_data
from pyro_implicit.fitting.parameters import modules_of
from pyro_implicit.guides.posterior_draws import refuse_other_guide, refuse_swapped, trace_guide
from pyro_implicit.infer import ImplicitELBO
from pyro_implicit.nn.bayesian import has_priors
from pyro_implicit.nn.models import unfit_layers
from pyro_implicit.runtime.global_state import seeded
from pyro_implicit.runtime.messages import warn_user
from pyro_implicit.runtime.processes import num_processes
from pyro_implicit.runtime.sites import is_discrete_latent

__all__ = [
    "LOCAL_VALIDATION",
    "Amortize",
    "quiet_about_frozen",
    "refuse_amortizing",
    "refuse_length",
    "refuse_misplaced",
    "refuse_processes",
    "refuse_training_mode",
    "refuse_unfit_guide",
    "refuse_validation",
    "warn_of_stored_values",
]

LOCAL_VALIDATION = (
    "validation is the likelihood of rows given global latents, but latents of this model belong "
    "to single rows. Cure: leave validation out; ImplicitELBO(8).loss(model, result.guide, x) is "
    "the loss of held-out rows x, for instance to compare numbers of epochs"
)

Amortize = Literal["auto", "conditional"] | Mapping[str, Callable[..., Any]]


def refuse_misplaced(model: Any, guide: Any, loss: Any) -> None:
    """Check model, guide and loss.

    :raises TypeError: for a model that cannot be called, a class or data in place of a guide, or a
        loss that is no ELBO.
    :raises ValueError: for an unknown word in place of a guide, or a loss without a guide.
    """
    refuse_swapped("fit", model, guide)
    if not callable(model):
        raise TypeError(f"model must be a Pyro model, a callable, but got {type(model).__name__}")
    if isinstance(guide, str):
        if guide != "auto":
            raise ValueError(f'guide must be "auto" or a guide, but got {guide!r}')
        if loss is not None:
            raise ValueError('loss is for a given guide; guide="auto" chooses its own')
    elif inspect.isclass(guide):
        raise TypeError(
            f"guide must be a guide, but got the class {guide.__name__}. Cure: "
            f"fit(model, {guide.__name__}(model), ...)"
        )
    elif not callable(guide):
        raise TypeError(
            f'guide must be "auto" or a guide, but got {_article(type(guide).__name__)}: the '
            "model's arguments come after the guide. Cure: "
            'fit(model, "auto", x, y) instead of fit(model, x, y)'
        )
    if loss is None or hasattr(loss, "differentiable_loss") and isinstance(loss, ELBO):
        return
    if isinstance(loss, ELBO):
        raise TypeError(
            f"loss is a {type(loss).__name__}, which has no differentiable_loss, as fit needs (it "
            "only has loss_and_grads). Cure: loss=ImplicitELBO(8), or LIVI_ELBO(8) for a "
            "semi-implicit guide; or pyro.infer.SVI with this loss in place of fit"
        )
    wanted = f"{loss.__name__}()" if inspect.isclass(loss) else "LIVI_ELBO(8)"
    raise TypeError(
        "loss must be an ELBO with a differentiable_loss, of this library or of Pyro, but got "
        f"{'the class ' + loss.__name__ if inspect.isclass(loss) else repr(loss)}. Cure: "
        f"loss={wanted}; if it is an argument of your model, model_kwargs={{'loss': ...}}"
    )


def refuse_unfit_guide(
    model: Callable[..., Any],
    guide: Any,
    args: tuple,
    kwargs: dict[str, Any],
    loss: Trace_ELBO | None = None,
) -> None:
    """Check that a guide samples the model's latent variables, and that the data have a density.

    :param model: a Pyro model with its ``args`` and ``kwargs``, including one minibatch.
    :param guide: any guide.
    :param loss: the user's own loss, which must sum over discrete latents that the guide lacks.
    :raises ValueError: naming the sites.
    :raises TypeError: for a guide that observes a site.
    """
    store = pyro.get_param_store()
    before = set(store.keys())
    try:
        _refuse_unfit_guide(model, guide, args, kwargs, loss)
    except Exception:
        for name in set(store.keys()) - before:  # a refused guide leaves no parameters
            del store[name]
        raise


def _refuse_unfit_guide(
    model: Callable[..., Any],
    guide: Any,
    args: tuple,
    kwargs: dict[str, Any],
    loss: Trace_ELBO | None,
) -> None:
    guide_trace = None
    try:
        guide_trace = trace_guide(guide, args, kwargs)
        with seeded(0), torch.no_grad(), poutine.block():
            model_trace = poutine.trace(model).get_trace(*args, **kwargs)
    except Exception as error:  # of guide or model, of any kind
        found = explain(error, model, args, kwargs)
        if found is not error:
            raise found from error
        if guide_trace is None:
            raise
        return  # the model fails at this draw of its prior; the training raises other errors
    refuse_other_guide(guide, model_trace, guide_trace)
    if isinstance(loss, (Trace_ELBO, TraceEnum_ELBO)) and not isinstance(loss, ImplicitELBO):
        _refuse_missing_sum(loss, model_trace, guide_trace)
    refuse_unfit_data(model_trace)


def _refuse_missing_sum(loss: ELBO, model_trace: Trace, guide_trace: Trace) -> None:
    """Check that Pyro's ``loss`` sums over the discrete latents that the guide lacks."""
    for name, site in model_trace.nodes.items():
        if not is_discrete_latent(site) or name in guide_trace:
            continue
        fault, cure = "which the guide lacks", ""
        if isinstance(loss, TraceEnum_ELBO):
            if site["infer"].get("enumerate") == "parallel":
                continue
            fault, cure = "which the model does not mark", "fit(config_enumerate(model), ...), or "
        raise ValueError(
            f"{type(loss).__name__} does not sum over the discrete latent '{name}', {fault}. "
            f"Cure: {cure}loss=ImplicitELBO(8), or LIVI_ELBO(8) for a semi-implicit guide"
        )


def refuse_amortizing(guide: Any, refine: Any) -> None:
    """Check that ``amortize`` comes without a guide and without chains.

    :raises ValueError: otherwise.
    """
    if not isinstance(guide, str):
        raise ValueError(
            "amortize= builds its own guide, but a guide was given. Cure: guide='auto', or no "
            "amortize="
        )
    if refine is True:
        raise ValueError(
            "refine moves draws of all latents, but with amortize= some latents belong to the rows "
            "of one minibatch. Cure: refine=False"
        )


def refuse_processes(batch: tuple, refine: bool) -> None:
    """Check that several processes have different minibatches and no chains.

    :param batch: the first minibatch.
    :param refine: whether chains follow.
    :raises ValueError: otherwise.
    """
    if num_processes() == 1:
        return
    if refine:
        raise ValueError(
            "chains run in a single process. Cure: fit with refine=False, then in one process "
            "refine_by_minibatches(model, result.guide, batches=all_rows)"
        )
    tensors = [part.double() for part in batch if isinstance(part, Tensor)]
    own = [(tuple(part.shape), part.sum().item(), part.square().sum().item()) for part in tensors]
    found: list[Any] = [None] * num_processes()
    distributed.all_gather_object(found, own)
    if own and all(one == own for one in found):
        raise ValueError(
            f"all {len(found)} processes have the same minibatches. Cure: a DataLoader with "
            "sampler=torch.utils.data.DistributedSampler(dataset), and a batch_size for each"
        )


def refuse_length(num_steps: int | None, epochs: int | None, batches: Any) -> None:
    """Check that a training with minibatches is given in epochs, and others in steps.

    :raises ValueError: otherwise.
    """
    if batches is not None and num_steps is not None:
        raise ValueError(
            "num_steps is the length of a training without batches. Cure: epochs, the number of "
            "passes over batches"
        )
    if batches is None and epochs is not None:
        raise ValueError(
            "epochs is the number of passes over batches, but there are none. Cure: num_steps, or "
            "batches=loader"
        )


def refuse_validation(
    validation: Any, batches: Any, amortize: Any, has_ensemble: bool = False
) -> None:
    """Check that ``validation`` comes with ``batches`` or an ensemble, and without ``amortize``.

    :raises ValueError: otherwise.
    """
    if validation is None:
        return
    if batches is None and not has_ensemble:
        raise ValueError(
            "validation is scored after each epoch, which needs batches. Cure: batches=loader"
        )
    if amortize is not None:
        raise ValueError(LOCAL_VALIDATION)


def refuse_training_mode(model: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """Check that no layer of a Bayesian network in a hand-written model is in training mode.

    Layers of networks without priors may be, such as those of an autoencoder, and so may layers
    that only the guide runs.

    :param model: a Pyro model with its ``args`` and ``kwargs``, including one minibatch.
    :raises ValueError: for batch normalisation or dropout in training mode, naming the layer.
    """
    faults: list[ValueError] = []

    def note(fault: ValueError, *_: Any) -> None:
        faults.append(fault)
        raise fault  # before the layer changes its running moments

    networks = [module for _, module in modules_of(model) if has_priors(module)]
    layers = {layer: fault for net in networks for layer, fault in unfit_layers(net)}
    hooks = [
        layer.register_forward_pre_hook(partial(note, fault)) for layer, fault in layers.items()
    ]
    try:
        if hooks:  # errors of the model itself are raised when it is fitted
            with seeded(0), torch.no_grad(), poutine.block(), suppress(Exception):
                poutine.trace(model).get_trace(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    if faults:
        raise faults[0].with_traceback(None)


@contextmanager
def quiet_about_frozen() -> Iterator[None]:
    """Silence Pyro's warning of frozen parameters, which it repeats at each run of a model."""
    with warnings.catch_warnings():
        message = ".* was not registered in the param store because requires_grad=False"
        warnings.filterwarnings("ignore", message)
        yield


def warn_of_stored_values(guide: Any) -> None:
    """Warn if a new guide would start from the parameters of another guide of the same class."""
    if not isinstance(guide, AutoGuide) or guide.prototype_trace is not None:
        return
    stored = [
        name for name in pyro.get_param_store().keys() if name.startswith(f"{guide._pyro_name}.")
    ]
    if stored:
        warn_user(
            f"Pyro's parameter store has values for this new {type(guide).__name__} ('{stored[0]}' "
            f"and {len(stored) - 1} more) from another guide, or loaded ones. Training starts from "
            "them and changes the other guide, too. Cure: pyro.clear_param_store() first; if this "
            "is intended, call the guide once, guide(x, y)"
        )


def _article(word: str) -> str:
    return f"{'an' if word[0].lower() in 'aeiou' else 'a'} {word}"
