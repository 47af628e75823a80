# SPDX-License-Identifier: Apache-2.0
"""A log-density that changes its minibatch in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyro_implicit.density.target import Target

__all__ = ["MinibatchDensity"]


class MinibatchDensity(Target):
    """:meth:`Target.of_minibatches`, changed in place by ``use``. To be replaced by ``on``."""

    def __init__(
        self,
        model: Callable[..., Any],
        *args: Any,
        batch: tuple,
        allow_local: bool = False,
        model_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs = {**kwargs, **(model_kwargs or {})}
        self._allow_local = allow_local
        super().__init__(model, *args, *batch, model_kwargs=kwargs)

    def use(self, batch: tuple, seed: int | None = None) -> None:
        """Change to another minibatch, as :meth:`Target.on` does."""
        vars(self).update(vars(self.on(batch, seed)))
