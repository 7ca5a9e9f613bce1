"""What an asynchronous pipeline adds to a DeepSpeed checkpoint, one file for each rank: counters, random states, data read ahead, norms."""

import glob
import os
from typing import Any, NamedTuple

import torch

from ..common.blocks import ConfigError
from ..common.log import log
from . import stage_file
from .microbatches import from_tensors, to_tensors
from .on_all_ranks import on_all_ranks

PREFIX = "async_pipeline-"


def _path(engine: Any, folder: str, replica: int | None = None) -> str:
    grid = engine.grid
    replica = grid.get_data_parallel_id() if replica is None else replica
    name = f"{PREFIX}stage_{grid.get_stage_id():03d}-replica_{replica:03d}.safetensors"
    return os.path.join(folder, name)


def _shared_path(pipeline: Any, folder: str) -> str:
    """Of what all replicas of a stage have in common: the file of the first one, which alone has the sums of tied weights.

    On a node with a file system of its own, where that one is not at hand, this rank's has the rest.
    """
    first, own = _path(pipeline.engine, folder, replica=0), _path(pipeline.engine, folder)
    return own if not pipeline.tied and not os.path.exists(first) and os.path.exists(own) else first


def save(pipeline: Any, folder: str, mark: str) -> None:
    """Write this rank's file into the folder of a checkpoint.

    Args:
        pipeline: the AsyncPipeline, drained.
        folder: of the checkpoint.
        mark: of this save, the same on all ranks.
    """
    engine = pipeline.engine
    os.makedirs(folder, exist_ok=True)
    tensors = {"cpu_rng_state": torch.get_rng_state(), "norms": pipeline.norms.known.cpu()}
    if engine.device.type == "cuda":
        tensors["device_rng_state"] = torch.cuda.get_rng_state(engine.device)
    if engine.grid.get_data_parallel_id() == 0:
        tensors |= {name: tensor.cpu() for name, tensor in pipeline.tied.state().items()}
    ahead = pipeline.feeds.read_ahead()
    if not pipeline.saves_read_ahead:
        log(f"{folder}: microbatches read ahead are not tensors and are not saved; on resuming, set the data to the first one not trained")
        ahead = []
    of_ahead, shape = to_tensors(ahead)
    about = {
        "mark": mark,
        "global_steps": engine.global_steps,
        "stages": engine.num_stages,
        "replicas": engine.dp_world_size,
        "microbatches_trained": pipeline.trained,
        "micro_offset": engine.module.micro_offset,
        "read_ahead": shape,
    }
    stage_file.write(_path(engine, folder), about, {**tensors, **{name: tensor.cpu() for name, tensor in of_ahead.items()}})


class _Found(NamedTuple):
    """What one rank finds of a checkpoint's files: what the first of them is about, the marks of those it needs, and those that lack."""

    first: dict[str, Any] | None
    marks: dict[str, str | None]
    lacking: list[str]


def check(engine: Any, load_dir: str, tag: str | None, weights_alone: bool = False) -> None:
    """Refuse a checkpoint whose files are not those of one save, or of another number of stages, before anything is loaded from it.

    Every rank calls it, and all raise where one does. A checkpoint without any such file is another schedule's, and fine.

    Args:
        tag: None: there is no checkpoint, as DeepSpeed will say.
        weights_alone: nothing else will be loaded, and only the number of stages matters.

    Raises:
        ConfigError: a file is missing, damaged, altered, or of another save than the others, by its name; or the stages are not as many.
    """
    if tag is None:
        return
    folder = os.path.join(load_dir, str(tag))
    found = on_all_ranks(lambda: _find(engine.async_pipeline, folder, weights_alone), f"read {folder}")
    first = next((its.first for its in found if its.first is not None), None)
    if first is None:
        return
    if first["stages"] != engine.num_stages:
        from .tied_layers import tied_keys

        convertible = engine.zero_optimization() and not tied_keys(engine.module)
        way_out = ", or convert it with python -m deepspeed.checkpoint.ds_to_universal" if convertible else ""
        raise ConfigError(f"{folder}: saved with {first['stages']} stages, this run has {engine.num_stages}; resume with as many{way_out}")
    lacking = [path for its in found for path in its.lacking]
    if lacking:
        raise ConfigError(f"{lacking[0]} is missing: copy the whole checkpoint, or resume from another")
    marks = {path: mark for its in found for path, mark in its.marks.items()}
    other = next((path for path, mark in marks.items() if mark != next(iter(marks.values()))), None)
    if other is not None:
        raise ConfigError(f"{other} is of another save than {next(iter(marks))}: copy the whole checkpoint, or resume from another")


def _find(pipeline: Any, folder: str, weights_alone: bool) -> _Found:
    engine, shared = pipeline.engine, _shared_path(pipeline, folder)
    path = next(iter(sorted(glob.glob(os.path.join(glob.escape(folder), PREFIX + "*.safetensors")))), None)
    if path is None:
        return _Found(None, {}, [] if weights_alone else [shared])
    first, _ = stage_file.read(path)
    needed = {shared}
    if first.get("replicas") == engine.dp_world_size:
        needed.add(_path(engine, folder))
    if weights_alone or first["stages"] != engine.num_stages:
        needed = set()
    lacking = sorted(path for path in needed if not os.path.exists(path))
    return _Found(first, {path: stage_file.read(path)[0].get("mark") for path in sorted(needed - set(lacking))}, lacking)


def load(pipeline: Any, checkpoint_path: str) -> None:
    """Restore what `save` wrote beside DeepSpeed's file `checkpoint_path`.

    Raises:
        ConfigError: a file is damaged or altered, or of another update than DeepSpeed's.
    """
    engine = pipeline.engine
    folder = checkpoint_path if os.path.isdir(checkpoint_path) else os.path.dirname(checkpoint_path)
    pipeline.trained = engine.global_steps * engine.micro_batches
    pipeline.feeds.restore([])
    saved_replicas = _load_of_stage(pipeline, folder)
    if saved_replicas != engine.dp_world_size:
        by = f"was saved on {saved_replicas} replicas, here are {engine.dp_world_size}"
        if saved_replicas is None:
            by = "is a universal checkpoint" if engine.load_universal_checkpoint() else "was not saved by this schedule"
        others = "" if saved_replicas is not None else ", gradient norms of other stages"
        log(f"{folder} {by}; random states{others} and data that was read ahead start anew")
        return
    about, tensors = stage_file.read(_path(engine, folder))
    torch.set_rng_state(tensors["cpu_rng_state"])
    if "device_rng_state" in tensors and engine.device.type == "cuda":
        torch.cuda.set_rng_state(tensors["device_rng_state"], engine.device)
    pipeline.feeds.restore(from_tensors(about.get("read_ahead", []), lambda name: tensors[name].to(engine.device)))


def _load_of_stage(pipeline: Any, folder: str) -> int | None:
    """What all replicas of a stage must have in common.

    Returns:
        How many replicas saved it; None: there is no such file.
    """
    engine, path = pipeline.engine, _shared_path(pipeline, folder)
    if not os.path.exists(path):
        pipeline.tied.restore([], None)
        pipeline.norms.known.zero_()
        return None
    about, tensors = stage_file.read(path)
    pipeline.tied.restore(list(tensors), tensors.__getitem__)
    if "norms" in tensors:
        pipeline.norms.known.copy_(tensors["norms"])
    if about.get("global_steps", engine.global_steps) != engine.global_steps:
        update = about["global_steps"]
        raise ConfigError(f"{path} is of update {update}, the rest of the checkpoint of {engine.global_steps}: put its own there")
    engine.module.micro_offset = about["micro_offset"]
    pipeline.trained = about["microbatches_trained"]
    return about.get("replicas", engine.dp_world_size)
