# SPDX-License-Identifier: Apache-2.0
"""Find the term of a loss that is not finite, before it ruins the parameters."""

from __future__ import annotations

from typing import Any

import torch
from pyro.poutine.trace_struct import Trace

from pyro_implicit.infer.engine.parameters import unconstrained

__all__ = ["NonFiniteError", "check_gradients", "nonfinite_terms", "refuse_nonfinite"]

_CURE = (
    "Cure: a smaller learning rate or init_scale, gradient clipping (pyro.optim.ClippedAdam), "
    'float64, or nonfinite="skip" to leave such steps out'
)
_DATA_CURE = (
    "Cure: leave missing data out, or mask them: pyro.sample(name, fn.mask(~y.isnan()), "
    "obs=y.nan_to_num(1.0)); if no data are missing, a smaller learning rate, or "
    'nonfinite="skip" to leave such steps out'
)


class NonFiniteError(ArithmeticError):
    """A term of the loss, or a gradient, is nan or infinite."""


def nonfinite_terms(model_trace: Trace, guide_trace: Trace) -> str:
    """Which sample sites make a loss that is not finite."""
    terms = {
        f"the {label}'s log-probability of site '{name}'": site
        for label, trace in (("model", model_trace), ("guide", guide_trace))
        for name, site in trace.nodes.items()
        if site["type"] == "sample"
    }
    bad = []
    for term, site in terms.items():
        value = torch.as_tensor(site["log_prob_sum"])
        if not value.isfinite():
            hint = " for every particle, as it is if its observations contain NaN"
            bad.append(f"{term} is {value.item()}{hint * _lacks_data(site)}")
    return "; ".join(bad) or "the sum of all log-probabilities overflows"


def refuse_nonfinite(model_trace: Trace, guide_trace: Trace, elbo: str, step: int) -> None:
    """Say which sample sites make a loss that is not finite.

    :param elbo: name of the ELBO, for the message.
    :param step: number of the step, for the message.
    :raises NonFiniteError: always, naming the sites.
    """
    what = nonfinite_terms(model_trace, guide_trace)
    sites = [site for site in model_trace.nodes.values() if site["type"] == "sample"]
    cure = _DATA_CURE if any(map(_lacks_data, sites)) else _CURE
    raise NonFiniteError(f"{elbo}, step {step}: {what}. {cure}")


def _lacks_data(site: dict[str, Any]) -> bool:
    """Whether an observed site is nan in some element whatever the particle."""
    is_nan = torch.atleast_1d(torch.as_tensor(site["log_prob"])).isnan()
    return site["is_observed"] and bool(is_nan.all(0).any())


def check_gradients(params: Trace, elbo: str, step: int) -> None:
    """Check the gradients of all parameters in a trace of ``pyro.param`` sites.

    :param elbo: name of the ELBO, for the message.
    :param step: number of the step, for the message.
    :raises NonFiniteError: naming the parameters.
    """
    tensors = {name: unconstrained(site) for name, site in params.nodes.items()}
    gradients = {n: tensor.grad for n, tensor in tensors.items() if tensor.grad is not None}
    if not gradients:
        return
    if not torch.nn.utils.get_total_norm(list(gradients.values())).isfinite().item():
        bad = [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
        if bad:
            raise NonFiniteError(
                f"{elbo}, step {step}: the gradient of {', '.join(bad)} is not finite. {_CURE}"
            )
