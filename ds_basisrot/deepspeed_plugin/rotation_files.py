"""The rotation states of a sharded BasisRotation as files of a checkpoint: safetensors of each rank, and an index that names all of them.

    <tag>/basis_rotation/rank_00000.safetensors    states of the matrices that the rank owns, named "<matrix>|<key>"
    <tag>/basis_rotation/index.json                which matrix is where, counters, sizes and SHA-256 of the files

Nothing in them is executed when they are read. The index is written last.
"""

import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..common.blocks import ConfigError
from ..common.log import log
from ..sharding import states
from ..sharding.optimizer import ShardedBasisRotation
from .on_all_ranks import on_all_ranks

FORMAT = 1
FOLDER = "basis_rotation"
INDEX = "index.json"
SEPARATOR = "|"

PARTS = ("files", "matrices", "others", "layouts", "options")
"""Of the index, each by name: the files, the rotated matrices, counters of the other parameters, layouts of the rotated parameters, options
of the groups by their first parameters."""


def write(optimizer: ShardedBasisRotation, folder: str, global_steps: int) -> str:
    """Write the files into a checkpoint's folder. Every rank calls it; returns the mark of these files, equal on all.

    Args:
        folder: of the checkpoint's tag.
        global_steps: updates made, by which a reader knows that the files belong to the rest of the checkpoint.

    Raises:
        RuntimeError: on all ranks, where one could not write.
    """
    folder = os.path.join(folder, FOLDER)
    parts = on_all_ranks(lambda: _write_states(optimizer, folder), "write the rotation states")
    mark = parts[0]["mark"]

    def write_index() -> None:
        if _rank() == 0:
            index: dict[str, Any] = {"format": FORMAT, "global_steps": global_steps, "mark": mark}
            index |= {key: {name: value for part in parts for name, value in part[key].items()} for key in PARTS}
            with _replacing(os.path.join(folder, INDEX)) as partial, open(partial, "w") as file:
                json.dump(index, file)

    on_all_ranks(write_index, "write the rotation states")
    return mark


def _write_states(optimizer: ShardedBasisRotation, folder: str) -> dict[str, dict[str, Any]]:
    """Write this rank's file; returns its part of the index."""
    os.makedirs(folder, exist_ok=True)
    name = f"rank_{_rank():05d}.safetensors"
    tensors, matrices = {}, {}
    for matrix, state in states.named_states(optimizer).items():
        tensors |= {f"{matrix}{SEPARATOR}{key}": value.contiguous() for key, value in state.items() if torch.is_tensor(value)}
        matrices[matrix] = {"file": name, "state": {key: value for key, value in state.items() if not torch.is_tensor(value)}}
    with _replacing(os.path.join(folder, name)) as partial:
        save_file(tensors, partial, metadata={"format": str(FORMAT)})
        about = {"bytes": os.path.getsize(partial), "sha256": _sha256(partial)}
    others = states.flat_bookkeeping(optimizer)
    of_groups = {"layouts": states.layouts(optimizer), "options": states.options(optimizer)}
    return {"mark": uuid.uuid4().hex, "files": {name: about}, "matrices": matrices, "others": others, **of_groups}


@contextmanager
def _replacing(path: str) -> Iterator[str]:
    """A name to write to; what was written takes the place of `path` when it is complete."""
    partial = path + ".partial"
    yield partial
    os.replace(partial, path)


def find(folders: list[str]) -> tuple[str, dict[str, Any]] | None:
    """The first of some checkpoint folders that has our index, and the index, as rank 0 sees them; None where there is none.

    Raises:
        ConfigError: an index that cannot be read, or of a later format.
    """
    found: list[Any] = [None, None]
    if _rank() == 0:
        try:
            found[0] = _read_index(folders)
        except ConfigError as error:
            found[1] = str(error)
    if dist.is_initialized():
        dist.broadcast_object_list(found, src=0)
    if found[1]:
        raise ConfigError(found[1])
    return found[0]


def read(optimizer: ShardedBasisRotation, folder: str, index: Mapping[str, Any]) -> None:
    """Restore the states from the files that `find` found. Every rank calls it, and all fail where one does.

    Raises:
        ConfigError: a file that is missing, truncated or altered, by its name, or of another model or routing.
    """
    reader = _Reader(os.path.join(folder, FOLDER), index)

    def restore() -> list[str]:
        states.restore(optimizer, reader.state, set(index["matrices"]), index["others"], index["layouts"])
        states.restore_options(optimizer, index["options"])
        return [name for buffer in optimizer.buffers for name in buffer.names if name in index["matrices"]]

    known = set().union(*on_all_ranks(restore, "read the rotation states"))
    unknown = [name for name in index["matrices"] if name not in known]
    if unknown:
        named = ", ".join(unknown[:3]) + (", ..." if len(unknown) > 3 else "")
        log(f"{reader.folder}: the states of {len(unknown)} matrices ({named}) are dropped, this run has none of their names to train")


class _Reader:
    """Reads states of matrices; checks each file that it reads from before the first of them."""

    def __init__(self, folder: str, index: Mapping[str, Any]):
        self.folder, self._index = folder, index
        self._checked: set[str] = set()

    def state(self, matrix: str) -> dict[str, Any] | None:
        """The state of a matrix, None where it had none."""
        entry = self._index["matrices"].get(matrix)
        if entry is None:
            return None
        name = entry["file"]
        path = os.path.join(self.folder, name)
        self._check(name, path)
        try:
            with safe_open(path, framework="pt") as file:
                keys = [key for key in file.keys() if key.rpartition(SEPARATOR)[0] == matrix]
                return {**entry["state"], **{key.rpartition(SEPARATOR)[2]: file.get_tensor(key) for key in keys}}
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path} cannot be read ({error}): it is damaged; resume from another checkpoint") from None

    def _check(self, name: str, path: str) -> None:
        if name in self._checked:
            return
        about = self._index["files"][name]
        if not os.path.exists(path):
            raise ConfigError(f"{path} is missing: copy the whole checkpoint, with its folder {FOLDER}")
        size = os.path.getsize(path)
        if size != about["bytes"]:
            raise ConfigError(f"{path} has {size} bytes, {about['bytes']} were written: it is truncated; resume from another checkpoint")
        if _sha256(path) != about["sha256"]:
            raise ConfigError(f"{path} is not what was written (its SHA-256 differs): it was altered; resume from another checkpoint")
        self._checked.add(name)


def _read_index(folders: list[str]) -> tuple[str, dict[str, Any]] | None:
    for folder in folders:
        path = os.path.join(folder, FOLDER, INDEX)
        if os.path.exists(path):
            try:
                with open(path) as file:
                    index = json.load(file)
                version = index["format"]
                complete = all(isinstance(index[key], dict) for key in PARTS)
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{path} cannot be read ({error}): it is damaged; resume from another checkpoint") from None
            if not complete or not isinstance(version, int) or version > FORMAT:
                raise ConfigError(f"{path}: format {version} is not what this ds_basisrot reads ({FORMAT}); update it")
            return folder, index
    return None


def _sha256(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
