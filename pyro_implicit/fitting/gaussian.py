# SPDX-License-Identifier: Apache-2.0
"""A Gaussian as one of Pyro's guides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro.distributions.constraints as constraints
from pyro import poutine
from pyro.infer.autoguide import AutoMultivariateNormal, init_to_median
from pyro.nn import PyroParam
from torch import Tensor, nn

from pyro_implicit.density.initialisation import (
    FlatPriorStart,
    example_tensor,
    without_sequential_plates,
)
from pyro_implicit.guides.names import own_names

__all__ = ["gaussian_guide"]


def gaussian_guide(
    model: Callable[..., Any],
    loc: Tensor,
    scale_tril: Tensor,
    *args: Any,
    model_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> AutoMultivariateNormal:
    """Pyro's full-rank guide, started at a given Gaussian: for its own ELBOs.

    As the frame of another guide, give ``frame=Frame(loc, scale_tril=scale_tril)``.

    **Example:**

    >>> import pyro, torch
    >>> def model():
    ...     pyro.sample("x", pyro.distributions.LogNormal(torch.zeros(2), 1.0).to_event(1))
    >>> guide = gaussian_guide(model, torch.ones(2), torch.tensor([[1.0, 0.0], [2.0, 3.0]]))
    >>> guide.get_posterior().covariance_matrix
    tensor([[ 1.,  2.],
            [ 2., 13.]], grad_fn=<ExpandBackward0>)

    :param model: of which it is to be a guide.
    :param loc: in unconstrained space, ``(latent_dim,)``.
    :param scale_tril: ``(latent_dim, latent_dim)``.
    :param args: of the model, as ``kwargs``.
    :param model_kwargs: more keyword arguments of the model: those with a name of ours.
    """
    kwargs = {**kwargs, **(model_kwargs or {})}
    start = FlatPriorStart(init_to_median, like=example_tensor(model, args, kwargs))
    guide = own_names(AutoMultivariateNormal(without_sequential_plates(model), init_loc_fn=start))
    with poutine.block():
        guide._setup_prototype(*args, **kwargs)
    scale = scale_tril.diagonal()
    guide.loc = nn.Parameter(loc.clone())
    guide.scale = PyroParam(scale.clone(), constraints.positive)
    guide.scale_tril = PyroParam(scale_tril / scale.unsqueeze(-1), constraints.unit_lower_cholesky)
    return guide
