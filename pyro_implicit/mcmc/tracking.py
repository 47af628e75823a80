# SPDX-License-Identifier: Apache-2.0
"""What chains are watched by: their latents, or functions of them that a user names."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_implicit.density.batched_runs import IMPOSSIBLE
from pyro_implicit.density.target import Target
from pyro_implicit.mcmc.stopping import Tracked, tracked
from pyro_implicit.runtime.user_warnings import warn_user

__all__ = ["Quantities", "Tracker"]

Quantities = Callable[[dict[str, Tensor]], Tensor | dict[str, Tensor]]


class Tracker:
    """The tracked quantities of latents ``(num_chains, d)`` and log-densities ``(num_chains,)``.

    **Example:**

    >>> import pyro, torch
    >>> import pyro.distributions as dist
    >>> density = Target(lambda: pyro.sample("x", dist.LogNormal(0.0, 1.0)))
    >>> Tracker(density, lambda draws: draws["x"].log())(torch.ones(2, 1), torch.zeros(2)).values
    tensor([[1., 0.],
            [1., 0.]])

    :param density: of the model.
    :param quantities: of constrained draws by site; by default the latents.
    """

    def __init__(self, density: Target, quantities: Quantities | None) -> None:
        self._density, self._quantities = density, quantities
        self._warned = False

    def __call__(self, latent: Tensor, log_density: Tensor) -> Tracked:
        if self._quantities is None:
            return tracked(list(latent.unbind(-1)), log_density)
        found = self._quantities(self._density.constrain(latent))
        _check_shapes(found, len(latent))
        result = tracked(pytree.tree_leaves(found), log_density)
        lost = ~result.values[:, :-1].isfinite().all(-1)
        if lost.any() and not self._warned:
            self._warned = True
            warn_user(
                f"the quantities are not finite in {int(lost.sum())} of {len(latent)} chains: "
                "whether they drift cannot be told, and the chains may go on until their budget "
                "ends. Cure: functions that are finite at all draws of the posterior"
            )
        return result

    def try_at(self, latent: Tensor) -> None:
        """Check the quantities' shapes, before the chains walk.

        :raises ValueError: for values that are not one of each chain.
        """
        if self._quantities is None:
            return
        found: Any = ()
        with suppress(*IMPOSSIBLE):  # of starts that are far from the posterior
            found = self._quantities(self._density.constrain(latent))
        _check_shapes(found, len(latent))


def _check_shapes(found: Any, num_chains: int) -> None:
    for path, value in pytree.tree_leaves_with_path(found):
        if isinstance(value, Tensor) and value.shape[:1] == (num_chains,):
            continue
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"quantities{pytree.keystr(path)} gave {shape} of {num_chains} chains. Cure: a "
            "function of draws by site, (num_chains, *site_shape), that gives one value for each "
            "chain, first: no mean over them"
        )
