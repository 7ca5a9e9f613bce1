"""What an asynchronous pipeline adds to a DeepSpeed checkpoint: microbatches trained and the random states, one file for each rank."""

import glob
import json
import os
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from .config import ConfigError
from .log import log

FORMAT = 1
PREFIX = "async_pipeline-"


def _path(engine: Any, folder: str) -> str:
    grid = engine.grid
    name = f"{PREFIX}stage_{grid.get_stage_id():03d}-replica_{grid.get_data_parallel_id():03d}.safetensors"
    return os.path.join(folder, name)


def save(engine: Any, save_dir: str, tag: str, trained: int) -> None:
    """Write this rank's file into the folder of checkpoint `tag`, before DeepSpeed writes its own and names it the latest.

    Args:
        trained: microbatches whose gradients are in the weights.
    """
    folder = os.path.join(save_dir, tag)
    os.makedirs(folder, exist_ok=True)
    tensors = {"cpu_rng_state": torch.get_rng_state()}
    if engine.device.type == "cuda":
        tensors["device_rng_state"] = torch.cuda.get_rng_state(engine.device)
    about = {"format": FORMAT, "stages": engine.num_stages, "microbatches_trained": trained, "micro_offset": engine.module.micro_offset}
    partial = _path(engine, folder) + ".partial"
    save_file(tensors, partial, metadata={"async_pipeline": json.dumps(about)})
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


def load(engine: Any, checkpoint_path: str) -> int:
    """Restore the random states from beside DeepSpeed's file `checkpoint_path`.

    Returns:
        Microbatches trained when it was saved.
    """
    folder = checkpoint_path if os.path.isdir(checkpoint_path) else os.path.dirname(checkpoint_path)
    path = _path(engine, folder)
    if not os.path.exists(path):
        log(f"{folder} was not saved by this schedule on this many replicas; random states start anew")
        return engine.global_steps * engine.micro_batches
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["async_pipeline"])
        torch.set_rng_state(file.get_tensor("cpu_rng_state"))
        if "device_rng_state" in file.keys() and engine.device.type == "cuda":
            torch.cuda.set_rng_state(file.get_tensor("device_rng_state"), engine.device)
        engine.module.micro_offset = about["micro_offset"]
    return about["microbatches_trained"]
