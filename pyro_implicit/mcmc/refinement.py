# SPDX-License-Identifier: Apache-2.0
"""From a guide to the posterior, by many short chains."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, overload

import pyro
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from tqdm import tqdm

from pyro_implicit.density.latent_density import LatentDensity
from pyro_implicit.guides import AutoImplicit, AutoMixture
from pyro_implicit.mcmc.chain_density import (
    ChainDensity,
    NoiseDensity,
    finite_starts,
    latent_draws,
)
from pyro_implicit.mcmc.chain_files import load_chains, save_chains
from pyro_implicit.mcmc.chains import Chains, History
from pyro_implicit.mcmc.chees import ChEES
from pyro_implicit.mcmc.frame import FrameKind, estimate_frame
from pyro_implicit.mcmc.minibatch_refined import MinibatchRefined
from pyro_implicit.mcmc.minibatch_refinement import refine_by_minibatches, refuse_hmc_options
from pyro_implicit.mcmc.refined import MODES, Refined
from pyro_implicit.mcmc.stopping import Tracked, tracked
from pyro_implicit.ops.ensemble_hmc import ChainState

__all__ = ["refine"]

Quantities = Callable[[dict[str, Tensor]], Tensor | dict[str, Tensor]]

FRAMES = ("auto", "diagonal", "low-rank", "full", "noise")
MAX_FULL_DIM = 100
LEAST_CHAINS = 8
WARMUP_SHARE = 0.4
LEAST_DRAWS = 12


@overload
def refine(
    model: Callable[..., Any],
    guide: Callable[..., Any] | Mapping[str, Tensor],
    *args: Any,
    batches: None = None,
    **kwargs: Any,
) -> Refined: ...


@overload
def refine(
    model: Callable[..., Any],
    guide: Callable[..., Any] | Mapping[str, Tensor],
    *args: Any,
    batches: Iterable[Any],
    **kwargs: Any,
) -> MinibatchRefined: ...


def refine(
    model: Callable[..., Any],
    guide: Callable[..., Any] | Mapping[str, Tensor],
    *args: Any,
    kernel: Literal["hmc", "sghmc", "sgld"] = "hmc",
    batches: Iterable[Any] | None = None,
    num_chains: int | None = None,
    frame: Literal["auto", "diagonal", "low-rank", "full", "noise"] = "auto",
    quantities: Quantities | None = None,
    max_gradients: int = 4000,
    max_seconds: float | None = None,
    max_leapfrogs: int = 64,
    max_draws: int = 100,
    seed: int | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 50,
    progress: bool = True,
    model_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Refined | MinibatchRefined:
    r"""Moves draws of a guide to the posterior, side by side.

    Each draw starts a chain of Hamiltonian Monte Carlo. All chains move at once, in one vectorised
    density, in a common frame in which posterior sds are near one. In the warm-up the frame is
    estimated anew from the chains, in windows that double, and
    :class:`~pyro_implicit.mcmc.ChEES` finds step size and trajectory length; it ends when the
    log-density no longer drifts. Then all is frozen, and the chains leave the posterior exactly as
    it is.

    They stop by themselves: once no mean and no standard deviation of a latent, in unconstrained
    space, nor of the log-density, drifts between the last two thirds of the draws by more than a
    twentieth of a standard deviation, two standard errors included, and each chain has forgotten
    where it began (:func:`~pyro_implicit.mcmc.stopping.drift`). Or at a budget; the result says
    which.

    Chains that start in separate modes stay there, so that each mode keeps the weight that the
    guide gave it. An :class:`~pyro_implicit.AutoMixture` of exact density has weights of its own
    (:func:`~pyro_implicit.fitting.mixture_weights`), which its draws follow. R-hat sees separate
    modes, so that such chains run until the budget ends.

    **Example:**

    >>> import pyro.distributions as dist
    >>> from pyro.infer.autoguide import AutoNormal
    >>> def model(y):
    ...     scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    ...     with pyro.plate("data", len(y)):
    ...         pyro.sample("y", dist.Normal(0.0, scale), obs=y)
    >>> y = torch.tensor([1.0, -2.0, 3.0])
    >>> guide = AutoNormal(model)  # better trained, but any will do
    >>> result = refine(model, guide, y, seed=0, progress=False)
    >>> result.stopped, f"{result.get_samples()['scale'].mean():.1f}"
    ('converged', '2.4')

    :param model: a Pyro model of continuous latents, with all its data: nothing subsampled, unless
        ``batches`` are given.
    :param guide: any guide of this model, trained or not, or draws: a dict of constrained values by
        site, ``(num_draws, *site_shape)``, such as particles or an ensemble. Fewer draws than
        chains are taken in turn.
    :param args: the arguments of model and guide.
    :param kernel: ``"hmc"``, or of minibatches ``"sghmc"`` or ``"sgld"``.
    :param batches: minibatches, a ``DataLoader`` for instance: all else is then done by
        :func:`~pyro_implicit.mcmc.refine_by_minibatches`, which has parameters of its own and
        returns a :class:`~pyro_implicit.mcmc.MinibatchRefined`.
    :param num_chains: at least 8; by default 256, and 8 of minibatches.
    :param frame: ``"full"`` for the covariance, ``"low-rank"`` for its significant principal axes
        on a diagonal, ``"diagonal"``, or ``"noise"`` to walk on the noise of an injective
        :class:`~pyro_implicit.AutoImplicit` instead of the latents, for funnels. By default noise
        where the guide allows it; the frame, of latents or noise, is full up to 100 dimensions and
        low-rank above.
    :param quantities: of a dict of constrained draws by site, ``(num_chains, *site_shape)``, a
        tensor or a dict of tensors ``(num_chains, *shape)``, for instance predictions. If given,
        these and the log-density decide when to stop, in place of the latents. All values of one
        tensor are of one unit, their root mean square sd.
    :param max_gradients: of each chain, warm-up included. It may be exceeded by one transition, and
        for twelve draws.
    :param max_seconds: of wall time. A run that it stops does not repeat to the last bit.
    :param max_leapfrogs: in one transition.
    :param max_draws: kept of each chain; longer chains are thinned.
    :param seed: by default the random streams are taken as they are.
    :param checkpoint: a file. A run that was killed goes on from there when it is called again with
        the same arguments, and ends with the same draws to the last bit.
    :param checkpoint_every: transitions between two writings.
    :param progress: whether to show a bar.
    :param model_kwargs: keyword arguments of model and guide whose names are also names here.
    :param kwargs: their other keyword arguments.
    :raises SubsampledError: for a model that subsamples its data.
    :raises ValueError: for a guide of another model, an unknown frame, too few chains, starts of
        which none has a finite log-density, or a checkpoint of other settings.

    **References:**

    1. Hoffman, Radul and Sountsov (2021), *An Adaptive-MCMC Scheme for Setting Trajectory Lengths
       in Hamiltonian Monte Carlo*.
    2. Margossian, Hoffman, Sountsov, Riou-Durand, Vehtari and Gelman (2022), *Nested R-hat:
       Assessing the Convergence of Markov Chain Monte Carlo When Running Many Short Chains*.
    """
    if kernel != "hmc" or batches is not None:
        refuse_hmc_options(locals())
        return refine_by_minibatches(
            model,
            guide,
            *args,
            batches=batches,
            kernel=kernel,
            num_chains=8 if num_chains is None else num_chains,
            max_seconds=max_seconds,
            max_draws=max_draws,
            seed=seed,
            checkpoint=checkpoint,
            checkpoint_every=checkpoint_every,
            progress=progress,
            model_kwargs=model_kwargs,
            **kwargs,
        )
    num_chains = 256 if num_chains is None else num_chains
    _check_arguments(num_chains, frame, max_gradients)
    kwargs = {**kwargs, **(model_kwargs or {})}
    if seed is not None:
        pyro.set_rng_seed(seed)
    density = _chain_density(LatentDensity(model, *args, **kwargs), guide, frame)
    latent_dim = density.density.latent_dim
    kind: FrameKind = "full" if latent_dim <= MAX_FULL_DIM else "low-rank"
    if frame not in ("auto", "noise"):
        kind = frame  # type: ignore[assignment]
    settings = {
        "latent_dim": latent_dim,
        "num_chains": num_chains,
        "frame": (kind, density.space),
        "max_gradients": max_gradients,
        "max_leapfrogs": max_leapfrogs,
        "max_draws": max_draws,
        "seed": seed,
    }
    file = None if checkpoint is None else Path(checkpoint)

    def track(latent: Tensor, log_density: Tensor) -> Tracked:
        if quantities is None:
            return tracked(list(latent.unbind(-1)), log_density)
        found = quantities(density.density.constrain(latent))
        return tracked(pytree.tree_leaves(found), log_density)

    began = time.perf_counter()
    if file is not None and file.exists():
        chains: Chains = load_chains(file, settings, density.density.init_loc.device)
    else:
        chains = _start(density, guide, args, kwargs, num_chains, kind, max_draws)
        chains.kernel.max_leapfrogs = max(1, min(max_leapfrogs, max_gradients // 40))
        chains.start(density)
    began -= chains.seconds
    with tqdm(total=max_gradients, desc="refine", disable=not progress) as bar:
        while chains.stopped is None:
            share = chains.gradients / max_gradients
            if max_seconds is not None:
                share = max(share, chains.seconds / max_seconds)
            chains.advance(density, track, hurry=share >= WARMUP_SHARE)
            chains.seconds = time.perf_counter() - began
            if chains.check():
                chains.stopped = "converged"
            elif chains.history.seen >= LEAST_DRAWS:
                if chains.gradients >= max_gradients:
                    chains.stopped = "max_gradients"
                elif max_seconds is not None and chains.seconds >= max_seconds:
                    chains.stopped = "max_seconds"
            if file is not None and (chains.stopped or chains.transitions % checkpoint_every == 0):
                save_chains(file, settings, chains)
            bar.update(min(chains.gradients, max_gradients) - bar.n)
            bar.set_postfix_str(f"{chains.phase}, step {chains.kernel.step_size:.2g}", False)
    return _result(density, guide, chains)


def _check_arguments(num_chains: int, frame: str, max_gradients: int) -> None:
    if num_chains < LEAST_CHAINS:
        raise ValueError(
            f"num_chains must be at least {LEAST_CHAINS}, but got {num_chains}: frame, step size "
            "and stopping rule are learnt by comparing chains. Cure: many chains cost little more "
            "than one; for one long chain take Pyro's NUTS"
        )
    if frame not in FRAMES:
        raise ValueError(f"frame must be one of {FRAMES}, but got {frame!r}")
    if max_gradients < 1:
        raise ValueError(f"max_gradients must be positive, but got {max_gradients}")


def _chain_density(density: LatentDensity, guide: Any, frame: str) -> ChainDensity:
    """Over noise where the guide allows it, or where it must."""
    if frame not in ("auto", "noise"):
        return ChainDensity(density)
    reason = f"it is a {type(guide).__name__}, and not an AutoImplicit"
    if isinstance(guide, AutoImplicit):
        with torch.no_grad():
            if guide.prototype_trace is None:
                guide(*density.args, **density.kwargs)
        try:
            guide.get_transform()
            return NoiseDensity(density, guide)
        except NotImplementedError as error:
            reason = str(error)
    if frame == "noise":
        raise ValueError(f'frame="noise" wants an injective guide: {reason}')
    return ChainDensity(density)


def _start(
    density: ChainDensity,
    guide: Any,
    args: tuple,
    kwargs: dict[str, Any],
    num_chains: int,
    kind: FrameKind,
    max_draws: int,
) -> Chains:
    """Chains at draws of the guide, in the frame of more of its draws."""
    latent_dim = density.density.latent_dim
    num_draws = num_chains
    if not isinstance(guide, Mapping) and kind == "full":
        num_draws = max(num_chains, 10 * latent_dim)
    if isinstance(density, NoiseDensity):
        points = torch.randn(num_draws, latent_dim).to(density.density.init_loc)
        # A guide of another model is told by its draws, which are not needed otherwise.
        latent_draws(density.density, guide, 1, args, kwargs)
    else:
        points = latent_draws(density.density, guide, num_draws, args, kwargs)
    starts = finite_starts(density.score, points[:num_chains], _who(guide))
    is_sound = starts.replaced == 0 and bool(points.isfinite().all())
    frame = estimate_frame(points if is_sound else starts.points, kind)
    position = frame.to_white(starts.points)
    log_density, gradient = density.score(frame.to_points(position))
    state = ChainState(position, log_density, frame.pull_back(gradient))
    history = History(2 * (3 * max_draws // 4))
    return Chains(state, ChEES(), frame, kind, history, replaced_starts=starts.replaced)


def _who(guide: Any) -> str:
    return "the guide" if not isinstance(guide, Mapping) else "those given"


def _result(density: ChainDensity, guide: Any, chains: Chains) -> Refined:
    density.check(chains.frame.to_points(chains.state.position))
    latents = chains.history.draws().transpose(0, 1).contiguous()
    stuck = int((latents == latents[:, :1]).flatten(1).all(-1).sum())
    if stuck:
        warnings.warn(
            f"{stuck} of {len(latents)} chains never moved after the warm-up, so their draws are "
            "wrong: they began where every trajectory is rejected, far out or in a narrow place. "
            "Cure: a better guide, more max_gradients, or leave out those chains of "
            "get_samples(group_by_chain=True) whose draws are all the same",
            stacklevel=3,
        )
    modes = MODES
    if isinstance(guide, AutoMixture):
        modes += " Those of this mixture are softmax(guide.log_weights)."
    return Refined(
        samples=density.density.constrain(latents),
        stopped=chains.stopped,  # type: ignore[arg-type]
        drift=chains.last_drift,
        acceptance=chains.acceptance,
        failed=chains.failed,
        step_size=chains.kernel.step_size,
        trajectory_length=chains.kernel.trajectory_length,
        num_gradients=chains.gradients,
        warmup_gradients=chains.warmup_gradients,
        seconds=chains.seconds,
        replaced_starts=chains.replaced_starts,
        stuck=stuck,
        frame=chains.frame_kind,
        space=density.space,
        modes=modes,
    )
