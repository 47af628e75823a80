# SPDX-License-Identifier: Apache-2.0
"""Generators that fold their noise, so that their density is unknown: a record and a warning."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_implicit.infer.engine.steps import StepELBO
from pyro_implicit.infer.policy import ELBOS
from pyro_implicit.runtime.messages import warn_user

__all__ = ["FoldWarning", "Orientation", "note_orientation", "warn_of_folds"]


class FoldWarning(UserWarning):
    """A generator maps different noise to the same values, so that its density is unknown."""


class Orientation(NamedTuple):
    r"""Where the determinant of a generator's Jacobian has another sign than elsewhere.

    The determinant of an injective generator has one sign. Conversely, a generator whose
    determinant is 0 nowhere, and whose values grow without limit with the noise, is injective
    (Hadamard's theorem); a :class:`~pyro_implicit.ResidualGenerator` with bounded activations has
    such values. So a fold has draws with the rarer sign, called *reversed*. Training may change
    the sign everywhere, so that only draws of the same step and of the step before are compared.

    ``mean_sign`` is the mean sign of the last step's draws, ``reversed_share`` the moving average
    over steps of the share of reversed draws; both are scalars.
    """

    mean_sign: Tensor
    reversed_share: Tensor

    @classmethod
    def before(cls, signs: Tensor) -> Orientation:
        """Return the record before the first step, whose determinants have these signs."""
        return cls(signs.mean(), torch.zeros_like(signs.mean()))

    def is_reversed(self, signs: Tensor) -> Tensor:
        """Return which draws of the next step have the rarer sign."""
        return signs * (self.mean_sign + signs.mean()) < 0

    def after(self, signs: Tensor) -> Orientation:
        """Return the record after the next step."""
        mean = signs.mean()
        if signs.numel() > 1:
            share = torch.minimum((signs > 0).to(mean).mean(), (signs < 0).to(mean).mean())
        else:  # it can be compared only with the draw of the step before
            share = (signs * self.mean_sign < 0).to(mean).mean()
        return Orientation(mean, self.reversed_share.lerp(share, 1 - ELBOS.fold_decay))


def note_orientation(elbo: StepELBO, site: str, signs: Tensor) -> Tensor:
    """Note the signs of the determinants at a step's draws; return which draws are reversed.

    :param site: the name of the site.
    :param signs: ``(num_particles, *plates)``; draws without a finite sign do not count.
    """
    known = elbo.remember("orientation", site, lambda: Orientation.before(signs))
    if torch.is_grad_enabled():  # in training
        elbo.state.memory["orientation", site] = known.after(signs)
    return known.is_reversed(signs)


def warn_of_folds(elbo: StepELBO) -> None:
    """Warn once of each site whose generator has lately had too many reversed draws."""
    for site, known in elbo.remembered("orientation").items():
        share = float(known.reversed_share)
        if share > ELBOS.max_reversed and site not in elbo.state.folded_sites:
            elbo.state.folded_sites.add(site)
            warn_user(
                f"{type(elbo).__name__}, step {elbo.num_steps_taken}: the generator of site "
                f"'{site}' folds: the determinant of its Jacobian has another sign at {share:.1%} "
                "of its draws than at the rest. In a fold, several noises have the same value, and "
                "the density counts one of them, so that the loss is too low and no bound. Cure: "
                "AutoregressiveGenerator, which cannot fold, or a smaller core_dim, a narrower "
                "network or a smaller learning rate",
                FoldWarning,
            )
