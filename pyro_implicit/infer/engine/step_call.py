# SPDX-License-Identifier: Apache-2.0
"""One step of an ELBO as a function of tensors: plain, recorded, or run from a recording."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import pyro
import torch
from pyro import poutine
from pyro.poutine.runtime import _PYRO_STACK
from torch import Tensor, nn

from pyro_implicit.compiled import RecordedFunction, flatten_arguments
from pyro_implicit.infer.engine.evaluation import Evaluation
from pyro_implicit.infer.engine.nonfinite import NonFiniteError
from pyro_implicit.infer.engine.parameters import graph_leaves, unconstrained

if TYPE_CHECKING:
    from pyro_implicit.infer.implicit_elbo import ImplicitELBO

__all__ = ["Program", "StepCall"]


class Plain(NamedTuple):
    """A step by Pyro: the outcome, all parameters in it, and by name those of Pyro's store."""

    evaluation: Evaluation
    leaves: list[Tensor]
    params: dict[str, Tensor]


class Outcome(NamedTuple):
    """``check`` is finite if loss and gradients are."""

    evaluation: Evaluation
    check: Tensor
    carried: dict[Any, Tensor]


class StepCall:
    """A step to be taken.

    ``key`` tells which recording it can use.

    :raises Untraceable: for arguments that a recording cannot have.
    """

    def __init__(
        self, elbo: ImplicitELBO, model: Callable, guide: Callable, args: tuple, kwargs: dict
    ) -> None:
        self.elbo, self.model, self.guide = elbo, model, guide
        self.arguments = flatten_arguments(args, kwargs)
        self.carried = elbo.carried()
        """What it takes over from the step before."""
        carried = tuple((k, t.shape, t.dtype) for k, t in self.carried.items())
        self.key = (self.arguments.key, elbo.settings(), carried)

    def plain(self) -> Plain:
        """Take it by Pyro.

        :raises NonFiniteError: as the ELBO; for a gradient, a plain step names the parameter.
        """
        tensors, with_gradient = self._own_tensors()
        args, kwargs = self.arguments.rebuild(tensors)
        with poutine.trace(param_only=True) as capture:
            loss, surrogate = self.elbo.total(self.model, self.guide, args, kwargs)
        own = {id(tensor) for tensor in with_gradient}
        leaves = [leaf for leaf in graph_leaves(surrogate) if id(leaf) not in own]
        targets = leaves + self._differentiable()
        gradients = _gradients(surrogate, leaves + with_gradient)
        _refuse_nonfinite(gradients)
        store = pyro.get_param_store()  # without those of modules with module_local_params
        params = {
            name: unconstrained(site)
            for name, site in capture.trace.nodes.items()
            if site["type"] == "param" and name in store
        }
        return Plain(_evaluation(loss, targets, gradients), leaves, params)

    def record(self, plain: Plain) -> Program:
        """Record it.

        :param plain: the same, taken by Pyro.
        :raises Untraceable: naming the cause.
        """
        elbo, leaves, carried = self.elbo, plain.leaves, list(self.elbo.carried().values())
        tensors, with_gradient = self._own_tensors()
        args, kwargs = self.arguments.rebuild(tensors)
        weights = self._weights(leaves)
        has_gradient: list[bool] = []

        def function() -> list[Tensor]:
            with poutine.block(), elbo.weighed_by(weights):
                loss, surrogate = elbo.total(self.model, self.guide, args, kwargs)
            found = _gradients(surrogate, leaves + with_gradient)
            has_gradient[:] = [gradient is not None for gradient in found]
            gradients = [gradient for gradient in found if gradient is not None]
            check = 0 * torch.nn.utils.get_total_norm(gradients) + loss
            return [loss, check, *gradients, *elbo.carried().values()]

        inputs = [*leaves, *tensors, *weights.values(), *carried]
        candidates = (self.model, self.guide, elbo, *vars(elbo).values())
        modules = [part for part in candidates if isinstance(part, nn.Module)]
        recorded = RecordedFunction(function, inputs, modules, carried)
        return Program(recorded, leaves, plain.params, has_gradient)

    def inputs(self, leaves: list[Tensor]) -> list[Tensor]:
        """What a recording wants."""
        weights = self._weights(leaves).values()
        return [*leaves, *self.arguments.tensors, *weights, *self.carried.values()]

    def _weights(self, leaves: list[Tensor]) -> dict[str, Tensor]:
        """Those that are not 1, which a recording knows, as tensors like the parameters."""
        like = leaves[0] if leaves else torch.zeros(())
        values = self.elbo.weights().items()
        return {name: like.new_tensor(value) for name, value in values if value != 1.0}

    def _differentiable(self) -> list[Tensor]:
        return [tensor for tensor in self.arguments.tensors if tensor.requires_grad]

    def _own_tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Others for the arguments' tensors, which may be known to the model by another way too;
        and those that have a gradient."""
        tensors = [
            tensor.detach().requires_grad_(tensor.requires_grad)
            for tensor in self.arguments.tensors
        ]
        return tensors, [tensor for tensor in tensors if tensor.requires_grad]


class Program:
    """A recorded step, whose inputs are parameters, arguments, weights and what is carried."""

    def __init__(
        self,
        function: RecordedFunction,
        leaves: list[Tensor],
        params: dict[str, Tensor],
        has_gradient: list[bool],
    ) -> None:
        self.function, self.leaves, self.params = function, leaves, params
        self.has_gradient = has_gradient
        self.num_run = 0

    def holds(self) -> bool:
        """Whether its parameters are still those of store and modules."""
        known = pyro.get_param_store()._params
        return self.function.holds() and all(
            known.get(name) is value for name, value in self.params.items()
        )

    def show_params(self) -> None:
        """Let handlers around the step, like that of ``SVI``, see its parameters."""
        if _PYRO_STACK:
            with torch.no_grad():
                for name in self.params:
                    pyro.param(name)

    def run(self, call: StepCall) -> Outcome:
        """The step."""
        loss, check, *others = self.function(call.inputs(self.leaves))
        targets = self.leaves + call._differentiable()
        targets = [t for t, has in zip(targets, self.has_gradient, strict=True) if has]
        gradients, carried = others[: len(targets)], others[len(targets) :]
        return Outcome(
            Evaluation(loss, targets, gradients),
            check,
            dict(zip(call.carried, carried, strict=True)),
        )

    def compile(self, call: StepCall) -> None:
        """Let inductor make kernels of it.

        :raises CompilerError: if it cannot.
        """
        self.function.compile(call.inputs(self.leaves))


def _gradients(surrogate: Tensor, wanted: list[Tensor]) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(surrogate, wanted, allow_unused=True) if wanted else ()


def _refuse_nonfinite(gradients: tuple[Tensor | None, ...]) -> None:
    norm = torch.nn.utils.get_total_norm([one for one in gradients if one is not None])
    if not norm.isfinite():
        raise NonFiniteError("a gradient is not finite")


def _evaluation(loss: Tensor, targets: list[Tensor], gradients: Any) -> Evaluation:
    pairs = [(t, g) for t, g in zip(targets, gradients, strict=True) if g is not None]
    return Evaluation(loss, [t for t, _ in pairs], [g for _, g in pairs])
