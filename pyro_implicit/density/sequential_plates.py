# SPDX-License-Identifier: Apache-2.0
"""Latents in sequential plates, which Pyro's autoguides refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyro.poutine.messenger import Messenger

__all__ = ["without_sequential_plates"]


def without_sequential_plates(model: Callable[..., Any]) -> Callable[..., Any]:
    """The same model, whose sites do not tell of the sequential plates that they are in.

    A latent of ``for i in pyro.plate("rows", n)`` then is one by itself, as that of
    ``for i in range(n)``: the joint density is the same. Plates that subsample stay.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro.infer.autoguide import AutoNormal
    >>> def model():
    ...     for row in pyro.plate("rows", 2):
    ...         pyro.sample(f"x{row}", dist.Normal(0.0, 1.0))
    >>> sorted(AutoNormal(without_sequential_plates(model))())
    ['x0', 'x1']

    :param model: a Pyro model.
    """
    return _WithoutSequentialPlates()(model)


class _WithoutSequentialPlates(Messenger):
    def _pyro_sample(self, msg: Any) -> None:
        msg["cond_indep_stack"] = tuple(
            frame
            for frame in msg["cond_indep_stack"]
            if frame.vectorized or frame.size != frame.full_size
        )
