"""What is added to Megatron's torch_dist checkpoints under a key of its own, and taken from them again."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedObject, serialization

from ds_basisrot.common.log import log

if TYPE_CHECKING:
    from .job import Job

KEY = "ds_basisrot"
"""In the state dict; every name in the checkpoint begins with it."""

STAGE = f"{KEY}.stage"


def patch(job: "Job") -> None:
    """Let `dist_checkpointing.save` and `load` carry the job's state where they carry an optimizer's."""
    job.replace(serialization, "save", functools.partial(_wrap_save, job), "rotations, norms")
    job.replace(serialization, "load", functools.partial(_wrap_load, job), "rotations, norms")


def _wrap_save(job: "Job", native: Callable) -> Callable:
    @functools.wraps(native)
    def save(sharded_state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if "optimizer" in sharded_state_dict:
            sharded_state_dict[KEY] = job.sharded_state()
        return native(sharded_state_dict, *args, **kwargs)

    return save


def _wrap_load(job: "Job", native: Callable) -> Callable:
    @functools.wraps(native)
    def load(sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path, *args: Any, **kwargs: Any) -> Any:
        if "optimizer" in sharded_state_dict and job.has_optimizer:
            present = dist_checkpointing.serialization.load_sharded_metadata(str(checkpoint_dir))
            sharded_state_dict[KEY] = job.wanted_state(present)
        loaded = native(sharded_state_dict, checkpoint_dir, *args, **kwargs)
        state = loaded[0] if isinstance(loaded, tuple) else loaded
        if KEY in sharded_state_dict:
            job.take_state(state.pop(KEY, {}))
        return loaded

    return load


def stage_object(data: Any) -> ShardedObject:
    """The state of the pipeline on this rank, which the replicas of a stage share; `[stages, tensor-parallel ranks]`."""
    stages, tensor_parallel = parallel_state.get_pipeline_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_world_size()
    place = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    return ShardedObject(STAGE, data, (stages, tensor_parallel), place, replica_id=parallel_state.get_data_parallel_rank(True))


def wanted_stage(present: Mapping[str, Any]) -> ShardedObject | None:
    """What to ask a checkpoint for, of what is there; None, and a word about it, where there is nothing for this layout."""
    wanted = stage_object(None)
    if wanted.unique_key in present:
        return wanted
    other = [name for name in present if name.startswith(f"{STAGE}/")]
    log(
        f"the checkpoint is {'of another number of stages or tensor-parallel ranks' if other else 'not of async_1f1b'}: gradient norms of "
        "other stages, and late gradients of tied embeddings, begin anew"
    )
    return None
