# SPDX-License-Identifier: Apache-2.0
"""A posterior of a hierarchical model: draws of the global variables, locals given each draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
from torch import Tensor

from pyro_implicit.density.groups import Groups
from pyro_implicit.guides.sampler import StoredDraw, StoredDraws
from pyro_implicit.runtime.global_state import same_streams

__all__ = ["AutoHierarchical"]


class AutoHierarchical:
    r"""Stored draws of the global latent variables, and :math:`q(z_i | x_i, \theta)` for groups.

    ``fit(..., amortize="conditional")`` makes one. For each draw :math:`\theta` the latent
    variables of each group are drawn from a Gaussian at their conditional mode, resampled by
    importance weights, and moved by HMC (:class:`~pyro_implicit.density.groups.Groups`). No group
    has parameters of its own, so groups of any minibatch can be drawn, also new ones; a group
    without data is drawn from its prior given :math:`\theta`. The guide has no density.

    **Example:**

    >>> import torch, pyro.distributions as dist
    >>> def model(x):
    ...     mean = pyro.sample("mean", dist.Normal(0.0, 10.0))
    ...     with pyro.plate("groups", 1_000, subsample_size=len(x)):
    ...         z = pyro.sample("z", dist.Normal(mean, 1.0))
    ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
    >>> guide = AutoHierarchical(model, StoredDraws({"mean": torch.randn(50)}))
    >>> {name: tuple(value.shape) for name, value in guide(torch.zeros(7)).items()}
    {'mean': (), 'z': (7,)}
    >>> guide.sample_posterior(20, torch.zeros(3))["z"].shape
    torch.Size([20, 3])
    >>> guide.sample_posterior(20).keys()  # without groups
    dict_keys(['mean'])

    :param model: a Pyro model, see :class:`~pyro_implicit.density.groups.Groups`.
    :param rest: draws of the global latent variables.
    :param num_moves: transitions of HMC for each group and draw after the resampling. Each costs
        four gradients of the group's log-density, and removes part of the remaining error.
    """

    def __init__(self, model: Callable[..., Any], rest: StoredDraws, num_moves: int = 2) -> None:
        self.rest, self.num_moves = rest, num_moves
        self._model: Callable[..., Any] | None = model
        self._groups: Groups | None = None

    def __repr__(self) -> str:
        return f"AutoHierarchical({self.rest})"

    def __getstate__(self) -> dict[str, Any]:
        """Return the draws; the model and its data are not saved."""
        return {**vars(self), "_model": None, "_groups": None}

    def attach(self, model: Callable[..., Any]) -> None:
        """Give a loaded guide its model."""
        self._model, self._groups = model, None

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draw all latent variables, with those of the groups in these arguments."""
        values = self.sample_posterior(1, *args, **kwargs)
        return {
            name: pyro.sample(name, StoredDraw(value[0], event_dim=value.dim() - 1))
            for name, value in values.items()
        }

    def sample_posterior(self, num_samples: int, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draw all latent variables, with those of the groups in these arguments.

        :param num_samples: the number of draws.
        :param args: positional arguments of the model; ``kwargs`` are keyword arguments. Without
            any, only the global latent variables are drawn.
        :returns: by site, ``(num_samples, *site_shape)``.
        :raises RuntimeError: for a loaded guide without its model.
        """
        values = self.rest.sample_posterior(num_samples)
        if not args and not kwargs:
            return values
        if self._model is None:
            raise RuntimeError(
                "this guide was loaded without its model, which the groups need. Cure: "
                "Fit.load(path, model)"
            )
        with same_streams():  # the runs that read the model draw nothing of the result
            if self._groups is None or kwargs:
                self._groups = Groups(self._model, args, kwargs=kwargs)
            groups = self._groups.on(args)
        return values | groups.draw(values, self.num_moves)
