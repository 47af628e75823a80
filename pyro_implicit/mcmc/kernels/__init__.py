# SPDX-License-Identifier: Apache-2.0
"""Markov kernels: pure functions whose states, settings and adaptations are values.

A kernel is one file with

- ``init(position, score) -> state``: start at positions ``(num_chains, d)``;
- ``step(state, score, settings) -> (state, info)``: one transition of all chains;
- an adaptation, a frozen value that gives the ``settings`` of the next step.

``score`` maps points to their log-densities and gradients. A state has ``position``, and an info
``num_gradients``. To add a kernel, write its file and add a line to ``KERNELS``.

:mod:`~pyro_implicit.mcmc.kernels.protocol` defines the types of these functions, and the methods of
an adaptation. All kernels take the same arguments and ignore what they do not need. With all data,
states have ``log_density`` and infos ``acceptance``, too. Minibatch chains choose the
step size of :mod:`~pyro_implicit.mcmc.kernels.sghmc` themselves
(:func:`~pyro_implicit.mcmc.kernels.step_choice.choose_step`).
"""

from __future__ import annotations

from typing import NamedTuple

from pyro_implicit.mcmc.kernels import hmc, mams, mclmc, sghmc, slice_sampling
from pyro_implicit.mcmc.kernels.protocol import Init, MakeTuning, Transition

__all__ = ["KERNELS", "Kernel"]


class Kernel(NamedTuple):
    """A kernel's functions.

    ``adaptation(policy, max_gradients)`` makes the first adaptation of a kernel with all data; it
    is None for a kernel of minibatches, whose settings and states are those of ``sghmc``. Chains of
    a ``separate`` kernel have no common frame and settings. An ``exact`` kernel leaves the density
    invariant once it is frozen.
    """

    init: Init
    step: Transition
    adaptation: MakeTuning | None = None
    separate: bool = False
    exact: bool = True


KERNELS = {
    "hmc": Kernel(hmc.init, hmc.step, adaptation=hmc.adaptation),
    "mams": Kernel(mams.init, mams.step, adaptation=mams.adaptation, separate=True),
    "mclmc": Kernel(
        mclmc.init, mclmc.step, adaptation=mclmc.adaptation, separate=True, exact=False
    ),
    "slice": Kernel(slice_sampling.init, slice_sampling.step, adaptation=slice_sampling.adaptation),
    "sghmc": Kernel(sghmc.init, sghmc.step, exact=False),
}
