# SPDX-License-Identifier: Apache-2.0
"""The ELBO that suits a guide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyro import poutine
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoGuideList

from pyro_implicit.density.model import SubsampledError, refuse_subsampling
from pyro_implicit.guides import AutoAmortized, AutoEnsemble, AutoImplicit, AutoSemiImplicit
from pyro_implicit.guides.exactness import has_exact_density
from pyro_implicit.infer import KIVI_ELBO, LIVI_ELBO, ImplicitELBO, InjectiveELBO

__all__ = ["default_loss"]


def default_loss(
    guide: Callable[..., Any],
    num_particles: int,
    *args: Any,
    model_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Trace_ELBO:
    """The ELBO for a guide: by its kind, and Pyro's own for guides with a density.

    An :class:`AutoImplicit` gets the exact :class:`InjectiveELBO` if its generator is injective
    with as many values as noise, with coverage where the model sees all of its data. Of any other
    the exact density is unknown, and the formula would take folds for entropy: it gets
    :class:`KIVI_ELBO`, which asks of a generator that it can be drawn from and nothing else, and
    follows the moments of the guide exactly. So does an ``AutoGuideList`` with such a part. An
    ``AutoDelta``, whose draws are all the same, has one particle, and an :class:`AutoEnsemble` one
    for each member.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> type(default_loss(AutoSemiImplicit(model), 8)).__name__
    'LIVI_ELBO'
    >>> type(default_loss(AutoImplicit(model), 8)).__name__
    'KIVI_ELBO'

    :param guide: a guide; an :class:`AutoImplicit` that was never called is called once.
    :param num_particles: of the ELBO.
    :param args: of the model, as ``kwargs``.
    :param model_kwargs: more keyword arguments of the model: those with a name of ours.
    """
    if isinstance(guide, AutoSemiImplicit):
        return LIVI_ELBO(num_particles, nonfinite="skip")
    if isinstance(guide, AutoDelta):
        return ImplicitELBO(1, nonfinite="skip")
    if isinstance(guide, AutoEnsemble):
        return ImplicitELBO(guide.num_members, nonfinite="skip")
    if isinstance(guide, AutoGuideList):
        implicit = [part for part in guide if isinstance(part, AutoImplicit)]
        semi = all(isinstance(part, AutoSemiImplicit) for part in implicit)
        several = LIVI_ELBO if semi else KIVI_ELBO
        return (several if implicit else ImplicitELBO)(num_particles, nonfinite="skip")
    kwargs = {**kwargs, **(model_kwargs or {})}
    if isinstance(guide, AutoAmortized):
        if guide.prototype_trace is None:
            with poutine.block():
                guide(*args, **kwargs)
        kind = LIVI_ELBO if guide.is_semi_implicit else ImplicitELBO
        return kind(num_particles, nonfinite="skip")
    if not isinstance(guide, AutoImplicit):
        return ImplicitELBO(num_particles, nonfinite="skip")
    if guide.prototype_trace is None:
        with poutine.block():
            guide(*args, **kwargs)
    if has_exact_density(guide):
        coverage = 0.0 if _subsamples(guide.model, args, kwargs) else 1.0
        return InjectiveELBO(num_particles, coverage=coverage, nonfinite="skip")
    return KIVI_ELBO(num_particles, nonfinite="skip")


def _subsamples(model: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a model sees a part of its data at a time, which no coverage can be known from."""
    with poutine.block():
        trace = poutine.trace(model).get_trace(*args, **kwargs)
    try:
        refuse_subsampling(trace, "coverage")
    except SubsampledError:
        return True
    return False
