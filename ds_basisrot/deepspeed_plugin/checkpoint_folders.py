"""The folders of a checkpoint while it is written and put in place, and how to tell after a kill what they hold.

    <tag>.partial     being written; complete when it has the file COMPLETE
    <tag>             a checkpoint
    <tag>.replaced    what <tag> was before, until the new one is in place and named the latest

Nothing here is collective; the caller lets all ranks finish a step before any begins the next. Ranks that see the same file system may take
a step at the same time, and ranks on file systems of their own each take it for themselves.
"""

import fnmatch
import os
import shutil
from contextlib import suppress
from typing import NamedTuple

PARTIAL, REPLACED = ".partial", ".replaced"

# Each of our folders has one of these, and keeps it until all else in it is removed: a user's folder that is called alike has none.
STARTED, COMPLETE = "ds_basisrot.started", "ds_basisrot.complete"

# What a save writes anew. Whatever else a script has put into the folder of a tag stays there.
WRITTEN = ("*_states.pt", "offloaded_tensors", "async_pipeline-*", "basis_rotation", "ds_basisrot.*", "latest.rank_*")


class Look(NamedTuple):
    """What there is of a tag."""

    present: bool
    ready: bool  # a complete new one waits beside it
    replaced: bool


def start(folder: str) -> None:
    """Make the folder to write to."""
    os.makedirs(folder + PARTIAL, exist_ok=True)
    _touch(os.path.join(folder + PARTIAL, STARTED))


def complete(folder: str) -> None:
    """Say that everything is written, after taking over what does not belong to the checkpoint from the one that it replaces."""
    partial = folder + PARTIAL
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        source, target = os.path.join(folder, name), os.path.join(partial, name)
        if any(fnmatch.fnmatch(name, pattern) for pattern in WRITTEN):
            continue
        if os.path.isdir(source):
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copy2(source, target)
    _rename(os.path.join(partial, STARTED), os.path.join(partial, COMPLETE))


def move_aside(folder: str) -> None:
    """Make place for the new one."""
    if os.path.isdir(folder):
        with suppress(FileNotFoundError):
            _touch(os.path.join(folder, COMPLETE))
            os.rename(folder, folder + REPLACED)


def put_in_place(folder: str) -> bool:
    """Give the new one its name; returns whether it has it now: a job that loads may have been first."""
    return _rename(folder + PARTIAL, folder) or os.path.exists(os.path.join(folder, COMPLETE))


def put_back(folder: str) -> None:
    """Undo `move_aside`."""
    _rename(folder + REPLACED, folder)


def name_latest(save_dir: str, tag: str, rank: int) -> None:
    """Replace the file that says which checkpoint is the latest."""
    written = os.path.join(save_dir, tag, f"latest.rank_{rank:05d}")
    with open(written, "w") as file:
        file.write(tag)
    os.replace(written, os.path.join(save_dir, "latest"))


def remove_replaced(folder: str) -> None:
    """Remove what was moved aside."""
    _remove(folder + REPLACED)


def look(folder: str) -> Look:
    """What there is of a tag, also while another process puts it in place: of two looks at <tag>, one is after that at the new one."""
    present = os.path.isdir(folder)
    ready = os.path.exists(os.path.join(folder + PARTIAL, COMPLETE))
    replaced = os.path.exists(os.path.join(folder + REPLACED, COMPLETE))
    return Look(present or os.path.isdir(folder), ready, replaced)


def left_behind(parent: str) -> list[str]:
    """Tags of a folder of checkpoints that a save may have left halfway."""
    names = os.listdir(parent) if os.path.isdir(parent) else []
    tags = {name.removesuffix(suffix) for suffix in (PARTIAL, REPLACED) for name in names if name.endswith(suffix)}
    return sorted(tag for tag in tags if look(os.path.join(parent, tag))[1:] != (False, False))


def clear(parent: str) -> None:
    """Remove all that killed saves have left in a folder of checkpoints."""
    for name in os.listdir(parent) if os.path.isdir(parent) else ():
        path = os.path.join(parent, name)
        if name.endswith((PARTIAL, REPLACED)) and _is_ours(path):
            _remove(path)


def _is_ours(folder: str) -> bool:
    """Whether a save made a folder: it has our mark, or nothing in it yet or any more."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return not names or STARTED in names or COMPLETE in names


def _rename(source: str, target: str) -> bool:
    """Rename; False where another process has done it already."""
    try:
        os.rename(source, target)
    except FileNotFoundError:
        return False
    return True


def _touch(path: str) -> None:
    with open(path, "a"):
        pass


def _remove(folder: str) -> None:
    """Remove a folder, its mark last: what a kill leaves of it is still known to be ours, and not to be complete."""
    if os.path.islink(folder):
        os.unlink(folder)
    _rename(os.path.join(folder, COMPLETE), os.path.join(folder, STARTED))
    while os.path.isdir(folder):
        with suppress(FileNotFoundError):  # another process is removing it too
            for name in sorted(os.listdir(folder), key=lambda name: name in (STARTED, COMPLETE)):
                path = os.path.join(folder, name)
                if os.path.isdir(path) and not os.path.islink(path):
                    shutil.rmtree(path)
                else:
                    os.unlink(path)
            os.rmdir(folder)
