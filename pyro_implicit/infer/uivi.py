# SPDX-License-Identifier: Apache-2.0
"""Unbiased implicit variational inference."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from pyro.distributions.score_parts import ScoreParts
from torch import Tensor

from pyro_implicit.distributions import SemiImplicit
from pyro_implicit.infer.engine.implicit_sites import (
    FlatSite,
    ImplicitSite,
    check_generator,
    check_standard_normal,
    flatten_site,
    mixture_log_q,
    path_of_score,
)
from pyro_implicit.infer.engine.prior import SitePrior
from pyro_implicit.infer.implicit_elbo import ImplicitELBO
from pyro_implicit.infer.policy import ELBOS
from pyro_implicit.ops.ensemble_hmc import ChainState, ensemble_move, score_of
from pyro_implicit.ops.semi_implicit import conditional_log_density
from pyro_implicit.runtime.messages import refuse_counts

__all__ = ["UIVI_ELBO"]


class UIVI_ELBO(ImplicitELBO):
    r"""ELBO of semi-implicit guides with an unbiased gradient (UIVI).

    The score of a draw is that of its conditional, averaged over the noise that may have made it,

    .. math::
        \nabla_\theta \log q(\theta) = E_{q(z \mid \theta)}[\nabla_\theta \log q(\theta \mid z)],

    with draws from :math:`q(z \mid \theta) \propto q(\theta \mid z)\, p(z)` by Hamiltonian Monte
    Carlo, with one chain for each particle and element of a plate, started at the noise that made
    :math:`\theta`. The gradient of the entropy is this score, a constant, times the gradient of the
    path :math:`\theta`. It is unbiased once the chains no longer depend on their start. This takes
    longer if the widths of :math:`q(z \mid \theta)` differ between directions: raise ``num_burnin``
    and ``num_leapfrog`` for generators with large and small singular values.

    Only the gradient is unbiased. The reported value is the surrogate lower bound of
    :class:`SIVI_ELBO` with ``num_mixing`` fresh noises. Evaluate a fitted guide by
    :func:`evidence_bound`.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro.infer import SVI
    >>> from pyro_implicit import AutoSemiImplicit
    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> guide, elbo = AutoSemiImplicit(model, noise_scale=0.3), UIVI_ELBO(8)
    >>> svi = SVI(model, guide, pyro.optim.ClippedAdam({"lr": 1e-3}), elbo)
    >>> isinstance(svi.step(), float)
    True
    >>> list(elbo.acceptance)
    ['_AutoSemiImplicit_latent']

    :param num_particles: draws of the guide per step.
    :param num_burnin: transitions of each chain before the first draw is kept.
    :param num_samples: draws of each chain.
    :param num_leapfrog: leapfrog steps of each transition.
    :param target_accept: target of the mean acceptance probability. Each site has one step size,
        which adapts after each transition and over all steps; each chain uses between 0.5 and 1.5
        times this step size.
    :param num_mixing: fresh noises of the reported value.
    :param kwargs: see :class:`ImplicitELBO`.
    :raises ValueError: for arguments out of range; at the first step, for noise that is not
        standard normal or a generator whose rows depend on each other (batch normalisation in
        training mode, dropout).

    After each step, ``acceptance`` and ``step_sizes`` have, by site, the mean acceptance
    probability of the step's draws and the step size.

    **References:**

    1. Titsias and Ruiz (2019), *Unbiased Implicit Variational Inference*, eqs 8-11.
    """

    site_types = (SemiImplicit,)

    def __init__(
        self,
        num_particles: int = 8,
        num_burnin: int = 5,
        num_samples: int = 5,
        num_leapfrog: int = 5,
        target_accept: float = 0.9,
        num_mixing: int = 50,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_particles, **kwargs)
        refuse_counts(0, num_burnin=num_burnin)
        refuse_counts(num_samples=num_samples, num_leapfrog=num_leapfrog, num_mixing=num_mixing)
        if not 0 < target_accept < 1:
            raise ValueError(f"target_accept must lie between 0 and 1, but got {target_accept}")
        self.num_burnin = num_burnin
        self.num_samples = num_samples
        self.num_leapfrog = num_leapfrog
        self.target_accept = target_accept
        self.num_mixing = num_mixing

    def check_site(self, site: ImplicitSite) -> None:
        """Refuse noise that is not standard normal, and rows that depend on each other."""
        check_standard_normal(site, "UIVI")
        check_generator(site)

    @property
    def acceptance(self) -> dict[str, float]:
        """By site, the mean acceptance probability of the last step's draws."""
        return {name: float(chain.acceptance) for name, chain in self.remembered("chain").items()}

    @property
    def step_sizes(self) -> dict[str, float]:
        """By site, the step size."""
        return {name: float(chain.step_size) for name, chain in self.remembered("chain").items()}

    def score_parts(self, site: ImplicitSite, prior: SitePrior) -> ScoreParts:
        """Return the value of the mixture with the gradient of the path."""
        flat, is_trained = flatten_site(site, self.num_particles), torch.is_grad_enabled()
        with torch.no_grad():
            log_q = mixture_log_q(site, flat, self.num_mixing)
            if not is_trained:  # an evaluation needs no path, and the chains adapt their step size
                return ScoreParts(log_q, 0, log_q)
            score = self._score(site.name, flat)
        return path_of_score(log_q, flat, score)

    def _score(self, name: str, flat: FlatSite) -> Tensor:

        def log_density(noise: Tensor) -> Tensor:
            conditional = conditional_log_density(flat.value, generate(noise), flat.scale)
            return conditional - 0.5 * noise.square().sum(-1)

        def generate(noise: Tensor) -> Tensor:
            return flat.generate(noise.unsqueeze(0)).squeeze(0)

        start, like = ELBOS.initial_step_size, flat.noise
        step_size, total = self.remember(
            "chain", name, lambda: _Adaptation(like.new_tensor(start), like.new_zeros(()))
        )
        score_of_noise = score_of(log_density)
        state = ChainState(flat.noise.detach(), *score_of_noise(flat.noise))
        score = torch.zeros_like(flat.value)
        total = torch.zeros_like(total)
        for i in range(self.num_burnin + self.num_samples):
            # With a fixed length, trajectories return to their start in some directions of a
            # Gaussian.
            jitter = 0.5 + torch.rand_like(flat.noise[..., :1])
            move = ensemble_move(score_of_noise, state, step_size * jitter, self.num_leapfrog)
            state, acceptance = move.state, move.acceptance.mean()
            change = ELBOS.adaptation_rate * (acceptance - self.target_accept)
            step_size = step_size * change.exp()
            if i >= self.num_burnin:
                score += (generate(state.position) - flat.value) / flat.scale.square()
                total += acceptance
        self.state.memory["chain", name] = _Adaptation(step_size, total / self.num_samples)
        return score / self.num_samples


class _Adaptation(NamedTuple):
    """Step size and mean acceptance of the last draws, for the chains of one site."""

    step_size: Tensor
    acceptance: Tensor
