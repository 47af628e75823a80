# SPDX-License-Identifier: Apache-2.0
"""Files and random streams from which a killed run goes on to the same last bit."""

from __future__ import annotations

import functools
import os
import pickle
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pyro.util import get_rng_state, set_rng_state
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = [
    "load_file",
    "random_streams",
    "read_file",
    "restore_random_streams",
    "save_file",
    "write_file",
]

#: Raised by one whenever an older version's files cannot be read any more.
FORMAT = 1
#: What the random state of numpy is made of.
NUMPY_STATES: list[Any] = [
    np.empty(0).__reduce__()[0],
    np.ndarray,
    np.dtype,
    type(np.dtype("uint32")),
]
CURE = (
    "Cure: a file that this version wrote; a checkpoint may be removed, and its run begins from "
    "the start"
)


def write_file(path: Path, content: Any, kind: str) -> None:
    """Write anything that pickles, as :func:`save_file` does.

    :param kind: of what it is, in words; only a file of the same is read.
    """
    save_file(path, {"pyro_implicit": kind, "format": FORMAT, "content": content})


def read_file(
    path: Path, device: torch.device | str, kind: str, classes: Iterable[type] | None = None
) -> Any:
    """What :func:`write_file` wrote, on a device.

    :param classes: that may be in it beside tensors and numbers. With None any may be, and code
        may be run: only read such files that you have written.
    :raises ValueError: for a file that is damaged, or not of this kind, or of another format.
    """
    if classes is None:
        found = load_file(path, weights_only=False, map_location=device)
    else:
        with torch.serialization.safe_globals([*NUMPY_STATES, *classes]):
            found = load_file(path, weights_only=True, map_location=device)
    if not isinstance(found, dict) or "pyro_implicit" not in found:
        raise ValueError(f"{path} is a file of something else than {kind}. {CURE}")
    if found["pyro_implicit"] != kind:
        raise ValueError(f"{path} is a file of {found['pyro_implicit']}, not of {kind}. {CURE}")
    if found["format"] != FORMAT:
        raise ValueError(
            f"{path} has the format {found['format']} of another version, and this one reads "
            f"{FORMAT}. {CURE}"
        )
    return found["content"]


def save_file(path: Path, content: Any) -> None:
    """``torch.save`` of a file that is complete or not there at all, whenever the process dies.

    :raises OSError: if it cannot be written, as on a full disk; what was there is as it was.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        # Torch puts an error of its own in the place of the system's.
        cause = error.__context__ if isinstance(error, RuntimeError) else error
        if not isinstance(cause, OSError):
            raise
        before = "the file that was there is as it was" if path.exists() else "there is no file"
        raise OSError(
            cause.errno,
            f"could not be written ({cause.strerror or cause}), and {before}. Cure: room on the "
            "disk, or another folder",
            str(path),
        ) from error
    _sync_folder(path.parent)


def load_file(path: Path, **options: Any) -> Any:
    """``torch.load`` of a file that must be whole: torch does not see bits that are flipped.

    :param options: of ``torch.load``; with ``mmap=True`` such bits are not looked for.
    :raises ValueError: for a file that is empty, cut off, changed or no file of torch's.
    """
    try:
        with zipfile.ZipFile(path) as file:
            damaged = None if options.get("mmap") else file.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"its part {damaged} was changed")
        return torch.load(path, **options)
    except OSError:
        raise
    except (AttributeError, ImportError) as error:
        raise ValueError(
            f"{path} holds what cannot be imported here ({error}). Cure: define or import it where "
            "it was when the file was written; or a file that this version wrote"
        ) from error
    except (zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError, LookupError) as error:
        reason = str(error).split("\n")[0]
        size = path.stat().st_size
        raise ValueError(
            f"{path} ({size} bytes) is damaged or foreign: {reason}. {CURE}"
        ) from error


def _sync_folder(folder: Path) -> None:
    """Let the new name, too, outlast a loss of power."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def random_streams() -> dict[str, Any]:
    """The states of all random number generators."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": get_rng_state(), "cuda": cuda}


def restore_random_streams(states: dict[str, Any]) -> None:
    """Put back what :func:`random_streams` gave."""
    # Wherever the file was read to: random states are tensors on the CPU.
    to_cpu = functools.partial(pytree.tree_map_only, Tensor, Tensor.cpu)
    set_rng_state(to_cpu(states["cpu"]))
    if len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(to_cpu(states["cuda"]))
