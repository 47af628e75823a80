# SPDX-License-Identifier: Apache-2.0
"""The posterior of earlier data as the prior of new data."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pyro
import torch
from pyro.distributions import TorchDistribution, Unit
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace
from torch import Tensor
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal, biject_to
from torch.distributions.constraints import Constraint

from pyro_implicit.density import Target
from pyro_implicit.density.bijections import with_small_shares
from pyro_implicit.density.checks.observations import explain
from pyro_implicit.density.coordinates import values_of
from pyro_implicit.density.groups import Groups
from pyro_implicit.density.marginal_target import MarginalTarget
from pyro_implicit.density.model import trace_model
from pyro_implicit.diagnostics.policy import VERDICT
from pyro_implicit.diagnostics.verdict import JOINTLY, TOGETHER, coarse_prior, far_from_prior
from pyro_implicit.fitting.policy import DEFAULT, FitPolicy, UpdatePolicy
from pyro_implicit.guides.posterior_draws import draw, posterior_of, samples_of
from pyro_implicit.guides.sampler import StoredDraws
from pyro_implicit.mcmc.policy import TEACHING
from pyro_implicit.ops import LogWeights
from pyro_implicit.ops.policy import EVEN_EFFICIENCY
from pyro_implicit.ops.quadrature import NormalRule
from pyro_implicit.runtime.clock import TimeLimit
from pyro_implicit.runtime.global_state import in_turn, seeded, with_seed
from pyro_implicit.runtime.messages import refuse_string, warn_user
from pyro_implicit.runtime.minibatches import BatchStream
from pyro_implicit.runtime.progress import Stage, new_stage, watching
from pyro_implicit.runtime.sites import (
    constrained_parts,
    is_data,
    is_discrete_latent,
    is_latent,
    joined_parts,
    names_in_plates_of,
    site_parts,
    survives,
)

__all__ = ["JointPrior", "fit_update", "log_prob_of", "normal_mixture", "posterior_as_prior"]

LogProb = Callable[[dict[str, Tensor]], Tensor]


@in_turn
@with_seed
def posterior_as_prior(
    posterior: Any,
    model: Callable[..., Any],
    *args: Any,
    sites: Collection[str] | None = None,
    seed: int | None = None,
    policy: UpdatePolicy | None = None,
    model_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> JointPrior:
    r"""Return the posterior of earlier data as a prior for new data.

    By Bayes' theorem, the posterior of two batches of data that are independent given the latent
    variables is that of the second one with the posterior of the first one as its prior. This prior
    is a mixture of normal distributions in unconstrained space, fitted to draws of the earlier
    posterior. Draws alone leave an error of about one per cent of a standard deviation, and in a
    stream of many batches these errors add up. For a result of :func:`~pyro_implicit.fit` whose
    other latent variables, if any, belong to groups (one plate) and can be integrated out by
    quadrature (:class:`~pyro_implicit.density.groups.Groups`), the mixture is therefore also fitted
    to the log-density :math:`\log p` at the draws, by least squares:

    .. math:: \min_{q} \operatorname{Var}[\log p(u) - \log q(u)].

    **Example:**

    >>> import pyro.distributions as dist
    >>> def model(y):
    ...     x = pyro.sample("x", dist.Normal(0.0, 5.0))
    ...     with pyro.plate("rows", len(y)):
    ...         pyro.sample("y", dist.Normal(x, 1.0), obs=y)
    >>> yesterday = {"x": 3.0 + 0.5 * torch.randn(1_000)}
    >>> prior = posterior_as_prior(yesterday, model, torch.tensor([2.5, 3.5]))
    >>> prior
    a normal distribution for x
    >>> today = prior(model)  # a model with the arguments of ``model``

    :param posterior: a result of :func:`~pyro_implicit.fit`, a guide, an ``MCMC``, or draws by
        site, of the earlier data.
    :param model: the model of the new data, with its own priors.
    :param args: the new data: arguments of the model, as ``kwargs``.
    :param sites: the sites of the joint prior. By default all continuous latent sites that the
        posterior and the model have in common, except those that belong to rows of the data: sites
        in a plate of an observation. ``print`` names sites that only one of them has.
    :param seed: the seed of all random numbers of this call. The caller's random streams do not
        advance; without a seed they are used.
    :param policy: the numbers of draws and components.
    :param model_kwargs: keyword arguments of the model whose names this function has, too.
    :returns: the prior. ``prior(model)`` is the model with this prior.
    :raises ValueError: for a site that the posterior or the model lacks, or that has another shape
        or support in the model; for no common site; for too few draws; for data without rows.
    :raises TypeError: for ``sites`` that are a string.
    :raises ImportError: without scikit-learn.
    """
    kwargs = {**kwargs, **(model_kwargs or {})}
    return _prior_and_density(posterior, model, args, kwargs, sites, policy or DEFAULT.update)[0]


def _prior_and_density(
    posterior: Any,
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    sites: Collection[str] | None,
    policy: UpdatePolicy,
) -> tuple[JointPrior, LogProb | None]:
    refuse_string(sites=sites)
    source = posterior_of("posterior_as_prior", posterior)
    if callable(source):
        old_args, old_kwargs = getattr(posterior, "source", (None, (), {}))[1:]
        draws = draw(source, policy.num_samples, *old_args, **old_kwargs)
    else:
        draws = samples_of(source, "earlier")
    try:
        trace = trace_model(model, args, kwargs)
    except Exception as error:  # of the model; raised again, with the argument that is to blame
        found = explain(error, model, args, kwargs)
        raise found from (None if found is error else error)
    names, others = _shared_sites(trace, draws, sites)
    supports = {name: trace.nodes[name]["fn"].support for name in names}
    shared = {name: draws[name] for name in names}
    for name, support in supports.items():
        if not survives(shared[name], support):
            raise ValueError(
                f"draws of site '{name}' of the earlier posterior lie outside of its support in "
                f"the new model, {support}. Cure: the same prior in both models, or sites= without "
                "it, so that it keeps its prior"
            )
    log_prob = log_prob_of(posterior, names)
    prior = JointPrior.of_draws(shared, supports, policy, log_prob)
    prior.others = others
    return prior, log_prob


def log_prob_of(posterior: Any, names: Collection[str]) -> LogProb | None:
    """Return the log-density of values of all sites, with the latent variables of groups integrated
    out; None if it has other latents, or no data.

    It is that of the values: results of ``fit`` may have other unconstrained coordinates than
    Pyro's.
    """
    passes: Target | None = getattr(posterior, "passes", None)
    if passes is None and getattr(posterior, "minibatches", True):  # or no result of fit
        return None
    with posterior.own_parameters():
        known = [one for one in (posterior.marginal, posterior) if one is not None]
        targets = [one.target for one in known] if passes is None else [passes]
        target = next((one for one in targets if set(one.shapes) == set(names)), None)
        if passes is None:
            target = target or _integrated(posterior, set(names))
    if target is None:
        return None

    def log_prob(values: dict[str, Tensor]) -> Tensor:
        points = target.unconstrain({name: values[name] for name in target.shapes})
        with posterior.own_parameters():
            return target.log_prob(points) - target.log_det(points)

    return log_prob


def _integrated(posterior: Any, names: set[str]) -> Target | None:
    """Return the density of some sites if all others belong to groups and can be integrated out."""
    model, args, kwargs = posterior.source
    policy = posterior.policy.hierarchy
    try:
        groups = Groups(model, args, kwargs=kwargs)
    except ValueError:  # expected: the model has no groups, or its groups depend on each other
        return None
    local, everything = set(groups.sites), set(groups.target.shapes)
    if names & local or names | local != everything:
        return None
    draws = posterior.sample(policy.num_weighed)
    few = {name: draws[name] for name in names}

    @functools.cache
    def log_prob(rule: NormalRule) -> Tensor:
        target = MarginalTarget(groups, [args], rule)
        return target.log_prob(target.unconstrain(few))

    for rule, others in policy.rules(groups.num_latents):
        if all((log_prob(one) - log_prob(rule)).std() < policy.max_shift for one in others):
            return MarginalTarget(groups, [args], rule)
    return None


def _shared_sites(
    trace: Trace, draws: Mapping[str, Tensor], sites: Collection[str] | None
) -> tuple[list[str], str]:
    """Return the sites of the prior, and the names of the other ones."""
    latents = {
        name: site
        for name, site in trace.nodes.items()
        if is_latent(site) and not is_discrete_latent(site)
    }
    data = [site for site in trace.nodes.values() if is_data(site, factors=False)]
    local = names_in_plates_of(data, latents)
    if sites is None:
        sites = [name for name in latents if name in draws and name not in local]
        if not sites:
            raise ValueError(
                f"the earlier posterior has draws of {sorted(draws)}, and none of them is a latent "
                f"site of the new model ({sorted(latents)}) outside of the plates of its data. "
                "Cure: the model of the earlier data, or sites=[...]"
            )
    for name in sites:
        if name not in latents or name not in draws:
            who = "new model" if name not in latents else "earlier posterior"
            raise ValueError(
                f"the {who} has no continuous latent site '{name}'. Cure: sites= without it"
            )
        shape, earlier = latents[name]["value"].shape, draws[name].shape[1:]
        if shape != earlier:
            raise ValueError(
                f"site '{name}' has shape {tuple(shape)} in the new model and {tuple(earlier)} in "
                "the earlier posterior. Cure: data of the same groups, or sites= without it, so "
                "that it keeps its prior"
            )
    own = sorted(name for name in latents.keys() - set(sites) if name not in local)
    unused = sorted(draws.keys() - latents.keys())
    others = f"; own prior of {', '.join(own)}" if own else ""
    others += f"; the new model lacks {', '.join(unused)}" if unused else ""
    return [name for name in latents if name in set(sites)], others


class JointPrior:
    """A joint prior of several latent sites: a mixture of normals in unconstrained space.

    **Example:**

    >>> import pyro.distributions as dist
    >>> draws = {"scale": 2.0 * torch.randn(1_000).exp()}
    >>> prior = JointPrior.of_draws(draws, {"scale": dist.constraints.positive})
    >>> prior.sample(3)["scale"].shape
    torch.Size([3])

    :param density: a distribution of unconstrained vectors, with ``event_shape`` ``(d,)``.
    :param shapes: by site, the shape of the unconstrained value, in the order of the vector.
    :param transforms: by site, the bijection from unconstrained values.
    """

    def __init__(
        self,
        density: MixtureSameFamily,
        shapes: Mapping[str, torch.Size],
        transforms: Mapping[str, Any],
    ) -> None:
        self.density, self.shapes, self.transforms = density, dict(shapes), dict(transforms)
        self.others = ""  # names sites of one model only
        self.least = -math.inf  # the smallest log-density of the draws to which it was fitted
        self.level = 0.0  # the known log-density minus this one's, where it was fitted first
        self.offset = 0.0  # added to the log-density, so that one that has moved keeps the evidence

    def __repr__(self) -> str:
        number = self.density.mixture_distribution.probs.shape[-1]
        what = "a normal distribution" if number == 1 else f"a mixture of {number} normals"
        return f"{what} for {', '.join(self.shapes)}{self.others}"

    def __call__(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """Return a model with this prior; all other sites keep their own.

        It has the same latent sites, and draws the sites of this prior jointly. Its factor
        ``"posterior_as_prior"`` is their log-density.

        :param model: a Pyro model with the sites of this prior.
        """

        @functools.wraps(model, updated=())
        def with_prior(*args: Any, **kwargs: Any) -> Any:
            with _Replace(self) as replace:
                value = model(*args, **kwargs)
            missing = self.shapes.keys() - replace.values.keys()
            if missing:
                raise ValueError(
                    f"the model did not sample {sorted(missing)}, which the prior has. Cure: "
                    "posterior_as_prior(..., sites=[...]) with the sites of this model"
                )
            log_prob = self.log_prob(replace.values, replace.event_dims)
            # A factor of the prior, which tells nothing of how the model scales its minibatches.
            pyro.sample(
                "posterior_as_prior",
                Unit(log_prob),
                obs=log_prob.new_empty(*log_prob.shape, 0),
                infer={"is_auxiliary": True, "is_prior": True},
            )
            return value

        return with_prior

    @classmethod
    def of_draws(
        cls,
        draws: Mapping[str, Tensor],
        supports: Mapping[str, Constraint],
        policy: UpdatePolicy = DEFAULT.update,
        log_prob: LogProb | None = None,
    ) -> JointPrior:
        """Fit a prior to draws.

        :param draws: by site, ``(num_draws, *shape)``.
        :param supports: by site, the constraint of its values.
        :param policy: the numbers of components.
        :param log_prob: maps values by site to their log-density, ``(num,)``, up to a constant.
        """
        transforms = {
            name: with_small_shares(biject_to(support)) for name, support in supports.items()
        }
        return cls._fitted(draws, transforms, policy, log_prob)

    def moved(
        self, draws: Mapping[str, Tensor], log_prob: LogProb, policy: UpdatePolicy = DEFAULT.update
    ) -> JointPrior:
        """Return this prior, fitted to the log-density where ``draws`` lie.

        Only there its density is that of the earlier posterior; its own draws are others.

        :param draws: by site, ``(num_draws, *shape)``.
        :param log_prob: as for :meth:`of_draws`.
        :param policy: the numbers of components.
        """
        prior = self._fitted(draws, self.transforms, policy, log_prob)
        prior.others, prior.offset = self.others, prior.level - self.level
        prior.level = self.level
        return prior

    @classmethod
    def _fitted(
        cls,
        draws: Mapping[str, Tensor],
        transforms: Mapping[str, Any],
        policy: UpdatePolicy,
        log_prob: LogProb | None,
    ) -> JointPrior:
        parts = {name: transforms[name].inv(draws[name].detach()) for name in transforms}
        shapes = {name: part.shape[1:] for name, part in parts.items()}
        points = joined_parts(parts.values())
        points = points[points.isfinite().all(-1)]
        at = None
        if log_prob is not None:

            def at(points: Tensor) -> Tensor:
                return _unconstrained(log_prob, points, shapes, transforms)

        prior = cls(normal_mixture(points, policy, at), shapes, transforms)
        prior.least = prior.density.log_prob(points).min().item()
        if at is not None:
            some = points[: policy.num_matched // 2]
            prior.level = (at(some) - prior.density.log_prob(some)).mean().item()
        return prior

    def points(self, values: Mapping[str, Tensor]) -> Tensor:
        """Map values by site, ``(num, *shape)``, to unconstrained vectors ``(num, d)``."""
        return joined_parts(self.transforms[name].inv(values[name]) for name in self.shapes)

    @torch.no_grad()
    def share_beyond(self, points: Tensor) -> float:
        """Return the share of points beyond all draws to which this prior was fitted.

        There the prior is extrapolated: it is less than at each of those draws.

        :param points: unconstrained vectors, ``(num, d)``.
        """
        return (self.density.log_prob(points) < self.least).double().mean().item()

    @torch.no_grad()
    def weights(self, points: Tensor, log_prob: LogProb) -> LogWeights:
        """Return importance weights of this prior's known density over its fit.

        At its own draws they tell how good the fit is; at draws from a posterior with this prior,
        how many independent draws these are worth.

        :param points: unconstrained vectors, ``(num, d)``.
        :param log_prob: the known log-density, as for :meth:`of_draws`.
        """
        known = _unconstrained(log_prob, points, self.shapes, self.transforms)
        log_weights = known - self.density.log_prob(points)
        return LogWeights(log_weights.masked_fill(log_weights.isnan(), -math.inf))

    def log_prob(self, values: Mapping[str, Tensor], event_dims: Mapping[str, int]) -> Tensor:
        """Return the log-density of values, whose dimensions on the left are particles.

        :param values: by site, ``(*batch, *shape)``, where plates to the left of a site's own
            dimensions may be padded with ones, as Pyro does.
        :param event_dims: by site, the number of event dimensions.
        :returns: of the shape of the particles, with a one for each plate of a site.
        """
        rank = max(value.dim() - event_dims[name] for name, value in values.items())
        parts, total = [], torch.zeros(())
        for name, shape in self.shapes.items():
            value, transform = values[name], self.transforms[name]
            point = transform.inv(value)
            own = value.dim() - event_dims[name]  # all batch dimensions, particles included
            inside = len(shape) - (point.dim() - own)  # those of the site's own plates
            log_det = transform.log_abs_det_jacobian(point, value)
            lead = (1,) * (rank - own) + tuple(value.shape[: own - inside]) + (1,) * inside
            parts.append(point.reshape(*lead, -1))
            total = total + log_det.reshape(*lead, -1).sum(-1)
        batch = torch.broadcast_shapes(*(part.shape[:-1] for part in parts))
        point = torch.cat([part.expand(*batch, -1) for part in parts], -1)
        return self.density.log_prob(point) + self.offset - total

    def sample(self, num: int) -> dict[str, Tensor]:
        """Draw values by site, ``(num, *shape)``."""
        return self.constrain(self.density.sample(torch.Size((num,))))

    def constrain(self, points: Tensor) -> dict[str, Tensor]:
        """Map unconstrained vectors ``(num, d)`` to values by site, ``(num, *shape)``."""
        return constrained_parts(points, self.shapes, self.transforms)


def _unconstrained(
    log_prob: LogProb,
    points: Tensor,
    shapes: Mapping[str, torch.Size],
    transforms: Mapping[str, Any],
) -> Tensor:
    """Return the log-density of unconstrained vectors, given that of values."""
    values, log_det = values_of(site_parts(points, shapes), shapes, transforms)
    return log_prob(values) + log_det


def fit_update(
    earlier: Any,
    model: Callable[..., Any],
    args: tuple[Any, ...],
    sites: Collection[str] | None,
    model_kwargs: dict[str, Any] | None,
    options: dict[str, Any],
) -> Any:
    """Fit new data with the posterior of earlier data as the prior (:meth:`Fit.update`).

    If the new draws lie beyond those of the earlier posterior, the prior there was a guess. Where
    the earlier log-density is known, the prior moves there, and the new data are fitted again; in
    the end, importance weights of this density over the prior correct the draws.

    :param earlier: the ``Fit`` of the earlier data; the other arguments are those of ``update``.
    :returns: the ``Fit`` of the new data.
    """
    settings: FitPolicy = options["policy"] or earlier.policy
    options = {**options, "policy": settings}
    policy = settings.update

    def accepts(weights: LogWeights) -> bool:
        return weights.efficiency > VERDICT.good_weights or settings.minibatch.accepts(weights)

    limit, seed, batches = TimeLimit(options["max_seconds"]), options["seed"], options["batches"]
    quiet = functools.partial(watching, False, options["callbacks"])
    with seeded(seed), quiet(), new_stage("prior") as line:
        first = () if batches is None else BatchStream(batches).probed[0]
        prior, log_prob = _prior_and_density(
            earlier, model, (*args, *first), model_kwargs or {}, sites, policy
        )
        line.outcome = str(prior)
        if log_prob is not None:
            own_points = prior.density.sample(torch.Size((settings.choice.num_weighed,)))
            line.outcome += f"; {prior.weights(own_points, log_prob)}"
    stages: list[Stage] = []
    for number in range(policy.num_moves + 1):
        own = {**options, "max_seconds": limit.seconds()}
        if number and own["checkpoint"] is not None:
            own["checkpoint"] = Path(own["checkpoint"], f"moved-{number}")
        result = earlier._fit(prior(model), "auto", *args, model_kwargs=model_kwargs, **own)
        stages += [line, *result.stages]
        with seeded(seed):
            draws = result.sample(policy.num_checked)
        points, weights, lost = prior.points(draws), None, 0.0
        share = prior.share_beyond(points)
        if log_prob is not None:
            weights = prior.weights(points, log_prob)
            lost = 0.0 if accepts(weights) else 1 - weights.efficiency
        # A coarse prior does not move by itself, but one that has moved goes on until it fits.
        guess = max(share, lost) if number else share
        is_last = number == policy.num_moves or limit.is_over() or result.interrupted
        if log_prob is None or is_last or guess <= VERDICT.extrapolated.check:
            break
        with seeded(seed), quiet(), new_stage("prior") as line:
            prior = prior.moved(draws, log_prob, policy)
            line.outcome = f"{prior}, moved: it was wrong for {guess:.0%} of the new draws"
    before, now = earlier.num_modes or 1, result.num_modes or 1
    if now < before:
        stages[0].outcome += f"; {before} modes before the new data, {now} now"
    result.stages[:], result.prior, result.extrapolated = stages, prior, share
    if share > VERDICT.extrapolated.check:
        warn_user(f"{far_from_prior(share)}. Cure: {JOINTLY}")
    elif lost:
        result.coarse = lost
        warn_user(f"{coarse_prior(str(weights))}. Cure: {TOGETHER}")
    if weights is not None and not lost and options["amortize"] is None:
        if weights.efficiency < EVEN_EFFICIENCY:
            with seeded(seed), result.stage("weigh") as line:
                line.outcome = f"draws by the earlier density over the prior: {weights}"
                _weigh(result, draws, weights, policy.num_checked)
    return result


def _weigh(result: Any, draws: dict[str, Tensor], weights: LogWeights, number: int) -> None:
    """Resample draws of a result by their weights; its chains have the fitted prior."""
    before = result.unweighted = result._posterior(number)
    rows = weights.resample(len(weights))
    result.draws = StoredDraws(
        {name: value[rows.to(value.device)] for name, value in draws.items()},
        settled=getattr(before, "settled", False),
        modes_weighed=getattr(before, "modes_weighed", False),
        doubts=getattr(before, "doubts", ()),
        drift=getattr(before, "drift", None),
        num_independent=weights.effective_sample_size,
    )
    result.refined = result.correction = None


def normal_mixture(
    points: Tensor, policy: UpdatePolicy, log_prob: Callable[[Tensor], Tensor] | None
) -> MixtureSameFamily:
    """Fit a mixture of normals to draws, with as many components as held-out draws support.

    :param points: ``(num_draws, dim)``.
    :param policy: the numbers of components.
    :param log_prob: the log-density, up to a constant, that the mixture is also fitted to.
    """
    dim = points.shape[-1]
    if len(points) < 2 * (dim + 1):
        raise ValueError(
            f"{len(points)} draws of {dim} latent variables determine no prior. Cure: at least "
            f"{2 * (dim + 1)} draws"
        )
    points = points[torch.randperm(len(points), device=points.device)]
    held_out, learnt = points.tensor_split([-(-len(points) // TEACHING.held_out_part)])
    best = _most_likely(learnt, 1)
    if log_prob is not None:
        best, rest = _matched(best, points, log_prob, policy)
    for number in policy.components:
        if number * (dim + 1) > len(learnt):
            break
        if log_prob is not None and number * (dim + 1) * (dim + 2) > policy.num_matched:
            break  # more parameters than points, of which half are held out
        found = _most_likely(learnt, number)
        if log_prob is None:
            gain = found.log_prob(held_out) - best.log_prob(held_out)
            is_better = gain.mean() > 2 * gain.std() / math.sqrt(len(gain))  # two standard errors
        else:
            if rest < policy.matched:
                break
            found, fault = _matched(found, points, log_prob, policy)
            is_better, rest = fault < rest, min(fault, rest)
        if is_better:
            best = found
        elif log_prob is None:
            break
    return best


def _most_likely(points: Tensor, number: int) -> MixtureSameFamily:
    try:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.mixture import GaussianMixture
    except ImportError as error:
        raise ImportError(
            f"scikit-learn is needed for this, and it cannot be imported ({error}). Cure: "
            "pip install 'pyro-implicit[networks]'"
        ) from error
    loc, scale = points.mean(0), points.std(0).clamp(min=torch.finfo(points.dtype).tiny)
    seed = int(torch.randint(2**31, ()))
    mixture = GaussianMixture(number, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # other draws decide
        mixture.fit(((points - loc) / scale).double().cpu().numpy())
    fitted = (mixture.means_, mixture.covariances_, mixture.weights_)
    means, covariances, weights = (torch.as_tensor(one).to(points.device) for one in fitted)
    factor = torch.linalg.cholesky(covariances).to(points) * scale.unsqueeze(-1)
    normals = MultivariateNormal(loc + scale * means.to(points), scale_tril=factor)
    return MixtureSameFamily(Categorical(weights.to(points)), normals)


def _matched(
    start: MixtureSameFamily,
    points: Tensor,
    log_prob: Callable[[Tensor], Tensor],
    policy: UpdatePolicy,
) -> tuple[MixtureSameFamily, float]:
    """Fit log-densities at draws and at the mixture's own; return Var[log p - log q] of others."""
    size = policy.num_matched // 2
    points = torch.cat([points[:size], start.sample(torch.Size((size,)))])
    with torch.no_grad():
        log_p = log_prob(points).double()
    points, log_p = points[log_p.isfinite()].double(), log_p[log_p.isfinite()]
    normals: Any = start.component_distribution
    logits = start.mixture_distribution.logits
    loc, scale = normals.loc.double(), normals.scale_tril.double()
    # In units of each component's own start, so that one step size suits all parameters.
    shifts, factors = scale.new_zeros(loc.shape), scale.new_zeros(scale.shape)
    parameters = [shifts, factors, logits.double().clone()]

    def mixture() -> MixtureSameFamily:
        shifts, factors, logits = parameters
        own = factors.tril(-1) + factors.diagonal(dim1=-2, dim2=-1).exp().diag_embed()
        moved = loc + (scale @ shifts.unsqueeze(-1)).squeeze(-1)
        # A step that overflows must be rejected by its loss, not by an error.
        components = MultivariateNormal(moved, scale_tril=scale @ own, validate_args=False)
        weights = Categorical(logits=logits, validate_args=False)
        return MixtureSameFamily(weights, components, validate_args=False)

    def rest(first: int) -> Tensor:
        return (log_p[first::2] - mixture().log_prob(points[first::2])).var()

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = rest(0)
        loss.backward()
        return loss

    before = rest(1).item()
    for one in parameters:
        one.requires_grad_()
    steps = policy.match_steps
    optimiser = torch.optim.LBFGS(parameters, max_iter=steps, line_search_fn="strong_wolfe")
    with torch.enable_grad():
        optimiser.step(closure)
    with torch.no_grad():
        found, after = mixture(), rest(1).item()
    own: Any = found.component_distribution
    logits = found.mixture_distribution.logits
    loc, scale, logits = (one.to(normals.loc) for one in (own.loc, own.scale_tril, logits))
    if not after < before or (scale.diagonal(dim1=-2, dim2=-1) <= 0).any():  # or underflows
        return start, before
    components = MultivariateNormal(loc, scale_tril=scale)
    return MixtureSameFamily(Categorical(logits=logits), components), after


class _Replace(Messenger):
    """Replaces the sites' own priors by draws of the joint one, of constant density."""

    def __init__(self, prior: JointPrior) -> None:
        super().__init__()
        self._prior = prior
        self._drawn: dict[int, dict[str, Tensor]] = {}
        self.values: dict[str, Tensor] = {}
        self.event_dims: dict[str, int] = {}

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self._prior.shapes and not msg["is_observed"]:
            msg["fn"] = _Joint(msg["name"], msg["fn"], self._prior, self._drawn)
            self.event_dims[msg["name"]] = msg["fn"].event_dim

    def _pyro_post_sample(self, msg: Any) -> None:
        if msg["name"] in self.event_dims:
            self.values[msg["name"]] = msg["value"]


class _Joint(TorchDistribution):
    """One site of a joint prior, whose density is a factor of the model.

    :param drawn: joint draws by their number, which all sites of a run share.
    """

    arg_constraints: ClassVar[dict[str, Constraint]] = {}

    def __init__(
        self, name: str, fn: Any, prior: JointPrior, drawn: dict[int, dict[str, Tensor]]
    ) -> None:
        self.name, self._prior, self._drawn, self._support = name, prior, drawn, fn.support
        super().__init__(fn.batch_shape, fn.event_shape, validate_args=False)

    @property
    def support(self) -> Constraint:
        return self._support

    def expand(self, batch_shape: torch.Size, _instance: Any = None) -> _Joint:
        new = self._get_checked_instance(_Joint, _instance)
        new.name, new._support = self.name, self._support
        new._prior, new._drawn = self._prior, self._drawn
        TorchDistribution.__init__(
            new, torch.Size(batch_shape), self.event_shape, validate_args=False
        )
        return new

    @torch.no_grad()
    def sample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008
        prior, shape = self._prior, self.shape(sample_shape)
        own = prior.transforms[self.name].forward_shape(prior.shapes[self.name])
        number = shape.numel() // own.numel()
        if number not in self._drawn:
            self._drawn[number] = prior.sample(number)
        return self._drawn[number][self.name].reshape(shape)

    def log_prob(self, value: Tensor) -> Tensor:
        batch = value.shape[: value.dim() - self.event_dim]
        return value.new_zeros(torch.broadcast_shapes(batch, self.batch_shape))
