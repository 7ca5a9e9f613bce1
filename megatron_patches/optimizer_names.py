"""Every name of megatron-core that the optimizer's adapter touches and that is no documented interface, checked when it is bound."""

from typing import Any

from ds_basisrot.common.blocks import ConfigError

from . import names

# (module, name, why), of all families of versions
NAMES = (
    ("megatron.core.optimizer.optimizer", "ChainedOptimizer", "holds Megatron's optimizers, of dense and of expert parameters"),
    ("megatron.core.optimizer.optimizer", "FP32Optimizer", "updates the model's own float32 parameters"),
    ("megatron.core.optimizer.optimizer", "Float16OptimizerWithFloat16Params", "updates float32 copies of parameters"),
    ("megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer", "updates this rank's slices of parameters"),
    ("megatron.core.distributed", "DistributedDataParallel", "has the buffers of parameters and their data-parallel groups"),
)

# Of one family alone.
NAMES_OF = {
    names.INNER_ADAM: (
        ("megatron.core.transformer.moe.experts", "GroupedMLP", "stacks the weights of experts in a two-dimensional parameter"),
    ),
}

# Class -> (attribute, why)
ATTRIBUTES = {
    "ChainedOptimizer": (("chained_optimizers", "Megatron's optimizers"),),
    "FP32Optimizer": (
        ("optimizer", "the torch optimizer that is replaced"),
        ("init_state_fn", "fills Adam's states before a checkpoint is loaded"),
    ),
    "Float16OptimizerWithFloat16Params": (
        ("optimizer", "the torch optimizer that is replaced"),
        ("init_state_fn", "fills Adam's states before a checkpoint is loaded"),
        ("float16_groups", "parameters of fp32_from_float16_groups"),
        ("fp32_from_float16_groups", "what is updated in their place"),
        ("fp32_from_fp32_groups", "parameters that are updated themselves"),
    ),
    "DistributedOptimizer": (
        ("optimizer", "the torch optimizer that is replaced"),
        ("init_state_fn", "fills Adam's states before a checkpoint is loaded"),
        ("buffers", "which rank holds which slices"),
        ("model_float16_groups", "parameters of shard_fp32_from_float16_groups"),
        ("shard_fp32_from_float16_groups", "slices that are updated in their place"),
        ("model_fp32_groups", "parameters of shard_fp32_groups"),
        ("shard_fp32_groups", "slices that are updated in their place"),
    ),
    "DistributedDataParallel": (
        ("intra_dp_cp_group", "ranks that average the gradients of dense parameters"),
        ("intra_expt_dp_group", "ranks that average the gradients of expert parameters"),
        ("expert_parallel_buffers", "the buffers of expert parameters"),
    ),
    "buffer": (
        ("params", "parameters in it"),
        ("data_parallel_group", "whose ranks average their gradients"),
        ("grad_dtype", "in which they are added up"),
        ("param_index_map", "where parameters lie in it"),
        ("buckets", "what is cut into equal parts by the distributed optimizer"),
    ),
}


def check() -> None:
    """Refuse a megatron-core of a version that this adapter is not made for, or that lacks a name.

    Raises:
        ConfigError: with its version, and the name.
    """
    wanted = (*NAMES, *NAMES_OF.get(names.family(), ()))
    names.check_names(tuple((module, (name,)) for module, name, _ in wanted))


def check_attributes(owner: Any, kind: str) -> None:
    """Refuse an object that lacks an attribute of its kind in ATTRIBUTES.

    Raises:
        ConfigError: with megatron-core's version and the attribute.
    """
    for name, why in ATTRIBUTES[kind]:
        if not hasattr(owner, name):
            raise ConfigError(
                f"megatron-core {names.version()} has no {type(owner).__name__}.{name} ({why}): "
                "this adapter of BasisRotation is made for another version"
            )
