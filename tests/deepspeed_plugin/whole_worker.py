"""Saves and loads checkpoints of a plain DeepSpeed engine step by step, and dies or fails in the middle where a case says so.

    torchrun --nproc_per_node N whole_worker.py CASES.json OUT

A case is one of zero_worker.py with "steps": ["train"], ["save", folder, tag, options, STOP] and ["load", folder, tag]; folders are in
OUT and "{rank}" in a tag is the rank. With "nodes" each rank has a file system of its own, and is the first one there. Each rank writes
OUT/<name>/rank_<r>.pt: what the steps returned or the message of their error, and the weights.
"""

import errno
import itertools
import os
from contextlib import contextmanager, nullcontext

import deepspeed
import torch
import torch.distributed as dist
import worker
import zero_worker

from ds_basisrot.deepspeed_plugin import rotation_files, stage_file

CALLS = [
    (torch, "save"), (stage_file, "save_file"), (rotation_files, "save_file"), (deepspeed.runtime.engine, "copyfile"),
    (os, "replace"), (os, "rename"), (os, "unlink"), (os, "rmdir"), (os, "mkdir"),
]  # fmt: skip
NAMES = tuple(name for _, name in CALLS)
WRITES = ("save", "save_file", "copyfile")


@contextmanager
def stopping(rank, how, at, names=NAMES):
    """Inside, the `at`-th of the named CALLS of a rank kills it, half-way through a file or before all else; or it finds a full disk."""
    made, originals = itertools.count(1), {}

    def counted(function, name):
        def call(*args, **kwargs):
            if next(made) < at:
                return function(*args, **kwargs)
            if how == "full":
                raise OSError(errno.ENOSPC, "No space left on device")
            if name in WRITES:
                with open(args[1], "wb") as file:
                    file.write(b"half of a file")
            os._exit(9)

        return call

    for owner, name in [call for call in CALLS if call[1] in names and rank == dist.get_rank()]:
        originals[owner, name] = getattr(owner, name)
        setattr(owner, name, counted(getattr(owner, name), name))
    try:
        yield
    finally:
        for (owner, name), function in originals.items():
            setattr(owner, name, function)


def take(engine, case, out, step, where=None, tag=None, options=None, stop=None):
    """One step of a case; returns what became of it."""
    if step == "train":
        return zero_worker.microstep(engine, case, engine.global_steps, 0)
    tag = tag if tag is None else tag.format(rank=dist.get_rank())
    try:
        if step == "save":
            with stopping(*stop) if stop else nullcontext():
                return engine.save_checkpoint(os.path.join(out, where), tag=tag, **(options or {}))
        path, _ = engine.load_checkpoint(os.path.join(out, where), tag=tag)
        return path, engine.global_steps, zero_worker.weights_of(engine)
    except (RuntimeError, ValueError) as error:
        return str(error)


def run(case, out):
    case = {**zero_worker.DEFAULTS, "steps": [], "nodes": False, **case}
    folder = os.path.join(os.path.abspath(out), case["name"])
    os.makedirs(folder, exist_ok=True)
    if case["nodes"]:
        out = os.path.join(out, f"node_{dist.get_rank()}")
        os.makedirs(out, exist_ok=True)
        os.chdir(out)  # the same paths on each node
        out = "."
        os.environ["LOCAL_RANK"] = "0"
        case["config"] = {"checkpoint": {"use_node_local_storage": True}, **case["config"]}
    engine = zero_worker.initialize(case)
    results = [take(engine, case, out, *step) for step in case["steps"]]
    torch.save({"results": results, "weights": zero_worker.weights_of(engine)}, os.path.join(folder, f"rank_{dist.get_rank()}.pt"))
    engine.destroy()


if __name__ == "__main__":
    worker.main(run, zero_worker.LIMIT_S)
