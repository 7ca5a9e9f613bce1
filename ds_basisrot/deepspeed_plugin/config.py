"""The blocks of a ds_config.json that we read: validated before training, with one-line errors that name the key."""

import difflib
import inspect
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from ..optim.basis_rotation import BasisRotation
from ..optim.options import check_names, check_options, check_patterns, closest

OPTIMIZER_TYPE = "BasisRotation"
OPTIMIZER_PARAMS = [name for name in inspect.signature(BasisRotation).parameters if name != "params"]

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

    clip_scope: Literal["stage"] = "stage"
    """Whose gradients make the norm of `gradient_clipping`: each stage's own."""

    @property
    def asynchronous(self) -> bool:
        return self.schedule == "async_1f1b"


PIPELINE_KEYS = tuple(PipelineOptions.model_fields)


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
    try:
        return PipelineOptions(**ours)
    except ValidationError as error:
        first = error.errors()[0]
        key, value = str(first["loc"][0]), first["input"]
        expected = first.get("ctx", {}).get("expected")
        valid = expected if expected else "true or false"
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


def check_optimizer_params(params: Mapping[str, Any] | None) -> None:
    """Check the "params" of a BasisRotation block.

    Raises:
        ConfigError: naming the parameter.
    """
    params = params or {}
    try:
        check_names(params, OPTIMIZER_PARAMS, "optimizer.params")
        check_options(params)
        check_patterns(params.get("rotate"))
    except ValueError as error:
        message = str(error)
        raise ConfigError(message if message.startswith("optimizer.") else f"optimizer.params.{message}") from None


def check_optimizer_setting(zero_stage: int, precision: str, offload: bool) -> None:
    """Refuse what hands the optimizer flat slices of several matrices.

    Args:
        zero_stage: zero_optimization.stage.
        precision: "fp32", "bf16" or "fp16".
        offload: whether the optimizer's states are offloaded.

    Raises:
        ConfigError: naming the key.
    """
    if zero_stage > 0:
        raise ConfigError(
            f"zero_optimization.stage: BasisRotation needs whole matrices and ZeRO stage {zero_stage} hands it flat slices; set it to 0"
        )
    if precision != "fp32":
        raise ConfigError(f"{precision}.enabled: BasisRotation runs in fp32 under DeepSpeed for now; set it to false")
    if offload:
        raise ConfigError("zero_optimization.offload_optimizer: not supported with BasisRotation; remove it")


def validate(config: Mapping[str, Any]) -> list[str]:
    """Check a whole ds_config as far as it can be known without a model.

    Returns:
        Lines that say what will be active.

    Raises:
        ConfigError: on the first fault.
    """
    optimizer, zero, pipeline = (_block(config, name) for name in ("optimizer", "zero_optimization", "pipeline"))
    precision = next((p for p in ("bf16", "fp16") if _block(config, p).get("enabled")), "fp32")
    kind, stage = optimizer.get("type"), zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f"zero_optimization.stage: must be 0, 1, 2 or 3, got {stage!r}")
    options = pipeline_options(pipeline)
    if is_basis_rotation(kind):
        check_optimizer_params(_block(optimizer, "params", "optimizer."))
        check_optimizer_setting(stage, precision, bool(zero.get("offload_optimizer")))
    else:
        check_optimizer_type(kind)
    if options.asynchronous:
        check_async_setting(stage, precision)
    return [
        f"optimizer: {OPTIMIZER_TYPE if is_basis_rotation(kind) else kind or 'none'}",
        f"pipeline schedule: {options.schedule}" + (f", {describe_async(options)}" if options.asynchronous else " (DeepSpeed's own)"),
    ]


def _block(config: Mapping[str, Any], name: str, where: str = "") -> Mapping[str, Any]:
    """The JSON object `name`, empty where it is missing or null."""
    block = config.get(name)
    if block is None:
        return {}
    if not isinstance(block, Mapping):
        raise ConfigError(f"{where}{name}: must be an object {{...}}, got {block!r}")
    return block


def check_async_setting(zero_stage: int, precision: str) -> None:
    """Refuse what the asynchronous schedule cannot run with.

    Raises:
        ConfigError: naming the key.
    """
    if zero_stage > 0:
        raise ConfigError(f"zero_optimization.stage: async_1f1b runs with stage 0 for now, got {zero_stage}; set it to 0")
    if precision == "fp16":
        raise ConfigError("fp16.enabled: async_1f1b cannot share a loss scale between stages; use bf16 or fp32")


def describe_async(options: PipelineOptions) -> str:
    """The asynchronous options in words."""
    stashing = "weight stashing" if options.weight_stashing else "no weight stashing (backward on the newest weights)"
    return f"{stashing}, gradient clipping per {options.clip_scope}"
