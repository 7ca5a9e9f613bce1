"""Ranks as threads that save through `whole_checkpoints`, on one file system or several, and are killed at any call that changes files."""

import itertools
import os
import shutil
import threading
from contextlib import suppress

from ds_basisrot.deepspeed_plugin import checkpoint_folders, whole_checkpoints

CALLS = [(os, "mkdir"), (os, "rename"), (os, "replace"), (os, "unlink"), (os, "rmdir"), (checkpoint_folders, "_touch"), (shutil, "copy2")]
_local = threading.local()


class Killed(BaseException):
    pass


class TorchCheckpointEngine:
    """DeepSpeed's writer, as far as `whole_checkpoints` knows it."""

    def __init__(self, rank):
        self.rank = rank

    def makedirs(self, path, exist_ok=False):
        os.makedirs(path, exist_ok=exist_ok)

    def save(self, content, path):
        with open(path, "w") as file:
            file.write(content[:1])
        _count()
        with open(path, "w") as file:
            file.write(content)


class Engine:
    """A rank's engine; its states are those after update `global_steps`."""

    basic_optimizer = None

    def __init__(self, global_rank, local_rank, global_steps):
        self.global_rank, self.local_rank, self.global_steps = global_rank, local_rank, global_steps
        self.checkpoint_engine = TorchCheckpointEngine(global_rank)

    def load_universal_checkpoint(self):
        return False

    def _copy_recovery_script(self, save_path):
        pass


def save_checkpoint(engine, save_dir, tag=None, client_state={}, save_latest=True):  # noqa: B006 as DeepSpeed has it
    """What DeepSpeed's does: two files for each rank, written in place."""
    for part in "ab":
        engine.checkpoint_engine.makedirs(os.path.join(save_dir, tag), exist_ok=True)
        content = f"update {engine.global_steps}"
        engine.checkpoint_engine.save(content, os.path.join(save_dir, tag, f"rank_{engine.global_rank}_{part}_states.pt"))
    return True


def _count():
    """One more call of this thread that changes files: the last one, if it was told so."""
    if getattr(_local, "left", None) is not None and next(_local.left) == 0:
        _local.left = None
        _local.killed = True
        raise Killed
    if getattr(_local, "killed", False):
        raise Killed


class Job:
    """Ranks that take steps together. A rank that is killed ends the others at their next meeting.

    Args:
        local_ranks: of each rank, its place on its node.
        folders: of each rank, where it saves; equal ones are a file system that they share.
    """

    def __init__(self, monkeypatch, local_ranks, folders):
        self.local_ranks, self.folders = local_ranks, folders
        self._patches = monkeypatch
        monkeypatch.setattr(whole_checkpoints, "on_all_ranks", self._on_all_ranks)
        monkeypatch.setattr(whole_checkpoints, "log", lambda message: None)
        for owner, name in CALLS:
            monkeypatch.setattr(owner, name, _counted(getattr(owner, name)))

    def save(self, update, tag, kill_rank=None, kill_at=None):
        """Save on all ranks; returns whether all came to the end."""
        return self._run(lambda engine, folder: whole_checkpoints.save(engine, save_checkpoint, folder, tag), update, kill_rank, kill_at)

    def settle(self, kill_rank, kill_at):
        """Only what precedes a load; returns whether all ranks came to the end."""
        return self._run(lambda engine, folder: whole_checkpoints.settle_before_load(engine, folder, None), None, kill_rank, kill_at)

    def load(self, tag=None):
        """Of each rank, the tag that it finds and the contents of its files there."""
        found = [None] * len(self.folders)

        def read(engine, folder):
            name = whole_checkpoints.settle_before_load(engine, folder, tag)
            path, contents = os.path.join(folder, name), set()
            for part in "ab":
                with open(os.path.join(path, f"rank_{engine.global_rank}_{part}_states.pt")) as file:
                    contents.add(file.read())
            found[engine.global_rank] = (name, contents)

        assert self._run(read, None, None, None)
        return found

    def _run(self, action, update, kill_rank, kill_at):
        self._meeting, self._said, self._faults = threading.Barrier(len(self.folders)), [None] * len(self.folders), []
        threads = [
            threading.Thread(target=self._rank, args=(rank, action, update, kill_at if rank == kill_rank else None))
            for rank in range(len(self.folders))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        for fault in self._faults:
            if not isinstance(fault, (Killed, threading.BrokenBarrierError)):
                raise fault
        return not self._faults

    def _rank(self, rank, action, update, kill_at):
        _local.left = None if kill_at is None else itertools.count(kill_at, -1)
        _local.rank, _local.killed = rank, False
        try:
            action(Engine(rank, self.local_ranks[rank], update), self.folders[rank])
        except BaseException as fault:
            self._faults.append(fault)
            self._meeting.abort()
        _local.left, _local.killed = None, False

    def _on_all_ranks(self, action, what):
        result, fault = None, None
        try:
            result = action()
        except Exception as error:
            fault = error
        self._said[_local.rank] = (result, fault)
        self._meeting.wait(30)
        said = list(self._said)
        self._meeting.wait(30)
        for _, fault in said:
            if fault is not None:
                raise RuntimeError(f"could not {what}: {fault!r}")
        return [result for result, _ in said]


def _counted(function):
    def call(*args, **kwargs):
        _count()
        return function(*args, **kwargs)

    return call


def leftovers(folder):
    """Names in a folder of checkpoints that are neither a checkpoint nor `latest`."""
    with suppress(FileNotFoundError):
        return [name for name in os.listdir(folder) if name.endswith((checkpoint_folders.PARTIAL, checkpoint_folders.REPLACED))]
    return []
