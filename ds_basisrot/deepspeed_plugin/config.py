"""The blocks of a ds_config.json that we read: validated before training, with one-line errors that name the key."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ..common import blocks
from ..common.blocks import (
    AUTO,
    OPTIMIZER_TYPE,
    SECOND_NAMES,
    ConfigError,
    PipelineOptions,
    check_keys,
    check_optimizer_params,
    check_optimizer_type,
    describe_async,
    is_basis_rotation,
    optimizer_params,
    sub_block,
)  # fmt: skip

SHARDED_OPTIMIZER = "ShardedBasisRotation"
OPTIMIZER_KEYS = ("type", "params", "legacy_fusion")

# What DeepSpeed itself reads in "pipeline"; it accepts any other key without a word.
DEEPSPEED_PIPELINE_KEYS = (
    "stages", "partition", "seed_layers", "activation_checkpoint_interval", "pipe_partitioned", "grad_partitioned", "use_reentrant",
)  # fmt: skip


def pipeline_options(block: Mapping[str, Any] | None) -> PipelineOptions:
    """Our options in a ds_config's "pipeline" block, beside DeepSpeed's.

    Raises:
        ConfigError: see `blocks.pipeline_options`.
    """
    return blocks.pipeline_options(block, DEEPSPEED_PIPELINE_KEYS)


def without_auto(config: Mapping[str, Any], where: str = "") -> tuple[dict[str, Any], list[str]]:
    """A ds_config without what Hugging Face's Trainer or accelerate will fill in, and the names of that.

    Raises:
        ConfigError: a value of ours that is called "auto" as well, which they would refuse.
    """
    kept, left = {}, []
    for key, value in config.items():
        name = f"{where}{key}"
        if isinstance(value, Mapping):
            kept[key], inner = without_auto(value, f"{name}.")
            left += inner
        elif value == AUTO and key not in SECOND_NAMES:
            left.append(name)
        else:
            kept[key] = value
    params = sub_block(sub_block(config, "optimizer"), "params", "optimizer.") if not where else {}
    for name, second in SECOND_NAMES.items():
        if left and params.get(name) == AUTO:
            raise ConfigError(
                f'optimizer.params.{name}: Hugging Face\'s Trainer and accelerate refuse an "auto" that is not theirs; '
                f"write {next(iter(second))!r}, which means the same"
            )
    return kept, left


def check_optimizer_setting(config: Mapping[str, Any]) -> None:
    """Refuse what BasisRotation does not run with, of what stands in the JSON.

    Raises:
        ConfigError: naming the key.
    """
    stage, zero = _zero_stage(config), sub_block(config, "zero_optimization")
    for name in ("offload_optimizer", "offload_param"):
        device = sub_block(zero, name, "zero_optimization.").get("device", "none")
        if device not in ("none", None):
            raise ConfigError(f"zero_optimization.{name}: {OFFLOADED[name]}, got device {device!r}; remove it")
    for key, why in NOT_WITH_ZERO.items():
        if zero.get(key):
            raise ConfigError(f"zero_optimization.{key}: {why}; remove it")
    for block, key in MASTER_WEIGHTS.items():
        if sub_block(config, block).get(key):
            raise ConfigError(f"{block}.{key}: BasisRotation keeps master weights in float32; remove it")
    if stage == 0 and _precision(config) == "fp16":
        raise ConfigError(
            "fp16.enabled: without ZeRO, DeepSpeed 0.19 divides gradients by a loss scale that it did not multiply the loss by; set "
            "zero_optimization.stage to 1, or use bf16"
        )
    if stage > 0 and _autocasts_to_float16(config):
        raise ConfigError(
            "torch_autocast.dtype: under ZeRO each rank decides alone whether its part of a float16 gradient overflowed, and would leave "
            "the others waiting; use bfloat16"
        )


# DeepSpeed's blocks of 16-bit training, the second by the first one's old name, and their keys for master weights in that precision.
MASTER_WEIGHTS = {
    "bf16": "bf16_master_weights_and_grads",
    "bfloat16": "bf16_master_weights_and_grads",
    "fp16": "fp16_master_weights_and_grads",
}

OFFLOADED = {
    "offload_optimizer": "BasisRotation multiplies matrices in every update, which needs its states on the accelerator",
    "offload_param": "not supported with BasisRotation yet",
}

# Optimizers whose next steps can be predicted from their states.
PREDICTABLE = ("adam", "adamw", OPTIMIZER_TYPE.lower())

# Of DeepSpeed's ZeRO options, those that change what its optimizers keep or when they are called.
NOT_WITH_ZERO = {
    "cpu_offload": "BasisRotation multiplies matrices in every update, which needs its states on the accelerator",
    "elastic_checkpoint": "DeepSpeed saves only flat states then, and BasisRotation's bases would be lost; universal checkpoints keep them",
    "zenflow": "not supported with BasisRotation",
}


def check_client_optimizer(config: Mapping[str, Any]) -> None:
    """Refuse a BasisRotation that the script built where DeepSpeed would flatten its parameters: nobody could tell it what became of them.

    Raises:
        ConfigError: naming the key.
    """
    stage, precision = _zero_stage(config), _precision(config)
    if stage > 0:
        raise ConfigError(f"zero_optimization.stage: {stage} needs BasisRotation chosen by optimizer.type in the JSON, not by the script")
    if precision != "fp32":
        raise ConfigError(f"{precision}.enabled: needs BasisRotation chosen by optimizer.type in the JSON, not by the script")


def _check_async_setting(config: Mapping[str, Any]) -> None:
    stage, precision, autocast = _zero_stage(config), _precision(config), sub_block(config, "torch_autocast")
    if stage > 1:
        raise ConfigError(f"zero_optimization.stage: DeepSpeed's pipelines run with stages 0 and 1, got {stage}; set it to 1")
    if precision == "fp16":
        raise ConfigError("fp16.enabled: async_1f1b cannot share a loss scale between stages; use bf16")
    if _autocasts_to_float16(config):
        raise ConfigError("torch_autocast.dtype: async_1f1b cannot share a loss scale between stages; use bfloat16")
    if config.get("wall_clock_breakdown"):
        raise ConfigError(
            "wall_clock_breakdown: DeepSpeed 0.19's pipelines fail with it (a timer is started twice); remove it, pipeline.trace shows "
            "what each stage does when"
        )
    options = pipeline_options(sub_block(config, "pipeline"))
    if autocast.get("enabled") and not options.weight_stashing:
        raise ConfigError("pipeline.weight_stashing: false does not go with torch_autocast, whose backward sees copies of old weights")
    for key in ("delay_compensation", "weight_prediction"):
        if getattr(options, key) and not options.weight_stashing:
            raise ConfigError(f"pipeline.{key}: needs weight_stashing true, which keeps the weights of the forward; remove one of the two")
    if options.weight_prediction:
        kind = str(sub_block(config, "optimizer").get("type", "")).lower()
        if stage > 0 or precision != "fp32":
            what = f"zero_optimization.stage {stage}" if stage > 0 else f"{precision}.enabled"
            raise ConfigError(
                f"pipeline.weight_prediction: needs whole float32 optimizer states on each rank, not {what}; remove one of them"
            )
        if kind and kind not in PREDICTABLE:
            raise ConfigError(f"pipeline.weight_prediction: needs Adam, AdamW or BasisRotation, got {kind!r}; remove the key")


def validate(config: Mapping[str, Any]) -> list[str]:
    """Check a whole ds_config as far as it can be known without the model. A config that does not use us is left alone.

    Returns:
        Lines that say what will be active.

    Raises:
        ConfigError: on the first fault.
    """
    _check_misplaced(config)
    if config.get("pipeline", {}) is None:
        raise ConfigError("pipeline: must be an object {...}, got None; remove the key")
    optimizer, options = sub_block(config, "optimizer"), pipeline_options(sub_block(config, "pipeline"))
    kind = optimizer.get("type")
    if options.asynchronous or is_basis_rotation(kind):
        _check_training(config)
    if options.asynchronous:
        _check_async_setting(config)
        clipping = config.get("gradient_clipping", 0)
        if isinstance(clipping, bool) or not isinstance(clipping, (int, float)) or clipping < 0:
            raise ConfigError(f"gradient_clipping: must be a number >= 0, got {clipping!r}")
    if is_basis_rotation(kind):
        check_keys(optimizer, OPTIMIZER_KEYS, "optimizer")
        check_optimizer_params(optimizer_params(optimizer))
        check_optimizer_setting(config)
    else:
        check_optimizer_type(kind)
    return [
        f"optimizer: {OPTIMIZER_TYPE if is_basis_rotation(kind) else kind or 'none here; the script must pass one'}",
        f"pipeline schedule: {options.schedule}" + (f", {describe_async(options)}" if options.asynchronous else " (DeepSpeed's own)"),
    ]


def _check_training(config: Mapping[str, Any]) -> None:
    """Refuse in a line what DeepSpeed itself refuses in a traceback."""
    if config.get("zero_optimization", {}) is None:
        raise ConfigError("zero_optimization: must be an object {...}, got None; remove the key")
    if _precision(config) not in ("fp32", "fp16") and _is_on(sub_block(config, "fp16").get("enabled", False)):
        raise ConfigError(f"{_precision(config)}.enabled, fp16.enabled: DeepSpeed trains in one of these precisions; switch one off")


def describe_training(config: Mapping[str, Any], undecided: Sequence[str] = ()) -> str:
    """ZeRO stage and precision of a valid ds_config, in words.

    Args:
        undecided: names of what a client will fill in, see `without_auto`.
    """
    open_stage = any(name in undecided for name in ("zero_optimization", "zero_optimization.stage"))
    stage = "decided by the client" if open_stage else _zero_stage(config)
    precision = _precision(config)
    if any(f"{block}.enabled" in undecided for block in MASTER_WEIGHTS) and precision == "fp32":
        precision = "decided by the client"
    autocast = ", torch_autocast" if _is_on(sub_block(config, "torch_autocast").get("enabled", False)) else ""
    return f"ZeRO stage: {stage}; precision: {precision.replace('bfloat16', 'bf16')}{autocast}"


def _check_misplaced(config: Mapping[str, Any]) -> None:
    """Refuse our names in a place where nobody would read them."""
    for name, block in [("", config), *((name, block) for name, block in config.items() if isinstance(block, Mapping))]:
        if name != "pipeline" and block.get("schedule") == "async_1f1b":
            where = f"{name}.schedule" if name else "schedule"
            raise ConfigError(f'{where}: nothing reads "async_1f1b" there; it belongs into the block "pipeline"')
        if name not in ("", "optimizer") and is_basis_rotation(block.get("type")):
            raise ConfigError(f'{name}.type: nothing reads "{OPTIMIZER_TYPE}" there; it belongs into the block "optimizer"')


def _zero_stage(config: Mapping[str, Any]) -> int:
    stage = sub_block(config, "zero_optimization").get("stage", 0)
    if str(stage) not in ("0", "1", "2", "3"):  # DeepSpeed takes the text, too
        raise ConfigError(f"zero_optimization.stage: must be 0, 1, 2 or 3, got {stage!r}")
    return int(stage)


def _precision(config: Mapping[str, Any]) -> str:
    """The block of the precision that is switched on, or "fp32"."""
    names = [name for name in MASTER_WEIGHTS if name != "bfloat16" or "bf16" not in config]  # the old name counts without the new one
    return next((name for name in names if _is_on(sub_block(config, name).get("enabled", False))), "fp32")


def _is_on(value: Any) -> bool:
    """As DeepSpeed reads it, which takes words such as "false" too; "auto" is looked at again when its client has put a value there."""
    try:
        return TypeAdapter(bool).validate_python(value)
    except ValidationError:  # DeepSpeed will say so
        return False


def _autocasts_to_float16(config: Mapping[str, Any]) -> bool:
    autocast = sub_block(config, "torch_autocast")
    return bool(autocast.get("enabled")) and str(autocast.get("dtype")).removeprefix("torch.") in ("float16", "fp16", "half")
