# SPDX-License-Identifier: Apache-2.0
"""Automatic guides for several modes: mixtures of implicit guides, ensembles of points."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import init_to_sample
from pyro.nn import PyroParam
from pyro.nn.module import PyroModuleList
from torch import Tensor
from torch.distributions import Distribution, biject_to, constraints

from pyro_implicit.density.model import trace_model
from pyro_implicit.distributions.implicit import Mixture
from pyro_implicit.guides.auto_draws import AutoDraws, refuse_stored
from pyro_implicit.guides.auto_implicit import AutoImplicit
from pyro_implicit.guides.policy import INIT_SPREAD
from pyro_implicit.runtime.messages import refuse_counts

__all__ = ["AutoEnsemble", "AutoMixture", "init_to_shuffled"]


class AutoMixture(AutoDraws):
    r"""A mixture of :class:`AutoImplicit` guides of one model, one for each mode.

    .. math:: q(\theta) = \sum_k w_k q_k(\theta)

    A single generator connects well-separated modes by thin bridges; a mixture does not. Train each
    component separately, initialised in its mode, and then set the weights. If all components have
    a generator with an ``inverse``, such as
    :class:`~pyro_implicit.generators.autoregressive.AutoregressiveGenerator`, the mixture has an
    exact density: any ELBO evaluates it, or trains all components further, and
    :func:`~pyro_implicit.fitting.mixture_weights` finds the best weights. Otherwise it can only be
    sampled; then use the components' certified bounds (:func:`~pyro_implicit.evidence_bound`) as
    ``log_weights``: for modes that do not overlap the best weights are softmax(bounds), up to the
    looseness of the bounds.

    **Example:**

    >>> from pyro.infer.autoguide import init_to_value
    >>> from pyro_implicit.generators.autoregressive import AutoregressiveGenerator
    >>> def model():
    ...     x = pyro.sample("x", dist.Normal(0.0, 5.0))
    ...     pyro.sample("y", dist.Normal(x**2, 1.0), obs=torch.tensor(9.0))
    >>> starts = [init_to_value(values={"x": torch.tensor(x)}) for x in (-3.0, 3.0)]
    >>> parts = [
    ...     AutoImplicit(model, AutoregressiveGenerator, init_loc_fn=start, frame="mode")
    ...     for start in starts
    ... ]
    >>> guide = AutoMixture(model, parts)
    >>> draws = guide.sample_posterior(100)["x"]
    >>> draws.sign().unique(), bool((draws.abs() - 3).abs().max() < 1)
    (tensor([-1.,  1.]), True)

    To train, run ``SVI(model, guide.components[k], ...)`` for each k, and then

    >>> from pyro_implicit.fitting.candidates import mixture_weights
    >>> from pyro_implicit.density.target import Target
    >>> parts = guide.get_posterior().components
    >>> guide.log_weights = mixture_weights(Target(model), parts)

    :param model: a Pyro model with continuous latents and fixed structure.
    :param components: :class:`AutoImplicit` or :class:`AutoSemiImplicit` guides of this model,
        fitted or not. Their parameters have unique names in Pyro's parameter store, such as
        ``AutoMixture.components.0.loc``. Guides fitted before, one after the other, under one name
        need ``pyro.clear_param_store()`` between them.
    :param log_weights: ``(num_components,)``, up to a common constant; by default all equal. They
        are the parameter ``guide.log_weights``, which is saved but not trained.
    :param create_plates: as in Pyro's autoguides.
    :raises TypeError: for a component of another class.
    :raises ValueError: for no components, weights of the wrong shape, or fitted components whose
        names another guide has in the parameter store; at the first call, for components of another
        model or with common parameters, and as :class:`AutoDraws`.
    """

    _has_rows = False

    def __init__(
        self,
        model: Callable[..., Any],
        components: Sequence[AutoImplicit],
        log_weights: Tensor | None = None,
        create_plates: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(model, create_plates=create_plates)
        for component in components:
            if not isinstance(component, AutoImplicit):
                raise TypeError(
                    "AutoMixture needs AutoImplicit or AutoSemiImplicit guides as components, but "
                    f"got {type(component).__name__}. Cure: AutoImplicit(model, "
                    "AutoregressiveGenerator, frame=...) takes a Gaussian guide as its frame"
                )
        has_weights = log_weights is not None
        if log_weights is None:
            log_weights = torch.zeros(len(components))
        if log_weights.shape != (len(components),) or not log_weights.logsumexp(0).isfinite():
            raise ValueError(
                f"AutoMixture needs one log-weight for each of its {len(components)} components, "
                f"at least one, and not all -inf, but got {log_weights.tolist()}"
            )
        # A list of Pyro's for the names. Not by setattr: the components would use this guide's
        # plates during training.
        self.components = PyroModuleList([])
        for component in components:
            self.components.append(component)
        self.log_weights = PyroParam(log_weights.detach().log_softmax(0))
        self._refuse_taken_names(has_weights)

    def _refuse_taken_names(self, has_weights: bool) -> None:
        """Check that the store does not hold another guide's values, which would replace ours."""
        if pyro.settings.get("module_local_params"):
            return
        store = pyro.get_param_store()
        own = {id(parameter) for parameter in self.components.parameters()}
        prefixes = tuple(
            f"{component._pyro_name}."
            for component in self.components
            if component.prototype_trace is not None
        )
        name = f"{self._pyro_name}.log_weights"
        taken = [
            key
            for key, parameter in store.named_parameters()
            if key.startswith(prefixes) and id(parameter) not in own
        ]
        if has_weights and name in store and store[name].tolist() != self.log_weights.tolist():
            taken.append(name)
        if taken:
            raise ValueError(
                f"Pyro's parameter store has '{taken[0]}' of another AutoMixture, which would "
                "replace the value of this guide. Cure: pyro.clear_param_store() before; guides "
                "keep their values. To change the weights of a guide, set guide.log_weights"
            )

    def _make_parameters(self, *args: Any, **kwargs: Any) -> None:
        if self._row_sites:
            raise ValueError(
                f"AutoMixture has no parameters of rows, which site '{self._row_sites[0].name}' "
                "needs. Cure: AutoSemiImplicit(model, create_plates=...)"
            )
        refuse_stored(self, {"log_weights": (len(self.components),)})
        for index, component in enumerate(self.components):
            if component.prototype_trace is None:
                component._setup_prototype(*args, **kwargs)
            if component._unconstrained_shapes != self._unconstrained_shapes or list(
                component._unconstrained_shapes
            ) != list(self._unconstrained_shapes):
                mine, theirs = (
                    {name: tuple(shape) for name, shape in guide._unconstrained_shapes.items()}
                    for guide in (self, component)
                )
                raise ValueError(
                    f"component {index} of AutoMixture covers the sites {theirs} (with their "
                    f"unconstrained shapes), but the model has {mine}. Cure: guides of this model"
                )
        self._refuse_common_parameters()
        loc = self.components[0].loc
        if (self.log_weights.dtype, self.log_weights.device) != (loc.dtype, loc.device):
            self.log_weights = PyroParam(self.log_weights.detach().to(loc))

    def _refuse_common_parameters(self) -> None:
        owners: dict[int, int] = {}
        for index, component in enumerate(self.components):
            for name, parameter in component.named_parameters():
                owner = owners.setdefault(id(parameter), index)
                if owner != index:
                    raise ValueError(
                        f"components {owner} and {index} of AutoMixture share the parameter "
                        f"'{name}', so that training one changes the other. Cure: a generator for "
                        "each, and pyro.clear_param_store() between the training of guides of one "
                        "name, or train guide.components[k], which have unique names"
                    )

    def get_posterior(self, *args: Any, **kwargs: Any) -> Mixture:
        """Return the distribution of the unconstrained latent vector, a mixture with
        ``event_shape`` (latent_dim,)."""
        parts = [_posterior(component, *args, **kwargs) for component in self.components]
        return Mixture(self.log_weights.detach(), parts)

    def _has_exact_density(self) -> bool:
        q = self.get_posterior()
        try:
            q.log_prob(self.log_weights.new_zeros(q.event_shape))
        except NotImplementedError:
            return False
        return True

    def _update_master(self, master_ref: Any) -> None:
        self.master = master_ref  # not of the components, which are trained separately

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for component in self.components:
            component.master = None


def _posterior(component: AutoImplicit, *args: Any, **kwargs: Any) -> Distribution:
    try:
        transform = component.get_transform(*args, **kwargs)
    except NotImplementedError:
        return component.get_posterior(*args, **kwargs)
    return dist.TransformedDistribution(component.get_base_dist(), transform)


ONE = torch.Size()


class AutoEnsemble(AutoDraws):
    r"""Several point estimates, usually in different modes, trained in one vectorised pass.

    .. math:: q(\theta) = \frac1K \sum_{k=1}^K \delta(\theta - \theta_k)

    Each member maximises the log-density of latents and data in unconstrained space from its own
    initial value: a deep ensemble as one guide (Lakshminarayanan et al., without adversarial
    examples). The ELBO is the mean of the members' log-densities. :func:`~pyro_implicit.refine`
    adds the width of each mode. Use it for networks, whose predictions differ more between modes
    than within a mode; point estimates of hierarchical models may be meaningless.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     x = pyro.sample("x", dist.Normal(0.0, 3.0))
    ...     pyro.sample("y", dist.Normal(x**2, 0.1), obs=torch.tensor(4.0))
    >>> _ = pyro.set_rng_seed(1)
    >>> guide = AutoEnsemble(model, num_members=4)
    >>> from pyro_implicit import fit
    >>> result = fit(model, guide, num_steps=500, lr=0.1, seed=0, progress=False)
    >>> guide.get_samples()["x"].round().abs()
    tensor([2., 2., 2., 2.])

    :param model: a Pyro model with continuous latents and fixed structure.
    :param num_members: K. An ELBO with K particles trains all members in each step, an ELBO with
        fewer particles some of them.
    :param init_loc_fn: random per-site initialisation, called for each member;
        :func:`init_to_shuffled` for networks.
    :param create_plates: as in Pyro's autoguides.
    :raises ValueError: for no members; at the first call, if all members have one initial value,
        and as :class:`AutoDraws`.

    **References:**

    1. Lakshminarayanan, Pritzel and Blundell (2017), *Simple and Scalable Predictive Uncertainty
       Estimation using Deep Ensembles*. https://arxiv.org/abs/1612.01474
    """

    members: Tensor

    def __init__(
        self,
        model: Callable[..., Any],
        num_members: int = 5,
        init_loc_fn: Callable[[dict[str, Any]], Tensor] = init_to_sample,
        create_plates: Callable[..., Any] | None = None,
    ) -> None:
        refuse_counts(num_members=num_members)
        super().__init__(model, init_loc_fn, create_plates)
        self.num_members = num_members

    def _make_parameters(self, *args: Any, **kwargs: Any) -> None:
        refuse_stored(self, {"members": (self.num_members, self.latent_dim)})
        starts = [self._init_loc()]
        while len(starts) < self.num_members:
            nodes = trace_model(self.model, args, kwargs).nodes
            parts = [
                biject_to(nodes[name]["fn"].support).inv(nodes[name]["value"]).reshape(-1)
                for name in self._unconstrained_shapes
            ]
            starts.append(torch.cat(parts))
        members = torch.stack(starts)
        if len(members) > 1 and (members == members[0]).all():
            raise ValueError(
                f"all {self.num_members} members of AutoEnsemble have one initial value and would "
                "stay equal. Cure: a random init_loc_fn, such as init_to_sample, or "
                "init_to_shuffled(start_values(net)) for a network"
            )
        self.members = PyroParam(members)

    def get_posterior(self, *args: Any, **kwargs: Any) -> dist.Delta:
        """Return the distribution of the unconstrained latent vector."""
        return _Members(self.members)

    def _centre(self) -> Tensor:
        return self.members.mean(0)

    @torch.no_grad()
    def get_samples(self) -> dict[str, Tensor]:
        """Return the members in the layout of ``MCMC.get_samples``.

        :returns: constrained values by site, ``(num_members, *site_shape)``.
        :raises RuntimeError: before the first call.
        """
        if self.prototype_trace is None:
            raise RuntimeError(
                "AutoEnsemble has no members before its first call. Cure: train it, or guide(*args)"
            )
        with self._pyro_context:  # the parameter store's values, as in a call
            return self._constrain(self.members.detach())


class _Members(dist.Delta):
    """Point masses; up to ``num_members`` draws are different members."""

    def __init__(self, members: Tensor, batch_shape: torch.Size = ONE) -> None:
        self.members = members
        super().__init__(members[0].expand(batch_shape + members.shape[1:]), event_dim=1)

    def expand(self, batch_shape: torch.Size, _instance: Any = None) -> _Members:
        return _Members(self.members, torch.Size(batch_shape))

    def rsample(self, sample_shape: torch.Size = ONE) -> Tensor:
        shape = torch.Size(sample_shape) + self.batch_shape
        first = torch.randint(len(self.members), ())
        index = (first + torch.arange(shape.numel())) % len(self.members)
        return self.members[index.to(self.members.device)].reshape(shape + self.event_shape)

    def log_prob(self, x: Tensor) -> Tensor:
        return x.new_zeros(x.shape[:-1])  # draws are members: no comparison


def init_to_shuffled(values: Mapping[str, Tensor]) -> Callable[[dict[str, Any]], Tensor]:
    """Initialise a network by a random permutation of its weights at each call.

    Every member of an :class:`AutoEnsemble` then has different initial values of torch's scale for
    each layer. A weight matrix with one value for all entries, such as zero, would leave the hidden
    units identical: scaled differences of two draws of its prior are added. Other sites are
    initialised by a draw of the prior.

    **Example:**

    >>> import pyro.distributions as dist
    >>> start = init_to_shuffled({"weight": torch.arange(4.0)})
    >>> site = {"name": "weight", "fn": dist.Normal(torch.zeros(4), 1.0).to_event(1)}
    >>> start(site).sort().values
    tensor([0., 1., 2., 3.])

    :param values: values by site, from :func:`~pyro_implicit.nn.start_values`; the entries of a
        site must be exchangeable, as independently drawn weights are.
    """
    return partial(_shuffled, values)  # which can be pickled


def _shuffled(values: Mapping[str, Tensor], site: dict[str, Any]) -> Tensor:
    if site["name"] not in values:
        return init_to_sample(site)
    value = values[site["name"]]
    if value.dim() > 1 and value.numel() > 1 and (value == value.flatten()[0]).all():
        first, second = init_to_sample(site), init_to_sample(site)
        support = site["fn"].support
        is_real = getattr(support, "base_constraint", support) is constraints.real
        return value + INIT_SPREAD * (first - second) if is_real else first
    return value.flatten()[torch.randperm(value.numel())].reshape(value.shape)
