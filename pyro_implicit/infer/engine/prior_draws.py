# SPDX-License-Identifier: Apache-2.0
"""Draws of some latents of a model from their prior, without running the likelihood."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import biject_to

from pyro_implicit.infer.engine.particles import Particles

__all__ = ["PriorDraws", "PriorMemory"]

Values = dict[str, Tensor]


@dataclass
class PriorMemory:
    """What is found out once about the prior of some latents, and draws that were costly.

    ``depends``: its parameters are made from latents; ``on_others``: from latents beyond these;
    ``parallel``: the model can draw many at once in a plate.
    """

    depends: bool | None = None
    on_others: bool = False
    parallel: bool | None = None
    pool: Values = field(default_factory=dict)
    arguments: list[Any] | None = field(default_factory=list)

    def __getstate__(self) -> dict[str, Any]:
        # The pool is of these very arguments; another process takes the next ones for them.
        return {**self.__dict__, "arguments": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> PriorMemory:
        return replace(self, pool=dict(self.pool), arguments=None)


class _Reached(Exception):
    """The model has met all latents that were wanted."""


class _StopAfter(Messenger):
    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.missing = set(names)

    def _pyro_post_sample(self, msg: Any) -> None:
        self.missing.discard(msg["name"])
        if not self.missing:
            raise _Reached


class PriorDraws:
    """Runs a model as far as some of its latents.

    :param particles: the model, and the values of its latents.
    :param latents: those that are wanted.
    :param memory: kept from step to step.
    """

    def __init__(self, particles: Particles, latents: tuple[str, ...], memory: PriorMemory) -> None:
        self.particles, self.latents, self.memory = particles, latents, memory

    def up_to_latents(self, fixed: Values, num: int | None = None) -> Trace:
        """Run the model until it has met the latents, drawing (``num`` times) what is not fixed."""
        replayed = Trace()
        for name, site in self.particles.replayed.nodes.items():
            if name in fixed or site_is_subsample(site):
                replayed.add_node(name, **{**site, "value": fixed.get(name, site["value"])})
        model = poutine.replay(self.particles.model, trace=replayed)
        with poutine.block():
            if num is not None:
                dim = -self.particles.max_plate_nesting - 1
                model = pyro.plate("_prior_draws", num, dim=dim)(model)
            with poutine.trace() as tracer, _StopAfter(self.latents):
                try:
                    model(*self.particles.args, **self.particles.kwargs)
                except _Reached:
                    pass
        return tracer.trace

    def find_parents(self) -> None:
        """Find out whether the prior's parameters move with the latents, by moving those."""
        values = self.particles.particle(0)
        trace = self.up_to_latents(values)
        moved = {}
        for name, site in trace.nodes.items():
            if site["type"] == "sample" and name in values:
                transform = biject_to(site["fn"].support)
                free = transform.inv(values[name])
                moved[name] = transform(free + 0.1 + 0.1 * torch.rand_like(free))

        def moves_with(names: set[str]) -> bool:
            other = self.up_to_latents({n: (moved if n in names else values)[n] for n in moved})
            densities = [
                [t.nodes[name]["fn"].log_prob(values[name]) for name in self.latents]
                for t in (trace, other)
            ]
            return not all(a.equal(b) for a, b in zip(*densities, strict=True))

        self.memory.depends = moves_with(set(moved))
        self.memory.on_others = moves_with(set(moved) - set(self.latents))

    def draw(self, num: int, values: Values) -> Values:
        """Draws ``(num, *site_shape)`` by site, given the values of all latents beyond these.

        In a plate where the model broadcasts, else one after the other; of those nine tenths are
        kept for the next draw where nothing about the prior is learnt.
        """
        fixed = {n: value for n, value in values.items() if n not in self.latents}
        if self.memory.parallel is not False:
            try:
                trace = self.up_to_latents(fixed, num)
                draws = {name: trace.nodes[name]["value"] for name in self.latents}
                if self.memory.parallel is None:
                    self.memory.parallel = self._agrees(trace, fixed, values)
            except (RuntimeError, ValueError, IndexError):
                self.memory.parallel = False
            if self.memory.parallel:
                return {n: d.reshape((num,) + values[n].shape) for n, d in draws.items()}
        return self._one_by_one(num, fixed)

    def _agrees(self, trace: Trace, fixed: Values, values: Values) -> bool:
        """Whether the last draw in a plate came from the same prior as a run on its own."""
        nodes = {name: trace.nodes[name] for name in self.latents}
        last = {}
        for name, node in nodes.items():
            if node["value"][-1].numel() != values[name].numel():
                return False
            last[name] = node["value"][-1].reshape(values[name].shape)
        alone = self.up_to_latents({**fixed, **last})
        for name, node in nodes.items():
            together = node["fn"].log_prob(node["value"])[-1].sum()
            by_itself = alone.nodes[name]["fn"].log_prob(last[name]).sum()
            if not torch.isclose(together, by_itself, rtol=1e-4):
                return False
        return True

    def _one_by_one(self, num: int, fixed: Values) -> Values:
        memory = self.memory
        arguments = [*self.particles.args, *self.particles.kwargs.values()]
        is_same = memory.arguments is None or _same(arguments, memory.arguments)
        pool = memory.pool if is_same and not memory.on_others else {}
        if pool and len(pool[self.latents[0]]) != num:
            pool = {}
        traces = [self.up_to_latents(fixed) for _ in range(max(1, num // 10) if pool else num)]
        draws = {}
        for name in self.latents:
            new = torch.stack([trace.nodes[name]["value"] for trace in traces])
            draws[name] = torch.cat([new, pool[name]])[:num] if pool else new
        is_learnt = any(site["type"] == "param" for site in traces[0].nodes.values())
        memory.pool, memory.arguments = ({}, []) if is_learnt else (draws, arguments)
        return draws


def _same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))
