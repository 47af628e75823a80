# SPDX-License-Identifier: Apache-2.0
"""Initial values and noise space of a guide for Pyro's NUTS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.infer.reparam import NeuTraReparam
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import biject_to

from pyro_implicit.generators import as_generator
from pyro_implicit.guides import AutoImplicit
from pyro_implicit.guides.auto_implicit import why_inexact
from pyro_implicit.guides.posterior_draws import draw, refuse_swapped, trace_guide
from pyro_implicit.runtime.global_state import in_turn, with_seed
from pyro_implicit.runtime.messages import refuse_counts, warn_user

__all__ = ["NoiseSpaceReparam", "count_folds", "warm_start", "warn_of_folds"]


@in_turn
@with_seed
@torch.no_grad()
def warm_start(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    num_chains: int,
    *args: Any,
    seed: int | None = None,
    model_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, Tensor]:
    """Return one independent draw of the guide for each chain, for ``MCMC``.

    The draws are unconstrained and have the layout of ``MCMC(kernel, initial_params=...,
    num_chains=num_chains)``. Chains then start in the bulk of the guide, as dispersed as the guide.

    Pyro expects a leading dimension for the chains only if there are several. So for one chain the
    values have the site's own unconstrained shape. Discrete sites are left out, because NUTS sums
    over them.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro.infer.autoguide import AutoNormal
    >>> def model():
    ...     pyro.sample("scale", dist.LogNormal(0.0, 1.0).expand([3]).to_event(1))
    >>> warm_start(model, AutoNormal(model), 4, seed=0)["scale"].shape
    torch.Size([4, 3])

    :param model: the model that NUTS runs.
    :param guide: a fitted guide.
    :param num_chains: the same number as for :class:`~pyro.infer.mcmc.api.MCMC`.
    :param args: arguments of model and guide.
    :param seed: the seed of all random numbers of this call. The caller's random streams do not
        advance; without a seed they are used.
    :param model_kwargs: keyword arguments of model and guide whose names this function has too.
    :param kwargs: further keyword arguments of model and guide.
    :returns: unconstrained values by site, ``(num_chains, *shape)`` for several chains and
        ``shape`` for one.
    :raises TypeError: for a guide in place of the model.
    :raises ValueError: if the guide lacks a latent site of the model, or a draw lies on the
        boundary of its support.
    """
    refuse_swapped("warm_start", model, guide)
    refuse_counts(num_chains=num_chains)
    kwargs = {**kwargs, **(model_kwargs or {})}
    draws = draw(guide, num_chains, *args, **kwargs)
    initial_params = {}
    for name, support in _supports(model, guide, args, kwargs).items():
        if name not in draws:
            raise ValueError(
                f"the guide has no site {name!r}, which the model samples: NUTS needs an initial "
                "value for every latent. Cure: add the site to the guide"
            )
        value = biject_to(support).inv(draws[name])
        if not value.isfinite().all():
            raise ValueError(
                f"site {name!r}: a draw of the guide lies on the boundary of its support, or is "
                "not finite. Cure: draw again, or check that the fit converged"
            )
        initial_params[name] = value.clone() if num_chains > 1 else value[0].clone()
    return initial_params


def _supports(
    model: Callable[..., Any], guide: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> dict[str, Any]:
    # At a draw of the guide, because flat priors have no draws.
    replayed = poutine.replay(model, trace=trace_guide(guide, args, kwargs))
    with poutine.block():
        trace: Any = poutine.trace(replayed).get_trace(*args, **kwargs)
    return {
        name: site["fn"].support
        for name, site in trace.iter_stochastic_nodes()
        if not site_is_subsample(site) and not site["fn"].has_enumerate_support
    }


class NoiseSpaceReparam(NeuTraReparam):
    r"""Reparameterise a model by the noise of a fitted guide, for NUTS.

    This is Pyro's :class:`~pyro.infer.reparam.neutra.NeuTraReparam` for an
    :class:`~pyro_implicit.AutoImplicit` with an injective generator instead of a normalising flow.

    For latents :math:`\theta = f(z)`, the generator's values in the guide's frame, the density over
    the noise is

    .. math:: \log p(x, f(z)) + \log |\det J_f(z)|.

    If the guide were the posterior, this would be the standard normal, the easiest density. Where
    the guide follows the posterior's funnels and bends, NUTS no longer meets them. NUTS corrects
    the errors of the guide: a guide that fits badly costs time, but the draws remain exact. In the
    far tails, where the guide was never trained, the original geometry may remain. If NUTS diverges
    there, raise its ``target_accept_prob``.

    Train the guide first, preferably by :class:`~pyro_implicit.infer.InjectiveELBO`; NUTS does not
    change it. ``guide.requires_grad_(False)`` saves about a sixth of NUTS's time.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro.infer import MCMC, NUTS, SVI
    >>> from pyro_implicit import AutoImplicit, InjectiveELBO, ResidualGenerator
    >>> def model():
    ...     scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    ...     pyro.sample("x", dist.Normal(0.0, scale))
    >>> guide = AutoImplicit(model, lambda size: ResidualGenerator(size, core_dim=size))
    >>> svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), InjectiveELBO(8))
    >>> losses = [svi.step() for _ in range(3)]  # better 3,000
    >>> reparam = NoiseSpaceReparam(guide)
    >>> nuts = NUTS(reparam.reparam(model))
    >>> mcmc = MCMC(nuts, num_samples=5, warmup_steps=5, disable_progbar=True)
    >>> mcmc.run()
    >>> samples = reparam.transform_sample(mcmc.get_samples()["scale_shared_latent"])
    >>> sorted(samples), samples["scale"].shape
    (['scale', 'x'], torch.Size([5]))

    :param guide: a trained guide whose generator has as many noise dimensions as the model has
        latents, and is injective, such as
        :class:`~pyro_implicit.AutoregressiveGenerator`, :class:`~pyro_implicit.ResidualGenerator`
        or :class:`~pyro_implicit.GatedResidualGenerator`.
    :raises TypeError: if the guide is of another kind.
    :raises ValueError: if the guide was never called, or has no exact density.

    **References:**

    1. Hoffman, Sountsov, Dillon, Langmore, Tran and Vasudevan (2019), *NeuTra-lizing Bad Geometry
       in Hamiltonian Monte Carlo Using Neural Transport*.
    """

    guide: AutoImplicit

    def __init__(self, guide: AutoImplicit) -> None:
        if not isinstance(guide, AutoImplicit):
            raise TypeError(
                f"NoiseSpaceReparam needs an AutoImplicit guide, but got {type(guide).__name__}. "
                "Cure: for Pyro's own autoguides use pyro.infer.reparam.NeuTraReparam"
            )
        if guide.prototype_trace is None:
            raise ValueError(
                "NoiseSpaceReparam needs a trained guide, but this one was never called, so it has "
                "no parameters yet. Cure: train it first, by SVI(model, guide, ..., "
                "InjectiveELBO())"
            )
        if reason := why_inexact(guide):
            raise ValueError(f"NoiseSpaceReparam cannot use this guide: {reason}")
        super().__init__(guide)

    def apply(self, msg: Any) -> Any:
        """Compute a site from the noise, by the guide's unconstrained coordinates.

        Those of a guide of ``fit`` may differ from Pyro's.

        :param msg: Pyro's message of the site.
        """
        known = self.guide.prototype_trace.nodes.get(msg["name"])
        if known is None or msg["is_observed"]:
            return super().apply(msg)
        return super().apply({**msg, "fn": _InCoordinates(msg["fn"], known["fn"].support)})

    @torch.no_grad()
    def transform_sample(self, latent: Tensor) -> dict[str, Tensor]:
        """Map noise drawn by NUTS to the model's latents.

        Warns if the determinant of the generator's Jacobian has both signs among the draws: then
        the generator folds the noise, and posterior mass in the fold counts more than once.

        :param latent: noise ``(*batch, noise_dim)``: the samples of the site
            ``"{name}_shared_latent"``, where name is that of the model's first latent.
        :returns: constrained values by site, each ``(*batch, *site_shape)``.
        """
        warn_of_folds(self.guide, latent.reshape(-1, latent.shape[-1]))
        batch = latent.shape[:-1]
        # Sites in plates need the draws to the left of all plates.
        depth = max((-frame.dim for frame in self.guide._prototype_frames.values()), default=0)
        vectors = self.guide.get_transform()(latent).reshape(batch + (1,) * depth + (-1,))
        return {
            site["name"]: biject_to(site["fn"].support)(free).reshape(batch + site["value"].shape)
            for site, free in self.guide._unpack_latent(vectors)
        }


class _InCoordinates:
    """A distribution whose values have the unconstrained coordinates of another support."""

    def __init__(self, fn: Any, support: Any) -> None:
        self.support, self.event_dim, self.log_prob = support, fn.event_dim, fn.log_prob


def warn_of_folds(guide: AutoImplicit, noise: Tensor) -> None:
    """Warn if the generator folds the noise ``(num_draws, noise_dim)``."""
    count = count_folds(guide, noise)
    if count:
        warn_user(
            f"the determinant of the generator's Jacobian has another sign at {count} of "
            f"{len(noise)} draws than at the rest: the generator is not injective there, and "
            "the draws around them are wrong. Cure: train the guide with a smaller learning "
            "rate, a smaller core_dim or a narrower network"
        )


@torch.no_grad()
def count_folds(guide: AutoImplicit, noise: Tensor) -> int:
    """Count the noise draws at which the Jacobian's determinant has the rarer sign.

    :param guide: a guide with as many noise dimensions as latents.
    :param noise: ``(num_draws, noise_dim)``.
    """
    generator = as_generator(guide.generator)
    # Jacobians of 32 MB at a time in float64.
    rows = max(1, 2**22 // noise.shape[-1] ** 2)
    signs = torch.cat([generator.linearise(part).slogdet()[0] for part in noise.split(rows)])
    return min(int((signs > 0).sum()), int((signs < 0).sum()))
