# SPDX-License-Identifier: Apache-2.0
"""A model's log-density as one minibatch of its data estimates it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pyro.distributions import Unit
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_implicit.density.data_sites import is_data
from pyro_implicit.density.engine import Model, SubsampledError
from pyro_implicit.density.target import Target
from pyro_implicit.density.unfit_sites import refuse_missing_data

__all__ = ["MinibatchDensity"]


class MinibatchDensity(Target):
    r"""The same as :class:`Target`, of one minibatch at a time.

    With B of N rows, and the likelihood scaled by the model's own plate, it is

    .. math:: \log p(\theta(u)) + \frac NB \sum_{i \in \text{batch}} \log p(x_i | \theta(u))
        + \log |\det \theta'(u)|,

    whose mean over random batches is the log-density of all data.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model(y):
    ...     x = pyro.sample("x", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("rows", 100, subsample_size=len(y)):
    ...         pyro.sample("y", dist.Normal(x, 1.0), obs=y)
    >>> density = MinibatchDensity(model, batch=(torch.zeros(5),))
    >>> density.use((torch.ones(5),))
    >>> density.score(torch.zeros(1, 1))[1]
    tensor([[100.]])

    :param model: of continuous latents and fixed structure, which scales the minibatch that it is
        given, or that it draws, to all data.
    :param args: the model's first arguments, as ``kwargs``.
    :param batch: its further arguments, those of one minibatch.
    :param allow_local: whether latents may belong to single rows, of which this is then the density
        of those in one minibatch.
    :raises SubsampledError: for a latent in a subsampled plate, unless these are allowed.

    See :class:`Target` for what else is refused.
    """

    _may_be_random = True

    def __init__(
        self,
        model: Callable[..., Any],
        *args: Any,
        batch: tuple,
        allow_local: bool = False,
        model_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.shared_args = args
        #: Plate, rows of the first minibatch, and rows in all, where a plate says so.
        self.subsampled: tuple[str, int, int] | None = None
        #: Whether the model seems to scale its minibatch.
        self.scaled = False
        self._draws_rows = False
        self._allow_local = allow_local
        self._seed = 0
        super().__init__(model, *args, *batch, model_kwargs=model_kwargs, **kwargs)
        self._latents = dict(self._model.replayed.nodes)

    def use(self, batch: tuple, seed: int | None = None) -> None:
        """Go over to another minibatch.

        :param batch: the arguments of the model that follow ``args``.
        :param seed: of the rows that a model draws itself.
        """
        self.args = (*self.shared_args, *batch)
        latents = Trace()  # without the subsampled indices of the minibatch before
        for name, site in self._latents.items():
            latents.add_node(name, **site)
        self._model = Model(self.model, self.args, self.kwargs, latents, self._model.discrete)
        if self._draws_rows:
            self._seed = int(torch.randint(2**31, ())) if seed is None else seed

    def refuse_missing_data(self, where: str) -> None:
        """Check that no observation of this minibatch is NaN.

        :param where: which minibatch it is.
        :raises ValueError: naming the site.
        """
        refuse_missing_data(self.trace_at(self.init_loc), f" in {where}")

    def log_prob(self, latent: Tensor) -> Tensor:
        """The log-density, differentiable; of the same rows until the next minibatch.

        :param latent: ``(num_draws, latent_dim)``.
        :returns: ``(num_draws,)``.
        """
        if not self._draws_rows:
            return super().log_prob(latent)
        outside = torch.get_rng_state()
        torch.default_generator.manual_seed(self._seed)  # of the CPU alone, where plates draw
        try:
            return super().log_prob(latent)
        finally:
            torch.set_rng_state(outside)

    def _check_data(self, trace: Trace) -> None:
        """No latent belongs to a row, and how many rows there are."""
        for name, site in trace.nodes.items():
            if site["type"] != "sample":
                continue
            if site_is_subsample(site):
                self._draws_rows = self._draws_rows or len(site["value"]) < site["fn"].size
                continue
            if not site["is_observed"]:
                if not self._allow_local:
                    _refuse_local(name, site)
                continue
            if not is_data(site):
                continue
            is_factor = isinstance(site["fn"], Unit)  # which scales as it likes
            scale = torch.as_tensor(site["scale"])
            self.scaled = self.scaled or is_factor or bool((scale != 1).any())
            for frame in site["cond_indep_stack"]:
                if frame.full_size is not None and frame.full_size != frame.size:
                    self.subsampled = (frame.name, frame.size, frame.full_size)


def _refuse_local(name: str, site: dict[str, Any]) -> None:
    for frame in site["cond_indep_stack"]:
        if frame.full_size is not None and frame.full_size != frame.size:
            raise SubsampledError(
                f"latent '{name}' lies in plate '{frame.name}', of which a minibatch has "
                f"{frame.size} of {frame.full_size} elements: the others could not move. Cure: "
                "fit(..., amortize='auto'), which trains an encoder of the rows; or sum the latent "
                "out of the model, or give all data at once"
            )
