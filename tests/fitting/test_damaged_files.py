# SPDX-License-Identifier: Apache-2.0
"""Files that were cut off, changed, written by others, or could not be written at all."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import signal
import sys
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal

from pyro_implicit.fitting import Fit, Schedule, checkpoint, train
from pyro_implicit.infer import ImplicitELBO
from pyro_implicit.mcmc.draws import DrawStore
from pyro_implicit.mcmc.driver import Checkpoint
from pyro_implicit.runtime import files as run_files


def model():
    pyro.sample("x", dist.Normal(1.0, 2.0))


def read_training(path):
    guide, options = (
        AutoNormal(model),
        {"progress": False, "schedule": Schedule(num_steps=2), "compile": False},
    )
    train(model, guide, ImplicitELBO(), checkpoint=path.parent, name=path.stem, **options)


def write_result(path):
    guide = AutoNormal(model)
    guide()
    Fit(guide=guide, source=(model, (), {})).save(path)


SETTINGS = {"seed": 1}
KINDS = {
    "a result of fit": (write_result, lambda path: Fit.load(path, model)),
    "a training": (read_training, read_training),  # the first writes it
    "the start of a fit": (lambda path: checkpoint.same_start(path, SETTINGS),) * 2,
    "chains of refine": (
        lambda path: Checkpoint(path, SETTINGS, 1).save(torch.zeros(3)),
        lambda path: Checkpoint(path, SETTINGS, 1).load(torch.device("cpu")),
    ),
}


def flip(whole):
    """A bit in the midst of the largest part, where torch does not see it."""
    middle = whole.rindex(b"numpy") if b"numpy" in whole else len(whole) // 3
    return whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]


DAMAGES = {
    "empty": lambda whole: b"",
    "cut off": lambda whole: whole[: len(whole) // 2],
    "its end lost": lambda whole: whole[:-5],
    "a bit flipped": flip,
    "text": lambda whole: b"hello world\n",
    "a pickle": lambda whole: pickle.dumps({"settings": SETTINGS}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_refused_by_name(kind, tmp_path):
    path = tmp_path / "file.pt"
    write, read = KINDS[kind]
    write(path)
    whole = path.read_bytes()
    for damage in DAMAGES.values():
        path.write_bytes(damage(whole))
        message = rf"file\.pt \({path.stat().st_size} bytes\) is damaged or foreign: .*Cure: a file"
        with pytest.raises(ValueError, match=message):
            read(path)
    path.write_bytes(whole)
    read(path)


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_another_kind_are_refused_by_name(kind, tmp_path):
    path, (_, read) = tmp_path / "file.pt", KINDS[kind]
    torch.save({"x": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match=rf"file\.pt is no file of {kind}"):
        read(path)
    run_files.write_file(path, {}, "a cake")
    with pytest.raises(ValueError, match=rf"file\.pt is a file of a cake, not of {kind}"):
        read(path)
    torch.save({"pyro_implicit": kind, "format": 0, "content": {}}, path)
    with pytest.raises(ValueError, match="the format 0 of another version, and this one reads"):
        read(path)


class Harmful:
    """Runs code where a pickle is trusted."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("kind", ["a training", "the start of a fit"])
def test_checkpoints_of_trainings_run_no_code(kind, tmp_path):
    path, harm = tmp_path / "file.pt", tmp_path / "harm"
    run_files.write_file(path, {"settings": SETTINGS, "losses": Harmful(harm)}, kind)
    with pytest.raises(ValueError, match="damaged or foreign: Weights only load failed"):
        KINDS[kind][1](path)
    assert not harm.exists()


def test_a_class_that_is_gone(tmp_path, monkeypatch):
    write, read = KINDS["a result of fit"]
    monkeypatch.setattr(sys.modules[AutoNormal.__module__], "Lost", type("Lost", (), {}), False)
    lost = sys.modules[AutoNormal.__module__].Lost
    lost.__module__, lost.__qualname__ = AutoNormal.__module__, "Lost"
    Fit(guide=lost()).save(tmp_path / "file.pt")
    monkeypatch.undo()
    with pytest.raises(
        ValueError, match="objects that cannot be imported here .*Lost.*Cure: define"
    ):
        read(tmp_path / "file.pt")


def test_snapshots_of_chains(tmp_path):
    store = DrawStore(tmp_path)
    store.append(torch.zeros(2, 3))
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"draws-000000\.pt \(100 bytes\) is damaged"):
        store.take(torch.tensor([0]))


class FullDisk:
    """A file that takes so many bytes and no more."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)


@pytest.mark.parametrize("room", [0, 700, 2000])
@pytest.mark.parametrize("existed", [True, False])
def test_a_full_disk_leaves_the_old_file(room, existed, tmp_path, monkeypatch):
    path = tmp_path / "file.pt"
    if existed:
        write_result(path)
    before = {one.name: one.read_bytes() for one in tmp_path.iterdir()}
    plain = Path.open

    @contextlib.contextmanager
    def small(self, *args):
        with plain(self, *args) as file:
            yield FullDisk(file, room)

    what = "the older file is unchanged" if existed else "there is no file"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", small)
        message = rf"No space left on device\), and {what}. Cure: room on the disk.*file\.pt"
        with pytest.raises(OSError, match=message) as found:
            run_files.write_file(path, torch.randn(1000), "numbers")
    assert found.value.errno == errno.ENOSPC
    assert {one.name: one.read_bytes() for one in tmp_path.iterdir()} == before


def test_file_and_folder_are_on_the_disk_before_and_after_the_renaming(tmp_path, monkeypatch):
    order = []
    fsync, replace = os.fsync, os.replace

    def spy_sync(descriptor):
        order.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        fsync(descriptor)

    def spy_replace(source, target):
        order.append("renamed")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", spy_sync)
    monkeypatch.setattr(os, "replace", spy_replace)
    run_files.save_file(tmp_path / "file.pt", torch.zeros(3))
    assert order == ["file", "renamed", "folder"]


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


class Deadly(FullDisk):
    """A file in the midst of whose writing the process is killed."""

    def write(self, data):
        self.room -= len(data)
        return die() if self.room < 0 else self.file.write(data)


@contextlib.contextmanager
def deadly_open(self, *args):
    with open(self, *args) as file:
        yield Deadly(file, 1000)


def renamed_and_dead(source, target):
    os.rename(source, target)
    die()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="wants fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("owner", "name", "deadly", "expected"),
    [
        (Path, "open", deadly_open, 1.0),
        (os, "fsync", die, 1.0),
        (os, "replace", die, 1.0),
        (os, "replace", renamed_and_dead, 2.0),
    ],
)
def test_killed_while_writing(owner, name, deadly, expected, tmp_path):
    """By SIGKILL: the file is the one before or the new one, and the next writing succeeds."""
    path = tmp_path / "file.pt"
    run_files.write_file(path, torch.full((1000,), 1.0), "numbers")
    child = os.fork()
    if child == 0:
        setattr(owner, name, deadly)
        run_files.write_file(path, torch.full((1000,), 2.0), "numbers")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    found = run_files.read_file(path, "cpu", "numbers")
    assert torch.equal(found, torch.full((1000,), expected))
    run_files.write_file(path, torch.zeros(1), "numbers")
    assert [one.name for one in tmp_path.iterdir()] == ["file.pt"]
