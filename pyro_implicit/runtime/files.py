# SPDX-License-Identifier: Apache-2.0
"""Files that are complete or absent, and are checked when read."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = [
    "load_file",
    "read_file",
    "save_file",
    "write_file",
]


def _numpy_state_types() -> list[Any]:
    return [
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
    """Write anything that can be pickled, as :func:`save_file` does.

    :param kind: the kind of content, in words; :func:`read_file` needs the same.
    """
    save_file(path, {"pyro_implicit": kind, "format": _version(), "content": content})


def read_file(
    path: Path, device: torch.device | str, kind: str, classes: Iterable[type] | None = None
) -> Any:
    """Read a file of :func:`write_file` to a device.

    :param classes: the classes that the file may contain in addition to tensors and numbers. With
        None, it may contain any class and run code: only read files that you have written.
    :raises ValueError: for a file that is damaged, of another kind or of another format.
    """
    if classes is None:
        found = load_file(path, weights_only=False, map_location=device)
    else:
        with torch.serialization.safe_globals([*_numpy_state_types(), *classes]):
            found = load_file(path, weights_only=True, map_location=device)
    if not isinstance(found, dict) or "pyro_implicit" not in found:
        raise ValueError(f"{path} is no file of {kind}. {CURE}")
    if found["pyro_implicit"] != kind:
        raise ValueError(f"{path} is a file of {found['pyro_implicit']}, not of {kind}. {CURE}")
    if found["format"] != _version():
        raise ValueError(
            f"{path} has the format {found['format']} of another version, and this one reads "
            f"{_version()}. {CURE}"
        )
    return found["content"]


def _version() -> int:
    """Version of the file format; raise it whenever older files cannot be read any more."""
    return 2


def save_file(path: Path, content: Any) -> None:
    """Call ``torch.save`` so that the file is complete or absent, whenever the process dies.

    :raises OSError: if it cannot be written, as on a full disk; an older file is unchanged.
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
        # Torch replaces the system's error by its own.
        cause = error.__context__ if isinstance(error, RuntimeError) else error
        if not isinstance(cause, OSError):
            raise
        before = "the older file is unchanged" if path.exists() else "there is no file"
        raise OSError(
            cause.errno,
            f"could not be written ({cause.strerror or cause}), and {before}. Cure: room on the "
            "disk, or another folder",
            str(path),
        ) from error
    _sync_folder(path.parent)


def load_file(path: Path, **options: Any) -> Any:
    """Call ``torch.load``, and check that no bit is flipped, which torch does not.

    :param options: options of ``torch.load``; with ``mmap=True`` there is no check for flipped
        bits.
    :raises ValueError: for a file that is empty, truncated, changed or no file of torch's.
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
            f"{path} holds objects that cannot be imported here ({error}). Cure: define or import "
            "them where they were when the file was written; or a file that this version wrote"
        ) from error
    except (zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError, LookupError) as error:
        reason = str(error).split("\n")[0]
        size = path.stat().st_size
        raise ValueError(
            f"{path} ({size} bytes) is damaged or foreign: {reason}. {CURE}"
        ) from error


def _sync_folder(folder: Path) -> None:
    """Write the new name to disk, too, in case of a loss of power."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
