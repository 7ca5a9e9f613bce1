"""The blocks of a ds_config.json that we read: validated before training, with one-line errors that name the key."""

import difflib
import inspect
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..optim.basis_rotation import BasisRotation
from ..optim.options import check_names, check_options, check_patterns, closest

OPTIMIZER_TYPE = "BasisRotation"
SHARDED_OPTIMIZER = "ShardedBasisRotation"
OPTIMIZER_PARAMS = [name for name in inspect.signature(BasisRotation).parameters if name not in ("params", "staleness")]

# In "params" of a BasisRotation block, but read by the plugin: updates between two measurements of the diagnostics, 0 for none.
DIAGNOSTICS_PERIOD = "diagnostics_period"

OPTIMIZER_KEYS = ("type", "params", "legacy_fusion")

# What people bring along from other optimizers, or from a plain loop.
NOT_OURS = {
    "layout": "not a parameter of its own; put it into the block rotate",
    "max_grad_norm": "not a parameter of BasisRotation; set the top-level key gradient_clipping",
    "torch_adam": "not a parameter of BasisRotation; remove it",
    "adam_w_mode": "not a parameter of BasisRotation; remove it, weight decay is always decoupled",
    "precondition_frequency": "not a parameter of BasisRotation; the updates between refreshes are refresh_period",
    "staleness": "not set in the JSON; remove it, the pipeline engine knows how late the gradients of each stage are",
}

# What Hugging Face's Trainer and accelerate put a value in the place of; they refuse every "auto" that they do not know.
AUTO = "auto"

# Values of parameters that have a second name for that reason.
SECOND_NAMES = {"geometry": {"automatic": AUTO}}

# What DeepSpeed itself reads in "pipeline"; it accepts any other key without a word.
DEEPSPEED_PIPELINE_KEYS = (
    "stages", "partition", "seed_layers", "activation_checkpoint_interval", "pipe_partitioned", "grad_partitioned", "use_reentrant",
)  # fmt: skip


class ConfigError(ValueError):
    """A ds_config.json that cannot be trained with as it stands."""


class PipelineOptions(BaseModel):
    """Our keys of the "pipeline" block."""

    model_config = ConfigDict(extra="forbid", strict=True)

    schedule: Literal["1f1b", "async_1f1b"] = "1f1b"
    """"1f1b" is DeepSpeed's own schedule with its flush; "async_1f1b" never flushes."""

    weight_stashing: bool = True
    """Forward and backward of a microbatch see the same weights; False back-propagates on the newest."""

    clip_scope: Literal["lagged_global", "stage"] = "lagged_global"
    """Whose gradients make the norm of `gradient_clipping`: the stage's own and the last known ones of the others, or its own alone."""

    lr_correction_updates: int = Field(0, ge=0)
    """Updates over which the learning rate of a late stage rises to its value (PipeDream-LR); 0: it is never corrected."""

    delay_compensation: float = Field(0.0, ge=0.0, allow_inf_nan=False)
    """Strength of DC-ASGD's correction of late gradients; 0: none."""

    weight_prediction: bool = False
    """Forward with the weights that Adam is expected to have reached when the gradient arrives."""

    trace: str | None = None
    """Folder for a Chrome trace of each rank."""

    @property
    def asynchronous(self) -> bool:
        return self.schedule == "async_1f1b"


PIPELINE_KEYS = tuple(PipelineOptions.model_fields)

# What a key may be, where it is neither one of several words nor true or false.
VALID_VALUES = {
    "lr_correction_updates": "an integer >= 0 (updates; 0: off)",
    "delay_compensation": "a number >= 0 (0: off)",
    "trace": "the name of a folder",
}


def pipeline_options(block: Mapping[str, Any] | None) -> PipelineOptions:
    """Our options in a ds_config's "pipeline" block.

    Raises:
        ConfigError: an illegal value, or a key that neither DeepSpeed nor we know and that looks like one of ours.
    """
    block = block or {}
    ours = {key: value for key, value in block.items() if key in PIPELINE_KEYS}
    for key in block:
        if key not in PIPELINE_KEYS and key not in DEEPSPEED_PIPELINE_KEYS:
            match = difflib.get_close_matches(str(key), PIPELINE_KEYS, n=1, cutoff=0.7)
            if match or ours:
                raise ConfigError(f"pipeline: unknown key {key!r}; {closest(key, [*PIPELINE_KEYS, *DEEPSPEED_PIPELINE_KEYS])}")
    if ours and "schedule" not in ours:
        raise ConfigError(f'pipeline.{next(iter(ours))}: has no effect without "schedule": "async_1f1b"; add that, or remove the key')
    try:
        return PipelineOptions(**ours)
    except ValidationError as error:
        first = error.errors()[0]
        key, value = str(first["loc"][0]), first["input"]
        expected = first.get("ctx", {}).get("expected")
        valid = expected if expected else VALID_VALUES.get(key, "true or false")
        hint = f"; {closest(value, expected.replace(chr(39), '').split(' or '))}" if expected and isinstance(value, str) else ""
        raise ConfigError(f"pipeline.{key}: must be {valid}, got {value!r}{hint}") from None


def is_basis_rotation(optimizer_type: Any) -> bool:
    """True for our optimizer's name in any letter case."""
    return isinstance(optimizer_type, str) and optimizer_type.lower() == OPTIMIZER_TYPE.lower()


def check_optimizer_type(optimizer_type: Any) -> None:
    """Refuse a name that is nearly ours.

    Raises:
        ConfigError: with the right name.
    """
    if isinstance(optimizer_type, str) and difflib.get_close_matches(optimizer_type.lower(), [OPTIMIZER_TYPE.lower()], cutoff=0.8):
        raise ConfigError(f"optimizer.type: unknown {optimizer_type!r}; did you mean {OPTIMIZER_TYPE!r}?")


def optimizer_params(block: Mapping[str, Any]) -> dict[str, Any]:
    """The "params" of a BasisRotation block, with the first names of values that have two."""
    params = _block(block, "params", "optimizer.")
    return {name: SECOND_NAMES[name].get(str(value), value) if name in SECOND_NAMES else value for name, value in params.items()}


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
    params = _block(_block(config, "optimizer"), "params", "optimizer.") if not where else {}
    for name, second in SECOND_NAMES.items():
        if left and params.get(name) == AUTO:
            raise ConfigError(
                f'optimizer.params.{name}: Hugging Face\'s Trainer and accelerate refuse an "auto" that is not theirs; '
                f"write {next(iter(second))!r}, which means the same"
            )
    return kept, left


def check_optimizer_params(params: Mapping[str, Any]) -> None:
    """Check the "params" of a BasisRotation block.

    Raises:
        ConfigError: naming the parameter.
    """
    for name, value in params.items():
        if value == AUTO and name not in SECOND_NAMES:
            raise ConfigError(f'optimizer.params.{name}: "auto" is for Hugging Face\'s Trainer or accelerate to fill in; give a value here')
    for name, instead in NOT_OURS.items():
        if name in params:
            raise ConfigError(f"optimizer.params.{name}: {instead}")
    period = params.get(DIAGNOSTICS_PERIOD, 0)
    if isinstance(period, bool) or not isinstance(period, int) or period < 0:
        raise ConfigError(f"optimizer.params.{DIAGNOSTICS_PERIOD}: must be an integer >= 0 (updates; 0: none), got {period!r}")
    try:
        check_names(params, [*OPTIMIZER_PARAMS, DIAGNOSTICS_PERIOD], "optimizer.params")
        check_options(params)
        check_patterns(params.get("rotate"))
    except ValueError as error:
        message = str(error)
        raise ConfigError(message if message.startswith("optimizer.") else f"optimizer.params.{message}") from None


def check_optimizer_setting(config: Mapping[str, Any]) -> None:
    """Refuse what BasisRotation does not run with, of what stands in the JSON.

    Raises:
        ConfigError: naming the key.
    """
    stage, zero = _zero_stage(config), _block(config, "zero_optimization")
    for name in ("offload_optimizer", "offload_param"):
        device = _block(zero, name, "zero_optimization.").get("device", "none")
        if device not in ("none", None):
            raise ConfigError(f"zero_optimization.{name}: {OFFLOADED[name]}, got device {device!r}; remove it")
    for key, why in NOT_WITH_ZERO.items():
        if zero.get(key):
            raise ConfigError(f"zero_optimization.{key}: {why}; remove it")
    for block, key in MASTER_WEIGHTS.items():
        if _block(config, block).get(key):
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
    stage, precision, autocast = _zero_stage(config), _precision(config), _block(config, "torch_autocast")
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
    options = pipeline_options(_block(config, "pipeline"))
    if autocast.get("enabled") and not options.weight_stashing:
        raise ConfigError("pipeline.weight_stashing: false does not go with torch_autocast, whose backward sees copies of old weights")
    for key in ("delay_compensation", "weight_prediction"):
        if getattr(options, key) and not options.weight_stashing:
            raise ConfigError(f"pipeline.{key}: needs weight_stashing true, which keeps the weights of the forward; remove one of the two")
    if options.weight_prediction:
        kind = str(_block(config, "optimizer").get("type", "")).lower()
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
    optimizer, options = _block(config, "optimizer"), pipeline_options(_block(config, "pipeline"))
    kind = optimizer.get("type")
    if options.asynchronous:
        _check_async_setting(config)
        clipping = config.get("gradient_clipping", 0)
        if isinstance(clipping, bool) or not isinstance(clipping, (int, float)) or clipping < 0:
            raise ConfigError(f"gradient_clipping: must be a number >= 0, got {clipping!r}")
    if is_basis_rotation(kind):
        _check_keys(optimizer, OPTIMIZER_KEYS, "optimizer")
        check_optimizer_params(optimizer_params(optimizer))
        check_optimizer_setting(config)
    else:
        check_optimizer_type(kind)
    return [
        f"optimizer: {OPTIMIZER_TYPE if is_basis_rotation(kind) else kind or 'none here; the script must pass one'}",
        f"pipeline schedule: {options.schedule}" + (f", {describe_async(options)}" if options.asynchronous else " (DeepSpeed's own)"),
    ]


def _check_misplaced(config: Mapping[str, Any]) -> None:
    """Refuse our schedule in a place where nobody would read it."""
    for name, block in [("", config), *((name, block) for name, block in config.items() if isinstance(block, Mapping))]:
        if name != "pipeline" and block.get("schedule") == "async_1f1b":
            where = f"{name}.schedule" if name else "schedule"
            raise ConfigError(f'{where}: nothing reads "async_1f1b" there; it belongs into the block "pipeline"')


def _check_keys(block: Mapping[str, Any], valid: tuple[str, ...], where: str) -> None:
    try:
        check_names(block, valid, where)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _zero_stage(config: Mapping[str, Any]) -> int:
    stage = _block(config, "zero_optimization").get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f"zero_optimization.stage: must be 0, 1, 2 or 3, got {stage!r}")
    return int(stage)


def _precision(config: Mapping[str, Any]) -> str:
    # "auto" is for Hugging Face's Trainer to decide, and looked at again when the engine is built
    return next((name for name in MASTER_WEIGHTS if _block(config, name).get("enabled") not in (None, False, "auto")), "fp32")


def _autocasts_to_float16(config: Mapping[str, Any]) -> bool:
    autocast = _block(config, "torch_autocast")
    return bool(autocast.get("enabled")) and str(autocast.get("dtype")).removeprefix("torch.") in ("float16", "fp16", "half")


def _block(config: Mapping[str, Any], name: str, where: str = "") -> Mapping[str, Any]:
    """The JSON object `name`, empty where it is missing or null."""
    block = config.get(name)
    if block is None:
        return {}
    if not isinstance(block, Mapping):
        raise ConfigError(f"{where}{name}: must be an object {{...}}, got {block!r}")
    return block


def describe_async(options: PipelineOptions) -> str:
    """The asynchronous options in words."""
    stashing = "weight stashing" if options.weight_stashing else "no weight stashing (backward on the newest weights)"
    extras = {
        "learning rates corrected over {} updates": options.lr_correction_updates,
        "delay compensation {}": options.delay_compensation,
        "weight prediction": options.weight_prediction,
    }
    return ", ".join([stashing, f"clip_scope {options.clip_scope}", *(text.format(value) for text, value in extras.items() if value)])
