# SPDX-License-Identifier: Apache-2.0
"""What sees each operation below autograd and vmap."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["DispatchMode"]


class DispatchMode(TorchDispatchMode):
    """Torch's, which does not load torch's compiler when it is entered."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would load its compiler to keep it away from here, in seconds."""
        return False
