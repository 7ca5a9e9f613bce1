"""The blocks of a JSON that choose optimizer and schedule: validated before training, with one-line errors that name the key."""

import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..optim.basis_rotation import BasisRotation
from ..optim.options import check_names, check_options, check_patterns, closest

OPTIMIZER_TYPE = "BasisRotation"
OPTIMIZER_PARAMS = [name for name in inspect.signature(BasisRotation).parameters if name not in ("params", "staleness")]

# In "params" of a BasisRotation block, but read by the plugin: updates between two measurements of the diagnostics, 0 for none.
DIAGNOSTICS_PERIOD = "diagnostics_period"

# What people bring along from other optimizers, or from a plain loop.
NOT_OURS = {
    "layout": "not a parameter of its own; put it into the block rotate",
    "max_grad_norm": "not a parameter of BasisRotation; set the top-level key gradient_clipping, or Megatron's --clip-grad",
    "torch_adam": "not a parameter of BasisRotation; remove it",
    "adam_w_mode": "not a parameter of BasisRotation; remove it, weight decay is always decoupled",
    "precondition_frequency": "not a parameter of BasisRotation; the updates between refreshes are refresh_period",
    "staleness": "not set in the JSON; remove it, the pipeline engine knows how late the gradients of each stage are",
}

# What Hugging Face's Trainer and accelerate put a value in the place of; they refuse every "auto" that they do not know.
AUTO = "auto"

# Values of parameters that have a second name for that reason.
SECOND_NAMES = {"geometry": {"automatic": AUTO}}


class ConfigError(ValueError):
    """A configuration that cannot be trained with as it stands."""


class PipelineOptions(BaseModel):
    """Our keys of the "pipeline" block."""

    model_config = ConfigDict(extra="forbid", strict=True)

    schedule: Literal["1f1b", "async_1f1b"] = "1f1b"
    """"1f1b" is the framework's own schedule with its flush; "async_1f1b" never flushes."""

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


def pipeline_options(block: Mapping[str, Any] | None, others: Sequence[str] = ()) -> PipelineOptions:
    """Our options in a "pipeline" block.

    Args:
        block: the JSON object.
        others: keys in it that are not ours.

    Raises:
        ConfigError: an illegal value, or a key that nobody knows and that looks like one of ours.
    """
    block = block or {}
    ours = {key: value for key, value in block.items() if key in PIPELINE_KEYS}
    for key in block:
        if key not in PIPELINE_KEYS and key not in others:
            match = difflib.get_close_matches(str(key), PIPELINE_KEYS, n=1, cutoff=0.7)
            if match or ours:
                raise ConfigError(f"pipeline: unknown key {key!r}; {closest(key, [*PIPELINE_KEYS, *others])}")
    if ours and "schedule" not in ours:
        raise ConfigError(f'pipeline.{next(iter(ours))}: has no effect without "schedule": "async_1f1b"; add that, or remove the key')
    try:
        options = PipelineOptions(**ours)
    except ValidationError as error:
        first = error.errors()[0]
        key, value = str(first["loc"][0]), first["input"]
        expected = first.get("ctx", {}).get("expected")
        valid = expected if expected else VALID_VALUES.get(key, "true or false")
        hint = f"; {closest(value, expected.replace(chr(39), '').split(' or '))}" if expected and isinstance(value, str) else ""
        raise ConfigError(f"pipeline.{key}: must be {valid}, got {value!r}{hint}") from None
    idle = next((key for key in ours if key not in ("schedule", "weight_stashing") and getattr(options, key) != _default(key)), None)
    if idle is not None and not options.asynchronous:
        raise ConfigError(f'pipeline.{idle}: has no effect with "schedule": "1f1b"; choose "async_1f1b", or remove the key')
    return options


def _default(key: str) -> Any:
    return PipelineOptions.model_fields[key].default


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
    params = sub_block(block, "params", "optimizer.")
    return {name: SECOND_NAMES[name].get(str(value), value) if name in SECOND_NAMES else value for name, value in params.items()}


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


def check_keys(block: Mapping[str, Any], valid: tuple[str, ...], where: str) -> None:
    """Refuse a key that is not one of `valid`.

    Raises:
        ConfigError: with the closest valid one.
    """
    try:
        check_names(block, valid, where)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def sub_block(config: Mapping[str, Any], name: str, where: str = "") -> Mapping[str, Any]:
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
