# SPDX-License-Identifier: Apache-2.0
"""The size of the largest tensor of a computation."""

from __future__ import annotations

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_implicit.runtime.trees import leaves_of


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest output of any operation."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in leaves_of(output) if isinstance(leaf, Tensor)]
        self.numel = max([self.numel, *sizes])
        return output
