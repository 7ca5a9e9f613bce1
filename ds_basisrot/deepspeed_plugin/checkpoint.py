"""What an asynchronous pipeline adds to a DeepSpeed checkpoint, one file for each rank: counters, random states, data read ahead, norms."""

import glob
import json
import os
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ..common.blocks import ConfigError
from ..common.log import log
from .microbatches import from_tensors, to_tensors

FORMAT = 1
PREFIX = "async_pipeline-"


def _path(engine: Any, folder: str, replica: int | None = None) -> str:
    grid = engine.grid
    replica = grid.get_data_parallel_id() if replica is None else replica
    name = f"{PREFIX}stage_{grid.get_stage_id():03d}-replica_{replica:03d}.safetensors"
    return os.path.join(folder, name)


def save(pipeline: Any, folder: str) -> None:
    """Write this rank's file into the folder of a checkpoint.

    Args:
        pipeline: the AsyncPipeline, drained.
        folder: of the checkpoint.
    """
    engine = pipeline.engine
    os.makedirs(folder, exist_ok=True)
    tensors = {"cpu_rng_state": torch.get_rng_state(), "norms": pipeline.norms.known.cpu()}
    if engine.device.type == "cuda":
        tensors["device_rng_state"] = torch.cuda.get_rng_state(engine.device)
    if engine.grid.get_data_parallel_id() == 0:
        tensors |= pipeline.tied.state()
    ahead = pipeline.feeds.read_ahead()
    if not pipeline.saves_read_ahead:
        log(f"{folder}: microbatches read ahead are not tensors and are not saved; on resuming, set the data to the first one not trained")
        ahead = []
    of_ahead, shape = to_tensors(ahead)
    about = {
        "format": FORMAT,
        "stages": engine.num_stages,
        "replicas": engine.dp_world_size,
        "microbatches_trained": pipeline.trained,
        "micro_offset": engine.module.micro_offset,
        "read_ahead": shape,
    }
    partial = _path(engine, folder) + ".partial"
    save_file({**tensors, **of_ahead}, partial, metadata={"async_pipeline": json.dumps(about)})
    os.replace(partial, _path(engine, folder))


def check(engine: Any, load_dir: str, tag: str | None) -> None:
    """Refuse a checkpoint of another number of stages, before anything is loaded from it.

    Raises:
        ConfigError: the file is of another number of stages or of a later format.
    """
    if tag is None:
        try:
            with open(os.path.join(load_dir, "latest")) as file:
                tag = file.read().strip()
        except OSError:
            return  # DeepSpeed says that there is none
    folder = os.path.join(load_dir, str(tag))
    path = next(iter(sorted(glob.glob(os.path.join(folder, PREFIX + "*.safetensors")))), None)
    if path is None:
        return
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["async_pipeline"])
    if about["format"] > FORMAT:
        raise ConfigError(f"{path}: format {about['format']} is newer than this ds_basisrot reads ({FORMAT}); update it")
    if about["stages"] != engine.num_stages:
        raise ConfigError(f"{folder}: saved with {about['stages']} stages, this run has {engine.num_stages}; resume with as many")


def load(pipeline: Any, checkpoint_path: str) -> None:
    """Restore what `save` wrote beside DeepSpeed's file `checkpoint_path`."""
    engine = pipeline.engine
    folder = checkpoint_path if os.path.isdir(checkpoint_path) else os.path.dirname(checkpoint_path)
    pipeline.trained = engine.global_steps * engine.micro_batches
    pipeline.feeds.restore([])
    saved_replicas = _load_of_stage(pipeline, folder)
    if saved_replicas != engine.dp_world_size:
        by = (
            "not saved by this schedule"
            if saved_replicas is None
            else f"saved on {saved_replicas} replicas, here are {engine.dp_world_size}"
        )
        log(f"{folder} was {by}; random states and data that was read ahead start anew")
        return
    with safe_open(_path(engine, folder), framework="pt") as file:
        about = json.loads(file.metadata()["async_pipeline"])
        torch.set_rng_state(file.get_tensor("cpu_rng_state"))
        if "device_rng_state" in file.keys() and engine.device.type == "cuda":
            torch.cuda.set_rng_state(file.get_tensor("device_rng_state"), engine.device)
        pipeline.feeds.restore(from_tensors(about.get("read_ahead", []), lambda name: file.get_tensor(name).to(engine.device)))


def _load_of_stage(pipeline: Any, folder: str) -> int | None:
    """What all replicas of a stage must have in common, from the file of its first one.

    Returns:
        How many replicas saved it; None: there is no such file.
    """
    engine, path = pipeline.engine, _path(pipeline.engine, folder, replica=0)
    if not os.path.exists(path):
        pipeline.tied.restore([], None)
        pipeline.norms.known.zero_()
        return None
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["async_pipeline"])
        pipeline.tied.restore(list(file.keys()), file.get_tensor)
        if "norms" in file.keys():
            pipeline.norms.known.copy_(file.get_tensor("norms"))
        engine.module.micro_offset = about["micro_offset"]
        pipeline.trained = about["microbatches_trained"]
    return about.get("replicas", engine.dp_world_size)
