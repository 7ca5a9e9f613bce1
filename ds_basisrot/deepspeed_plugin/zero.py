"""What DeepSpeed's wrappers put into their flat buffers, for a sharded BasisRotation inside them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.zero import utils
from deepspeed.utils import groups
from torch import Tensor

from ..common.blocks import ConfigError
from ..sharding.layouts import cut_by_itself, cut_in_buffer
from ..sharding.optimizer import Flat, ShardedBasisRotation
from . import private_names
from .log import log_stage


def allow(optimizer_class: type) -> None:
    """Put our class on DeepSpeed's list of optimizers that ZeRO may wrap."""
    private_names.check(utils, ("ZERO_SUPPORTED_OPTIMIZERS",), "runtime.zero.utils")
    if optimizer_class not in utils.ZERO_SUPPORTED_OPTIMIZERS:
        utils.ZERO_SUPPORTED_OPTIMIZERS.append(optimizer_class)


def bind(optimizer: ShardedBasisRotation, wrapper: Any, engine: Any) -> None:
    """Tell the optimizer inside an engine's ZeRO or bf16 wrapper what its flat buffers hold, and say who owns how much.

    Raises:
        ConfigError: a wrapper that we do not know.
    """
    kind = type(wrapper).__name__
    layout = LAYOUTS.get(kind)
    if layout is None:
        raise ConfigError(f"zero_optimization: BasisRotation does not know DeepSpeed's {kind}; use ZeRO 0 to 3 without other options")
    read, attributes = layout
    private_names.check(wrapper, attributes, kind)
    optimizer.bind([_of_its_stage(flat, engine.module) for flat in read(wrapper, engine.param_names)])
    for ownership in optimizer.ownership.values():
        log_stage(
            engine,
            f"{kind}: {len(ownership.owners)} matrices owned by {len(ownership.state_bytes)} rank(s), at most "
            f"{max(ownership.state_bytes) / 1e6:.3g} MB of states each ({ownership.imbalance:.3g} times the mean); in an update "
            f"{sum(ownership.sent)} elements go to owners and back",
        )


def _stages_1_and_2(wrapper: Any, names: Mapping[Tensor, str]) -> Iterator[Flat]:
    for index, buffer in enumerate(wrapper.single_partition_of_fp32_groups):
        placed = list(zip(wrapper.round_robin_bit16_groups[index], wrapper.round_robin_bit16_offsets[index]))
        yield _partitions(buffer, wrapper.real_dp_process_group[index], placed, names)


def _bf16(wrapper: Any, names: Mapping[Tensor, str]) -> Iterator[Flat]:
    for index, buffer in enumerate(wrapper.fp32_groups_flat_partition):
        placed, offset = [], 0
        for p in wrapper.bf16_groups[index]:
            placed.append((p, offset))
            offset += p.numel()
        yield _partitions(buffer, wrapper.real_dp_process_group[index], placed, names)


def _partitions(buffer: Tensor, group: Any, placed: Sequence[tuple[Tensor, int]], names: Mapping[Tensor, str]) -> Flat:
    """Parameters one after the other, cut into as many equal parts as there are ranks."""
    parameters = [(names[p], cut_in_buffer(first, p.numel(), buffer.numel())) for p, first in placed]
    labels = {names[p]: label for p, _ in placed if (label := _label(p))}
    return Flat(buffer, group, tuple(parameters), labels)


def _label(p: Tensor) -> str:
    """What sets experts apart that bear one name on the ranks of an expert-parallel group."""
    if not is_moe_param(p) or groups._get_expert_parallel_world_size(p.group_name) == 1:
        return ""
    return f"expert rank {groups._get_expert_parallel_rank(p.group_name)}: "


def _of_its_stage(flat: Flat, module: Any) -> Flat:
    """Pipeline stages share modules under one name, and often only one parameter of them: the others need the stage to be told apart."""
    if not isinstance(module, PipelineModule):
        return flat
    shared = {name: f"stage {module.stage_id}: " for name, _ in flat.parameters if name.startswith("tied_modules.")}
    return replace(flat, labels={**flat.labels, **shared})


def _stage_3(wrapper: Any, names: Mapping[Tensor, str]) -> Iterator[Flat]:
    for index, buffer in enumerate(wrapper.fp32_partitioned_groups_flat):
        group, parameters, start = wrapper._get_sub_group_process_group(index), [], 0
        for p in wrapper.fp16_groups[index]:
            parameters.append((names[p], cut_by_itself(p.ds_numel, dist.get_world_size(group), start)))
            start += p.partition_numel()
        yield Flat(buffer, group, tuple(parameters))


# Wrapper -> how to read it, and its private names for that.
LAYOUTS = {
    "DeepSpeedZeroOptimizer": (
        _stages_1_and_2,
        ("single_partition_of_fp32_groups", "round_robin_bit16_groups", "round_robin_bit16_offsets", "real_dp_process_group"),
    ),
    "BF16_Optimizer": (_bf16, ("fp32_groups_flat_partition", "bf16_groups", "real_dp_process_group")),
    "DeepSpeedZeroOptimizer_Stage3": (_stage_3, ("fp32_partitioned_groups_flat", "fp16_groups", "_get_sub_group_process_group")),
}
