"""What a sharded BasisRotation adds to DeepSpeed's checkpoints, and takes from them."""

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..common.blocks import ConfigError
from ..common.log import log
from ..optim.basis_rotation import RESTORED_OPTIONS
from ..sharding import states
from . import rotation_files

# In the client state of a checkpoint: the tag that it was saved under, and the mark that is in their index too. DeepSpeed's tools
# leave our files where they are, and other optimizers leave old ones behind under a tag that they save anew.
CLIENT_KEY = "ds_basisrot"


@contextmanager
def saving(engine: Any, folder: str, tag: str) -> Iterator[dict[str, Any]]:
    """Write our files; inside, DeepSpeed's own have Adam's flat states. Gives what belongs into their client state.

    Args:
        folder: to write to.
        tag: that the checkpoint will have.
    """
    optimizer = engine.basic_optimizer
    optimizer.settle()
    mark = rotation_files.write(optimizer, folder, engine.global_steps)
    try:
        states.add_flat_states(optimizer)
        yield {CLIENT_KEY: {"tag": tag, "mark": mark}}
    finally:
        states.drop_flat_states(optimizer)


def load(engine: Any, original: Callable, *args: Any, **kwargs: Any) -> Any:
    """`load_checkpoint`, then our files; without them bases start anew."""
    bound = inspect.signature(original).bind(engine, *args, **kwargs)
    bound.apply_defaults()
    arguments, optimizer = bound.arguments, engine.basic_optimizer
    kept = [{k: v for k, v in group.items() if k != "params" and k not in RESTORED_OPTIONS} for group in optimizer.param_groups]
    try:
        path, client_state = load_with_bf16_states(engine, original, *args, **kwargs)
        for group, options in zip(optimizer.param_groups, kept):
            group.update(options)
        saved = client_state.pop(CLIENT_KEY, None) if client_state else None
        if path is not None and arguments["load_optimizer_states"] and not arguments["load_module_only"]:
            _load_states(engine, arguments["load_dir"], path, saved)
    finally:
        states.drop_flat_states(optimizer)
        _unlink(engine)
    return path, client_state


def _load_states(engine: Any, load_dir: str, path: str, saved: dict[str, str] | None) -> None:
    """Our files of the checkpoint that DeepSpeed has loaded from `path`, or Adam's flat states.

    Args:
        saved: what `saving` gave for the client state; None: another optimizer saved this.
    """
    optimizer = engine.basic_optimizer
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    found = rotation_files.find([folder, os.path.join(load_dir, saved["tag"])] if saved else [])
    if found is not None:
        where, index = found
        if index["mark"] != saved["mark"]:
            raise ConfigError(
                f"{os.path.join(where, rotation_files.FOLDER)} is not what was saved with the checkpoint {folder}: put the files of that "
                "one there, or remove the folder to start with fresh bases"
            )
        if index["global_steps"] != engine.global_steps:
            raise ConfigError(
                f"{os.path.join(where, rotation_files.FOLDER)} is of update {index['global_steps']}, the checkpoint {folder} of "
                f"{engine.global_steps}: put the files of that one there, or remove the folder to start with fresh bases"
            )
        rotation_files.read(optimizer, where, index)
    elif states.restore_from_adam(optimizer, engine.global_steps):
        log(f"{folder} has no rotation states: bases start anew, Adam's momentum is kept")
    else:
        log(f"{folder} has no optimizer states: momenta and bases start anew")


def load_with_bf16_states(engine: Any, original: Callable, *args: Any, **kwargs: Any) -> Any:
    """`load_checkpoint` also for the bf16 optimizer of a pipeline without ZeRO, whose files DeepSpeed 0.19 writes but does not read.

    It hands that optimizer the states of rank 0 instead, in a form that it does not know, and leaves its float32 weights as they were.
    """
    wrapper = engine.optimizer
    if type(wrapper).__name__ != "BF16_Optimizer" or engine.zero_optimization():
        return original(engine, *args, **kwargs)
    arguments = inspect.signature(original).bind(engine, *args, **kwargs)
    arguments.apply_defaults()
    wanted = arguments.arguments["load_optimizer_states"] and not arguments.arguments["load_module_only"]
    wrapper.load_state_dict = lambda *_, **__: None
    try:
        path, client_state = original(*arguments.args, **arguments.kwargs)
    finally:
        del wrapper.load_state_dict
    if path is not None:
        folder = os.path.dirname(path) if os.path.isfile(path) else path
        if not (wanted and engine._load_zero_checkpoint(os.path.dirname(folder), os.path.basename(folder))):
            wrapper._restore_from_bit16_weights()
    return path, client_state


def _unlink(engine: Any) -> None:
    """Let go of the flat states that DeepSpeed has linked to parameters."""
    for p in engine.module.parameters():
        mapping = getattr(p, "_hp_mapping", None)
        if mapping is not None:
            mapping.optim_fragment = {}
