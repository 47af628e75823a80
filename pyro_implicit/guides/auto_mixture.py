# SPDX-License-Identifier: Apache-2.0
"""A mixture of automatic implicit guides, for separated modes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroParam
from pyro.nn.module import PyroModuleList
from torch import Tensor
from torch.distributions import Distribution

from pyro_implicit.distributions.mixture import Mixture
from pyro_implicit.guides.auto_draws import AutoDraws
from pyro_implicit.guides.auto_implicit import AutoImplicit
from pyro_implicit.guides.names import refuse_stored

__all__ = ["AutoMixture"]


class AutoMixture(AutoDraws):
    r"""A mixture of :class:`AutoImplicit` guides of one model, each at home in a mode of its own.

    .. math:: q(\theta) = \sum_k w_k q_k(\theta)

    One generator stretches thin bridges between separated modes; a mixture has none. It is not
    trained as a whole: train each component as a guide of its own, from a start in its mode, which
    the ELBO gives it no reason to leave; then set the weights. If all components have a generator
    with an ``inverse``, such as
    :class:`~pyro_implicit.generators.autoregressive.AutoregressiveGenerator`, the mixture has an
    exact density: any ELBO evaluates it, and :func:`~pyro_implicit.fitting.mixture_weights`
    finds the best weights. Otherwise it can only be sampled; then give the components' certified
    bounds (:func:`~pyro_implicit.evidence_bound`) as ``log_weights``: for modes that do not overlap
    the best weights are softmax(bounds), up to their looseness.

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
    >>> guide.sample_posterior(100)["x"].abs().round().unique()
    tensor([3.])

    To train, run ``SVI(model, guide.components[k], ...)`` for each k, and then

    >>> from pyro_implicit.fitting.candidates import mixture_weights
    >>> from pyro_implicit.density.target import Target
    >>> parts = guide.get_posterior().components
    >>> guide.log_weights = mixture_weights(Target(model), parts).log_weights

    :param model: a Pyro model with continuous latents and fixed structure.
    :param components: :class:`AutoImplicit` or :class:`AutoSemiImplicit` guides of this model,
        fitted or not. Their parameters get names of their own in Pyro's parameter store, such as
        ``AutoMixture.components.0.loc``; guides that were fitted one after the other before, under
        one name, want ``pyro.clear_param_store()`` between them.
    :param log_weights: ``(num_components,)``, up to a common constant; by default all equal. They
        are the parameter ``guide.log_weights``, saved as all others but never trained.
    :param create_plates: as in Pyro's autoguides.
    :raises TypeError: for a component of another kind.
    :raises ValueError: for no components, weights of the wrong shape, or fitted components whose
        names are taken in the parameter store; at the first call, for components of another model
        or with common parameters, and as :class:`AutoDraws`.
    """

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
                    "AutoMixture wants AutoImplicit or AutoSemiImplicit guides as components, but "
                    f"got {type(component).__name__}. Cure: AutoImplicit(model, "
                    "AutoregressiveGenerator, frame=...) takes a Gaussian guide as its frame"
                )
        has_weights = log_weights is not None
        if log_weights is None:
            log_weights = torch.zeros(len(components))
        if log_weights.shape != (len(components),) or not log_weights.logsumexp(0).isfinite():
            raise ValueError(
                f"AutoMixture wants one log-weight for each of its {len(components)} components, "
                f"at least one, and not all -inf, but got {log_weights.tolist()}"
            )
        # In a list of Pyro's for the names, and not by setattr, which would let the components
        # rely on this guide's plates when they are trained.
        self.components = PyroModuleList([])
        for component in components:
            self.components.append(component)
        self.log_weights = PyroParam(log_weights.detach().log_softmax(0))
        self._refuse_taken_names(has_weights)

    def _refuse_taken_names(self, has_weights: bool) -> None:
        """The store wins over a module at its next call: it must not hold another guide's values.

        :param has_weights: whether the user gave weights, which the store could replace.
        """
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
                "replace that of this one. Cure: pyro.clear_param_store() before; guides keep "
                "their values. To change the weights of a guide, set guide.log_weights"
            )

    def _make_parameters(self, *args: Any, **kwargs: Any) -> None:
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
                    f"unconstrained shapes), but the model has {mine}; build all of the same model"
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
                        f"'{name}', so that to train one is to change the other. Cure: a generator "
                        "for each; and pyro.clear_param_store() between the training of guides of "
                        "one name, or train guide.components[k], which have names of their own"
                    )

    def get_posterior(self, *args: Any, **kwargs: Any) -> Mixture:
        """The distribution of the unconstrained latent vector, ``event_shape`` (latent_dim,).

        Its ``components`` are the distributions of the guide's components.
        """
        parts = [_posterior(component, *args, **kwargs) for component in self.components]
        return Mixture(self.log_weights.detach(), parts)

    def _update_master(self, master_ref: Any) -> None:
        self.master = master_ref  # not the components': they are trained by themselves

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for component in self.components:
            component.master = None


def _posterior(component: AutoImplicit, *args: Any, **kwargs: Any) -> Distribution:
    """With a density at any point where there is one, else for draws only."""
    try:
        transform = component.get_transform(*args, **kwargs)
    except NotImplementedError:
        return component.get_posterior(*args, **kwargs)
    return dist.TransformedDistribution(component.get_base_dist(), transform)
