# SPDX-License-Identifier: Apache-2.0
"""A check that a model leaves its masks as they were."""

from __future__ import annotations

from typing import Any

import torch
from pyro.distributions import MaskedDistribution
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import Independent

from pyro_implicit.runtime.sites import Site, unmasked_elements

__all__ = ["MaskWatch"]


class MaskWatch(Messenger):
    """Remembers the masks of a run, to find those that the model changes in place.

    Pyro computes densities after the run, with the final masks: ``seen |= y[t] > 0`` changes the
    masks of all earlier sites. Pyro's example of capture and recapture does so.
    """

    def __init__(self) -> None:
        super().__init__()
        self._masks: dict[str, tuple[Site, Tensor]] = {}

    def _pyro_post_sample(self, msg: Any) -> None:
        wrappers = (Independent, MaskedDistribution)
        if site_is_subsample(msg):
            return
        if isinstance(msg["mask"], Tensor) or isinstance(msg["fn"], wrappers):
            self._masks[msg["name"]] = dict(msg), unmasked_elements(msg)

    def refuse_changed(self) -> None:
        """Check that the masks are those at their sites.

        :raises ValueError: naming the first site whose mask has changed.
        """
        for name, (site, before) in self._masks.items():
            if not torch.equal(unmasked_elements(site), before):
                raise ValueError(
                    f"the model changes the mask of site '{name}' after it, in place: Pyro "
                    "computes densities at the end of the run, with the changed mask. Cure: a "
                    "new tensor for each site, such as mask = mask | seen in place of mask |= seen"
                )
