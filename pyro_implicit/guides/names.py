# SPDX-License-Identifier: Apache-2.0
"""Names of guides in Pyro's parameter store."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import TypeVar

import pyro
from pyro.infer.autoguide import AutoGuide

__all__ = ["forget", "own_names", "refuse_stored"]

AnyGuide = TypeVar("AnyGuide", bound=AutoGuide)


def own_names(guide: AnyGuide) -> AnyGuide:
    """Give a guide names of its own in Pyro's parameter store.

    There all guides of a class have the same names, and the next one made would replace the values
    of those before. The name is unique over processes too, so that a guide which is loaded, or
    comes back from a worker, shares none with those made here; no seeded stream is read for it.

    **Example:**

    >>> from pyro.infer.autoguide import AutoNormal
    >>> guides = [own_names(AutoNormal(lambda: None)) for _ in range(2)]
    >>> guides[0]._pyro_name == guides[1]._pyro_name
    False

    :param guide: any of Pyro's or this library's autoguides, not called yet.
    :returns: the same guide.
    """
    name = f"{type(guide).__name__}_{uuid.uuid4().hex[:16]}"
    guide._pyro_set_supermodule(name, guide._pyro_context)
    return guide


def refuse_stored(guide: AutoGuide, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that Pyro's parameter store holds no other guide's parameters under a guide's names.

    **Example:**

    >>> from pyro.infer.autoguide import AutoNormal
    >>> refuse_stored(AutoNormal(lambda: None), {"loc": (3,)})  # nothing is stored

    :param guide: that is about to make its parameters.
    :param shapes: of these parameters, by the part of their names behind the guide's.
    :raises ValueError: naming one that is stored in another shape.
    """
    if pyro.settings.get("module_local_params"):
        return
    store = pyro.get_param_store()
    for name, shape in shapes.items():
        stored = f"{guide._pyro_name}.{name}"
        if stored in store and (found := tuple(store[stored].shape)) != tuple(shape):
            raise ValueError(
                f"the parameter store holds '{stored}' of another guide (shape {found}, here "
                f"{tuple(shape)}). Cure: pyro.clear_param_store(), or load that of this guide"
            )


def forget(guide: AutoGuide) -> None:
    """Take a guide's parameters out of Pyro's parameter store; the guide keeps its values.

    They return under the same names when the guide is called again.

    **Example:**

    >>> from pyro.infer.autoguide import AutoNormal
    >>> guide = AutoNormal(lambda: pyro.sample("x", pyro.distributions.Normal(0.0, 1.0)))
    >>> values = guide()
    >>> forget(guide)
    >>> len(pyro.get_param_store())
    0

    :param guide: any of Pyro's or this library's autoguides.
    """
    store, prefix = pyro.get_param_store(), f"{guide._pyro_name}."
    for name in list(store.keys()):
        if name.startswith(prefix):
            del store[name]
    # Pyro keeps the tensors, too, that a module's parameters were before they became its own.
    tensors = store._param_to_name
    for tensor in [tensor for tensor, name in tensors.items() if name.startswith(prefix)]:
        del tensors[tensor]
