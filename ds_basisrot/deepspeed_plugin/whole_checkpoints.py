"""DeepSpeed's `save_checkpoint` so that a job killed at any moment leaves the checkpoints it had, or the new one with all its files.

DeepSpeed writes the files of a checkpoint one by one where they will be read. Here it writes them, and we ours, into a folder beside that
(see checkpoint_folders); when all ranks have, the folder gets its name, and when it has it on all nodes, `latest` names it. Every rank
ends a step before any begins the next, so what is found after a kill tells how far all had come: `settle` goes on from there. (A machine
that loses power may also lose what its file system had not put on the disk yet.)
"""

import glob
import inspect
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

from ..common.blocks import ConfigError
from ..common.log import log
from . import checkpoint, checkpoint_folders, zero_checkpoint
from .config import SHARDED_OPTIMIZER
from .on_all_ranks import on_all_ranks

# The only one of DeepSpeed's writers that has written when it returns, and in one way.
WRITER = "TorchCheckpointEngine"

UNIVERSAL = "zero"
"""A folder that converted checkpoints have, and others have not."""


def save(engine: Any, original: Callable, *args: Any, **kwargs: Any) -> Any:
    """`save_checkpoint` with our files, whole or not at all. Every rank calls it.

    Raises:
        ConfigError: a tag that cannot be the name of a checkpoint, or that differs between ranks.
        RuntimeError: on all ranks, where one could not write: which, and why. What was saved before is as it was.
    """
    bound = inspect.signature(original).bind(engine, *args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    save_dir, tag = arguments["save_dir"], arguments["tag"]
    if not save_dir:
        return original(*bound.args, **bound.kwargs)
    tag = os.path.normpath(f"global_step{engine.global_steps}" if tag is None else str(tag))

    def write(folder: str) -> Any:
        with _own_files(engine, save_dir, folder, tag) as client_state:
            arguments.update(tag=folder, client_state={**arguments["client_state"], **client_state})
            return original(*bound.args, **bound.kwargs)

    if type(engine.checkpoint_engine).__name__ != WRITER:
        log(f"save_checkpoint: {type(engine.checkpoint_engine).__name__} writes in place, a killed save leaves an incomplete {tag}")
        return write(tag)

    save_latest, arguments["save_latest"] = arguments["save_latest"], False
    folder = os.path.join(save_dir, tag)
    parent = os.path.dirname(folder)
    _check_tags(tag)
    settle(engine, parent)
    _on_nodes(engine, partial(checkpoint_folders.clear, parent), f"remove what killed saves left in {parent}")
    on_all_ranks(partial(checkpoint_folders.start, folder), f"write to {parent}")
    with _held_back(engine) as faults:
        saved = write(tag + checkpoint_folders.PARTIAL)

    def check() -> None:
        if faults:
            raise faults[0]

    on_all_ranks(check, f"write checkpoint {folder}")
    _on_nodes(engine, partial(checkpoint_folders.complete, folder), f"complete checkpoint {folder}")
    _on_nodes(engine, partial(checkpoint_folders.move_aside, folder), f"replace checkpoint {folder}")
    if not any(_on_nodes(engine, partial(checkpoint_folders.put_in_place, folder), f"name checkpoint {folder}")):
        raise RuntimeError(f"{folder}{checkpoint_folders.PARTIAL} was removed while it was written")
    if save_latest:
        name = partial(checkpoint_folders.name_latest, save_dir, tag, engine.global_rank)
        _on_nodes(engine, name, f"name {folder} the latest checkpoint")
    _on_nodes(engine, partial(checkpoint_folders.remove_replaced, folder), f"remove what was checkpoint {folder} before")
    log(f"checkpoint {folder} is complete")
    return saved


def load(engine: Any, original: Callable, *args: Any, **kwargs: Any) -> Any:
    """`load_checkpoint`, after what killed saves left is brought into order. Every rank calls it.

    Raises:
        ConfigError: a tag that no checkpoint has, a universal checkpoint that lacks something, or ZeRO states of another number of ranks.
    """
    from deepspeed.runtime.zero.utils import ZeRORuntimeException

    from .tied_layers import tied_keys

    bound = inspect.signature(original).bind(engine, *args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    _check_ties(engine)
    arguments["tag"] = settle_before_load(engine, arguments["load_dir"], arguments["tag"])
    if hasattr(engine, "async_pipeline"):
        checkpoint.check(engine, arguments["load_dir"], arguments["tag"], arguments["load_module_only"])
    read = zero_checkpoint.load if _is_sharded(engine) else zero_checkpoint.load_with_bf16_states
    try:
        return read(engine, original, *bound.args[1:], **bound.kwargs)
    except ZeRORuntimeException as error:
        way_out = "Convert it with python -m deepspeed.checkpoint.ds_to_universal, and load that with checkpoint.load_universal true"
        if tied_keys(engine.module):
            way_out = "With tied layers it cannot be converted either: resume with as many replicas"
        raise ConfigError(f"{os.path.join(arguments['load_dir'], str(arguments['tag']))}: {error} {way_out}") from None


def _check_ties(engine: Any) -> None:
    """Refuse what a universal checkpoint does not have: states of each stage's copy of tied layers, and sums that are late."""
    if not (engine.load_universal_checkpoint() and (hasattr(engine, "async_pipeline") or _is_sharded(engine))):
        return
    from .tied_layers import tied_keys

    keys = tied_keys(engine.module)
    if keys:
        raise ConfigError(
            f"checkpoint.load_universal: layers are tied ({', '.join(keys)}), and a universal checkpoint does not have the states of each "
            "stage's copy; resume with as many stages and replicas, without it"
        )


def settle_before_load(engine: Any, load_dir: str, tag: Any) -> Any:
    """Bring what is about to be loaded into order; returns its tag, None where there is no latest.

    Where nodes have file systems of their own, a kill may have left the new name in some files `latest` and the old one in others. Both are
    complete then, and rank 0's is what all take.
    """
    if tag is None:
        name = "latest_universal" if engine.load_universal_checkpoint() else "latest"
        tag = on_all_ranks(lambda: _latest(load_dir, name), f"read {load_dir}")[0]
        if tag and name != "latest":
            on_all_ranks(lambda: _check_not_overtaken(load_dir, tag), f"read {load_dir}")
        if tag == "":
            raise ConfigError(
                f"{os.path.join(load_dir, name)} is empty: write the name of a checkpoint into it, or give load_checkpoint a tag"
            )
    if tag is not None:
        folder = os.path.join(load_dir, str(tag))
        _check_tag(os.path.normpath(str(tag)))
        settle(engine, os.path.dirname(folder))
        looks = on_all_ranks(lambda: (os.path.isdir(folder), os.path.isdir(os.path.join(folder, UNIVERSAL))), f"read {folder}")
        if not any(present for present, _ in looks):
            raise ConfigError(f"{folder}: there is no such checkpoint; give load_checkpoint the tag of another")
        universal = any(is_universal for _, is_universal in looks)
        if universal and not engine.load_universal_checkpoint():
            raise ConfigError(f"{folder} is a universal checkpoint: set checkpoint.load_universal true, or load the one it was made from")
        if not universal and engine.load_universal_checkpoint():
            raise ConfigError(f"{folder} is no universal checkpoint: remove checkpoint.load_universal, or load one that was converted")
    return tag


def settle(engine: Any, parent: str) -> None:
    """Put the checkpoints in place whose save was killed while it did so. Every rank calls it.

    Nothing is moved before all ranks have written all. So where a checkpoint is missing on one node, all can have the new one, unless
    somebody has removed it: then the old one is put back.

    Args:
        parent: folder of checkpoints.
    """
    found = on_all_ranks(lambda: checkpoint_folders.left_behind(parent), f"read {parent}")
    for tag in sorted(set().union(*found)):
        folder = os.path.join(parent, tag)
        looks = on_all_ranks(partial(checkpoint_folders.look, folder), f"read {folder}")
        mine, lost = looks[engine.global_rank], [look for look in looks if not look.present]
        if lost and all(look.present or look.ready for look in looks):
            make_place = partial(checkpoint_folders.move_aside, folder)
            _on_nodes(engine, make_place, f"replace checkpoint {folder}", needed=mine.present and mine.ready)
            _on_nodes(engine, partial(checkpoint_folders.put_in_place, folder), f"name checkpoint {folder}", needed=mine.ready)
            log(f"checkpoint {folder}: its save was killed when all was written; it is in place now")
        elif any(look.replaced for look in lost):
            put_back = partial(checkpoint_folders.put_back, folder)
            _on_nodes(engine, put_back, f"put checkpoint {folder} back", needed=not mine.present and mine.replaced)
            log(f"checkpoint {folder}: what a killed save was about to put there is gone; the one before is back")


def _latest(load_dir: str, name: str) -> str | None:
    with suppress(FileNotFoundError), open(os.path.join(load_dir, name)) as file:
        return file.read().strip()
    return None


def _check_not_overtaken(load_dir: str, tag: str) -> None:
    """Refuse the latest universal checkpoint where the run has saved since: a job that resumes for the second time would go back to it."""
    saved = _latest(load_dir, "latest")
    updates = [_update_of(os.path.join(load_dir, each)) if each else None for each in (tag, saved)]
    if None not in updates and updates[0] < updates[1]:
        raise ConfigError(
            f"checkpoint.load_universal: {os.path.join(load_dir, 'latest_universal')} names {tag} of update {updates[0]}, and "
            f"{os.path.join(load_dir, 'latest')} names {saved} of update {updates[1]}; remove load_universal to go on from that one, or "
            f"give load_checkpoint the tag {tag!r}"
        )


def _update_of(folder: str) -> int | None:
    """Of which update a checkpoint is; None where its first file does not say."""
    files = sorted(glob.glob(os.path.join(glob.escape(folder), "*mp_rank_00_model_states.pt")))
    try:
        return int(torch.load(files[0], map_location="cpu", mmap=True, weights_only=False)["global_steps"])
    except Exception:  # whatever is wrong with it, whoever loads it will say
        return None


def _check_tags(tag: str) -> None:
    tags = on_all_ranks(lambda: _check_new_tag(tag), "say its tag")
    other = next((rank for rank, its in enumerate(tags) if its != tags[0]), None)
    if other is not None:
        raise ConfigError(f"save_checkpoint: tag {tags[0]!r} on rank 0, {tags[other]!r} on rank {other}: give all ranks the same")


def _check_new_tag(tag: str) -> str:
    if any(sign in tag for sign in "*?["):
        raise ConfigError(f"tag {tag!r} has one of *?[, and DeepSpeed could not find it again; choose another")
    return _check_tag(tag)


def _check_tag(tag: str) -> str:
    if os.path.basename(tag) in ("", ".", "..") or tag.endswith((checkpoint_folders.PARTIAL, checkpoint_folders.REPLACED)):
        raise ConfigError(
            f"tag {tag!r} is no name of a checkpoint: folders that end in {checkpoint_folders.PARTIAL} or {checkpoint_folders.REPLACED} "
            "are what saving leaves when it is killed; choose another"
        )
    return tag


def _is_sharded(engine: Any) -> bool:
    return type(getattr(engine, "basic_optimizer", None)).__name__ == SHARDED_OPTIMIZER


@contextmanager
def _own_files(engine: Any, save_dir: str, folder: str, tag: str) -> Iterator[dict[str, Any]]:
    """Write our files into `folder` of `save_dir`; gives what belongs into the client state of DeepSpeed's, which are written inside."""
    pipeline = getattr(engine, "async_pipeline", None)
    if pipeline is not None:
        path = os.path.join(save_dir, folder)
        mark = on_all_ranks(lambda: uuid.uuid4().hex, "begin to save")[0]
        on_all_ranks(lambda: checkpoint.save(pipeline, path, mark), f"write to {path}")
    if not _is_sharded(engine):
        yield {}
        return
    with zero_checkpoint.saving(engine, os.path.join(save_dir, folder), tag) as client_state:
        yield client_state


@contextmanager
def _held_back(engine: Any) -> Iterator[list[Exception]]:
    """Inside, what goes wrong in writing DeepSpeed's files is not raised but put into a list: the other ranks wait for this one."""
    faults: list[Exception] = []

    def holding(write: Callable) -> Callable:
        def held(*args: Any, **kwargs: Any) -> None:
            if not faults:
                try:
                    write(*args, **kwargs)
                except Exception as error:
                    faults.append(error)

        return held

    places = [(engine.checkpoint_engine, "makedirs"), (engine.checkpoint_engine, "save"), (engine, "_copy_recovery_script")]
    for owner, name in places:
        setattr(owner, name, holding(getattr(owner, name)))
    try:
        yield faults
    finally:
        for owner, name in places:
            delattr(owner, name)


def _on_nodes(engine: Any, action: Callable[[], Any], what: str, needed: bool = True) -> list[Any]:
    """A step that one rank takes on every node where it is needed, since nodes may share a file system or have their own."""
    return on_all_ranks(lambda: action() if needed and engine.local_rank <= 0 else None, what)
