# SPDX-License-Identifier: Apache-2.0
"""A model's log-density as a function of its unconstrained latents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.distributions.util import sum_rightmost
from pyro.infer.autoguide import AutoContinuous, init_to_median, init_to_sample
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.poutine.trace_struct import Trace
from torch import Tensor
from torch.distributions import biject_to

from pyro_implicit.density.blame import refuse_unfit_sites, warn_of_missing_data
from pyro_implicit.density.engine import BatchedRuns, Model, compute_log_prob, refuse_subsampling
from pyro_implicit.density.flat_priors import FlatPriorStart, example_tensor

__all__ = ["LatentDensity"]

MAX_RETRIES = 10


class LatentDensity:
    r"""The unnormalised log-density that a model gives to its latents, in unconstrained space.

    With u the latents' unconstrained coordinates and :math:`\theta(u)` their values,

    .. math:: \log p(x, \theta(u)) + \log |\det \theta'(u)|.

    All sites lie in one vector, in the order in which the model samples them, as in Pyro's
    :class:`~pyro.infer.autoguide.AutoContinuous`. Many vectors are evaluated at once, by
    ``torch.func.vmap``, or one after the other if the model refuses it.

    **Example:**

    >>> import pyro.distributions as dist
    >>> def model():
    ...     pyro.sample("x", dist.LogNormal(0.0, 1.0))
    >>> density = LatentDensity(model)
    >>> density.log_prob(torch.zeros(3, 1))
    tensor([-0.9189, -0.9189, -0.9189])

    :param model: of continuous latents and fixed structure, with all its data: nothing subsampled.
    :param args: the model's, as ``kwargs``.
    :param init_loc_fn: where ``init_loc`` lies, see Pyro's :ref:`autoguide-initialization`; flat
        priors that it cannot start begin at 0. Where the model raises an error there, ``init_loc``
        is a draw of the prior.
    :param model_kwargs: more keyword arguments of the model, whatever their names.
    :raises SubsampledError: for a subsampled plate.
    :raises ValueError: for a discrete latent, or an observation that is NaN.
    :raises RuntimeError: for a model without latents.
    :warns UserWarning: for latents without a density (``obs_mask``), and where observations seem to
        be missing.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *args: Any,
        init_loc_fn: Callable[[dict[str, Any]], Tensor] = init_to_median,
        model_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs = {**kwargs, **(model_kwargs or {})}
        self.model, self.args, self.kwargs = model, args, kwargs
        self._like = example_tensor(model, args, kwargs)
        prototype, trace = self._prototype(init_loc_fn)
        self._check_data(trace)
        refuse_unfit_sites(trace)
        warn_of_missing_data(model, trace, args, kwargs)
        self.shapes: dict[str, torch.Size] = dict(prototype._unconstrained_shapes)
        self.latent_dim: int = prototype.latent_dim
        self.init_loc: Tensor = prototype._init_loc()
        nodes = prototype.prototype_trace.nodes
        self._transforms = {name: biject_to(nodes[name]["fn"].support) for name in self.shapes}
        latents = Trace()
        for name in self.shapes:
            latents.add_node(name, **nodes[name])
        self._model = Model(model, args, kwargs, latents)
        self._runs = BatchedRuns(type(self).__name__)

    def _prototype(
        self, init_loc_fn: Callable[[dict[str, Any]], Tensor]
    ) -> tuple[AutoContinuous, Trace]:
        """Pyro's view of the latents, and the trace with the data, which that leaves out.

        A model that raises an error at its start is given others: it may be an unlucky one.
        """
        first_error = None
        for init in (init_loc_fn, *(init_to_sample,) * MAX_RETRIES):
            traced = poutine.trace(self.model)
            start = FlatPriorStart(init, like=self._like)
            prototype = AutoContinuous(traced, init_loc_fn=start)
            try:
                with poutine.block():
                    prototype._setup_prototype(*self.args, **self.kwargs)
            except Exception as error:
                if "_RETURN" in traced.trace.nodes:  # the model ran: its sites are to blame
                    refuse_unfit_sites(traced.trace)
                    raise
                first_error = first_error or error
                continue
            return prototype, traced.trace
        assert first_error is not None
        raise first_error

    def _check_data(self, trace: Trace) -> None:
        refuse_subsampling(trace, "the log-density")

    @property
    def is_vectorized(self) -> bool:
        """Whether ``torch.func.vmap`` gives the model's log-density, as tried at ``init_loc``."""
        if not self._runs.checked:
            with torch.no_grad():
                self.log_prob(self.init_loc.unsqueeze(0))
        return self._runs.mode == "vmap"

    def constrain(self, latent: Tensor) -> dict[str, Tensor]:
        """Values of all sites.

        :param latent: ``(*batch, latent_dim)``.
        :returns: by site, ``(*batch, *site_shape)``.
        """
        return {name: self._transforms[name](part) for name, part in self._split(latent)}

    def unconstrain(self, draws: dict[str, Tensor]) -> Tensor:
        """The vectors of draws.

        :param draws: by site, ``(num_draws, *site_shape)``; further sites are left out.
        :returns: ``(num_draws, latent_dim)``.
        """
        parts = [self._transforms[name].inv(draws[name]) for name in self.shapes]
        return torch.cat([part.reshape(len(part), -1) for part in parts], dim=-1)

    def sample_prior(self, num_draws: int) -> Tensor:
        """Draws of the prior; of flat priors, uniformly between -2 and 2 in unconstrained space.

        Draws at which the model raises an error are left out.

        :returns: ``(num_draws, latent_dim)``, or fewer rows.
        :raises ValueError: if all were left out, with the last of the errors.
        """
        init = FlatPriorStart(init_to_sample, spread=2.0, like=self._like)
        draws: list[Tensor] = []
        error = None
        for _ in range(num_draws):
            try:
                with poutine.block(), InitMessenger(init):
                    trace = poutine.trace(self.model).get_trace(*self.args, **self.kwargs)
            except Exception as caught:  # the model's own, of any kind
                error = caught
                continue
            values = {
                name: trace.nodes[name]["value"].detach().unsqueeze(0) for name in self.shapes
            }
            draws.append(self.unconstrain(values))
        if num_draws and not draws:
            raise ValueError(
                f"the model raises an error at each of {num_draws} draws of its prior, the last of "
                f"them {type(error).__name__}: {str(error).splitlines()[0]}"
            ) from error
        return torch.cat([self.init_loc.new_empty(0, self.latent_dim), *draws])

    def trace_at(self, latent: Tensor) -> Trace:
        """The trace of one plain run of the model at a vector, without Pyro's checks.

        :param latent: ``(latent_dim,)``.
        """
        with poutine.block(), pyro.validation_enabled(False):
            trace = self._model.run(self.constrain(latent))
        self._model.share_minibatch(trace)
        return trace

    def log_prob(self, latent: Tensor) -> Tensor:
        """The log-density, differentiable.

        :param latent: ``(num_draws, latent_dim)``.
        :returns: ``(num_draws,)``.
        """
        values: dict[str, Tensor] = {}
        log_det: Any = 0.0
        for name, part in self._split(latent):
            transform = self._transforms[name]
            values[name] = transform(part)
            term = transform.log_abs_det_jacobian(part, values[name])
            log_det = log_det + sum_rightmost(term, term.dim() - 1)
        with poutine.block(), pyro.validation_enabled(False):
            return self._runs.map(self._model, values, _total) + log_det

    def score(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """The log-density and its gradient, constants.

        :param latent: ``(num_draws, latent_dim)``.
        :returns: ``(num_draws,)`` and ``(num_draws, latent_dim)``.
        """
        with torch.enable_grad():
            latent = latent.detach().requires_grad_()
            log_prob = self.log_prob(latent)
            (score,) = torch.autograd.grad(log_prob.sum(), latent)
        return log_prob.detach(), score

    def hessian(self, latent: Tensor) -> Tensor:
        """The second derivative of the log-density, constant.

        :param latent: ``(num_draws, latent_dim)``.
        :returns: ``(num_draws, latent_dim, latent_dim)``.
        """
        with torch.enable_grad():
            latent = latent.detach().requires_grad_()
            total = self.log_prob(latent).sum()
            (score,) = torch.autograd.grad(total, latent, create_graph=True)
            rows = [
                torch.autograd.grad(column.sum(), latent, retain_graph=True)[0]
                for column in score.unbind(-1)
            ]
        return torch.stack(rows, dim=-2)

    def _split(self, latent: Tensor) -> list[tuple[str, Tensor]]:
        """The part of each site, ``(*batch, *unconstrained_shape)``."""
        sizes = [shape.numel() for shape in self.shapes.values()]
        parts = latent.split(sizes, dim=-1)
        return [
            (name, part.reshape(part.shape[:-1] + shape))
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        ]


def _total(trace: Trace) -> Tensor:
    compute_log_prob(trace)
    return torch.as_tensor(trace.log_prob_sum())
