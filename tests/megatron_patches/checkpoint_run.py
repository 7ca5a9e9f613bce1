"""A job that saves and loads torch_dist checkpoints, in the order of calls of Megatron's training package. Import cpu_cuda_shim first."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator, init_num_microbatches_calculator
from megatron_job import Job, Microbatches
from megatron_model import scheduler, transformer_config
from megatron_training import built_optimizer, forward_backward, weights_of, wrapped_model
from torch import Tensor

import megatron_patches

OWN = "ds_basisrot."


class Run:
    """A job on all ranks of the world, from its seed. Megatron's groups are there already.

    Args:
        job: sizes and options.

    Attributes:
        reports: losses and gradient norms of the steps so far.
    """

    def __init__(self, job: Job):
        if job.basisrot is not None:
            megatron_patches.apply(job.basisrot)
        destroy_num_microbatches_calculator()
        init_num_microbatches_calculator(dist.get_rank(), None, job.batch, job.micro_batch_size, job.dp)
        self.job = job
        self.stage = parallel_state.get_pipeline_model_parallel_rank()
        config = transformer_config(job)
        self.model = wrapped_model(job, config)
        self.optimizer = built_optimizer(job, config, self.model)
        self._rates = scheduler(job, self.optimizer)
        self._read_from(0)
        self._steps = 0
        self.reports: list[Any] = []

    def _read_from(self, step: int) -> None:
        is_end = self.stage in (0, self.job.pp - 1)
        replica = parallel_state.get_data_parallel_rank()
        self._data = Microbatches(self.job, replica, step * self.job.microbatches) if is_end else None

    def train(self, steps: int) -> None:
        """Go on for some steps."""
        for _ in range(steps):
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            losses = forward_backward(self.job, self.model, self._data, forward_only=False)
            updated, norm, _ = self.optimizer.step()
            if updated:
                self._rates.step(increment=self.job.batch)
            self.reports.append((losses, norm))
            self._steps += 1

    def drain(self) -> None:
        """Leave nothing in flight."""
        if self.job.basisrot is not None:
            megatron_patches.drain()

    def save(self, folder: Path) -> None:
        """Write a checkpoint."""
        self.drain()
        if dist.get_rank() == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        content = {key: value for key, value in self._metadata().items() if key != "dp_cp_group"}
        dist_checkpointing.save(self._state(is_loading=False), str(folder), content_metadata=content)

    def load(self, folder: Path) -> None:
        """Take in a checkpoint."""
        state = dist_checkpointing.load(self._state(is_loading=True), str(folder))
        self.model.load_state_dict(state["model"])
        with torch.no_grad():  # Megatron writes into views of float32 weights
            self.optimizer.load_state_dict(state["optimizer"])
        self._rates.load_state_dict(state["opt_param_scheduler"])
        self._steps = state["iteration"]
        self._read_from(self._steps)

    def _metadata(self) -> dict[str, Any]:
        sharding = {"distrib_optim_sharding_type": "dp_reshardable"} if self.job.distributed_optimizer else {}
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        return {**sharding, "singleton_local_shards": False, "chained_optim_avoid_prefix": True, "dp_cp_group": group}

    def _state(self, is_loading: bool) -> dict[str, Any]:
        metadata = self._metadata()
        state = {"iteration": self._steps, "model": self.model.module.sharded_state_dict(metadata=metadata)}
        state["optimizer"] = self.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
        state["opt_param_scheduler"] = self._rates.state_dict()
        return state

    def tensors(self) -> dict[str, Tensor]:
        """Weights of this rank and the copies of them, or slices of those, that the optimizer updates."""
        weights = weights_of(self.job, self.model, self.stage)
        mains = weights_of(self.job, self.model, self.stage, lambda p: getattr(p, "main_param", None))
        return weights | {f"{name} (main)": main for name, main in mains.items()}


def everything(folder: Path) -> dict[str, Any]:
    """All tensors and objects of a checkpoint by key; slices of one parameter's states are joined. All ranks call it."""
    present = load_sharded_metadata(str(folder))
    loaded = dist_checkpointing.load(dict(present), str(folder), validate_access_integrity=False)
    found: dict[str, Any] = {}
    slices: dict[str, list[tuple[int, Any]]] = {}
    for key in present:
        own = key.partition("/")[0]
        if own.startswith(f"{OWN}slice|"):
            _, name, offset, _, what = own.split("|")
            slices.setdefault(f"{name}|{what}", []).append((int(offset), loaded[key]))
        else:
            found[key] = loaded[key]
    for key, parts in slices.items():
        values = [value for _, value in sorted(parts, key=lambda part: part[0])]
        found[key] = torch.cat(values) if torch.is_tensor(values[0]) else values[0]
    return found


def differing(first: Any, second: Any) -> list[str]:
    """Paths of what two nested values do not have in common, bit for bit."""
    if torch.is_tensor(first) and torch.is_tensor(second):
        return [] if torch.equal(first, second) else [""]
    if isinstance(first, dict) and isinstance(second, dict):
        pairs = {key: (first.get(key), second.get(key)) for key in {**first, **second}}
    elif isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)) and len(first) == len(second):
        pairs = dict(enumerate(zip(first, second)))
    else:
        return [] if type(first) is type(second) and first == second else [f"{first!r} != {second!r}"]
    return [f"{key}.{path}" for key, pair in pairs.items() for path in differing(*pair)]
