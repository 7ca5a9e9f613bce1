"""Gradient norms and clipping within one stage: Megatron's would meet all stages in every update."""

import types
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from ds_basisrot.pipeline.lagged_norms import LaggedNorms


def keep_within_stage(optimizer: Any, norms: LaggedNorms) -> None:
    """Let a Megatron optimizer take its norm over its stage, and clip by what the stage knows of all stages' norms.

    Args:
        optimizer: what `get_megatron_optimizer` gave, chained or not.
        norms: of this stage.
    """
    for leaf in leaves(optimizer):
        leaf.grad_stats_parallel_group = _stage_group(leaf)
    own_norm, config, device = optimizer.get_grad_norm, optimizer.config, norms.known.device

    def get_grad_norm(self: Any) -> float:
        own = torch.as_tensor(own_norm() or 0.0, dtype=torch.float32, device=device)
        return norms.total(own, config.clip_grad).item()

    def clip_grad_norm(self: Any, clip_grad: float) -> float:
        norm, parameters = self.get_grad_norm(), self.get_parameters()
        if parameters:
            clip_grad_by_total_norm_fp32(parameters, clip_grad, norm, config.use_precision_aware_optimizer_no_fp8_or_ds_fp8)
        return norm

    optimizer.get_grad_norm = types.MethodType(get_grad_norm, optimizer)
    if not hasattr(optimizer, "chained_optimizers"):
        optimizer.clip_grad_norm = types.MethodType(clip_grad_norm, optimizer)


def leaves(optimizer: Any) -> Iterator[Any]:
    """The optimizers in a chain, however deep."""
    inner = getattr(optimizer, "chained_optimizers", None)
    if inner is None:
        yield optimizer
        return
    for each in inner:
        yield from leaves(each)


def _stage_group(leaf: Any) -> Any:
    """The part of the group that a norm is summed over that belongs to one stage."""
    group = leaf.get_grad_stats_parallel_group()
    if group is parallel_state.get_model_parallel_group():
        return parallel_state.get_tensor_model_parallel_group()
    if group is parallel_state.get_expert_tensor_model_pipeline_parallel_group():
        return parallel_state.get_expert_tensor_and_model_parallel_group()
    return parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
