"""The file that chooses optimizer and schedule: JSON or YAML, the same two blocks as in a ds_config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from json import JSONDecodeError
from pathlib import Path
from typing import Any

import torch

from ds_basisrot import __version__
from ds_basisrot.common import json_text
from ds_basisrot.common.agreement import flat
from ds_basisrot.common.blocks import (
    DIAGNOSTICS_PERIOD,
    OPTIMIZER_TYPE,
    ConfigError,
    PipelineOptions,
    check_keys,
    check_optimizer_params,
    check_optimizer_type,
    is_basis_rotation,
    optimizer_params,
    pipeline_options,
    sub_block,
)
from ds_basisrot.optim.options import closest

from . import yaml_text

BLOCKS = ("optimizer", "pipeline")

TP_MODE = "tp_mode"
"""In "params", read by this package: what a tensor-parallel shard of a matrix is."""

TP_MODES = ("blockwise", "exact")

# Options of the pipeline block that exist for DeepSpeed alone so far.
NOT_HERE = ("lr_correction_updates", "delay_compensation", "weight_prediction")


@dataclass(frozen=True)
class Settings:
    """What the file says.

    Attributes:
        path: of the file.
        optimizer: "params" of BasisRotation; None: Megatron's own optimizer.
        pipeline: options of the schedule.
    """

    path: str
    optimizer: Mapping[str, Any] | None
    pipeline: PipelineOptions

    def facts(self) -> dict[str, Any]:
        """What all ranks must have in common, as `agreement.agree` takes it."""
        blocks = {
            "optimizer": {"params": dict(self.optimizer)} if self.optimizer is not None else None,
            "pipeline": self.pipeline.model_dump(),
        }
        return {"ds_basisrot version": __version__, "torch version": torch.__version__, **flat("", blocks)}


def load(config: str | Path | Mapping[str, Any]) -> Settings:
    """Read and check a file, or check what would stand in it.

    Raises:
        ConfigError: one line that names the file and the key.
    """
    path = "the configuration" if isinstance(config, Mapping) else str(config)
    try:
        return _settings(path, config if isinstance(config, Mapping) else _read(Path(config)))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _read(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not text: byte {error.start}, {error.reason}") from None
    try:
        config = json_text.parse(text) if path.suffix == ".json" else yaml_text.parse(text)
    except JSONDecodeError as error:
        raise ConfigError(f"is not JSON: line {error.lineno}, {error.msg}") from None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if not isinstance(config, Mapping):
        raise ConfigError('must be an object with the blocks "optimizer" and "pipeline"')
    return config


def _settings(path: str, config: Mapping[str, Any]) -> Settings:
    check_keys(config, BLOCKS, "top level")
    optimizer, pipeline = sub_block(config, "optimizer"), pipeline_options(sub_block(config, "pipeline"))
    for key in NOT_HERE:
        if getattr(pipeline, key):
            raise ConfigError(f"pipeline.{key}: not supported with Megatron yet; remove it")
    params = None
    if optimizer:
        check_keys(optimizer, ("type", "params"), "optimizer")
        if not is_basis_rotation(optimizer.get("type")):
            check_optimizer_type(optimizer.get("type"))
            raise ConfigError(
                f"optimizer.type: must be {OPTIMIZER_TYPE!r}, got {optimizer.get('type')!r}; remove the block for Megatron's own optimizer"
            )
        params = optimizer_params(optimizer)
        check_params(params)
    if params is None and not pipeline.asynchronous:
        raise ConfigError('chooses nothing: give a block "optimizer" with type "BasisRotation", or "pipeline" with schedule "async_1f1b"')
    return Settings(path, params, pipeline)


def check_params(params: Mapping[str, Any]) -> None:
    """Refuse what cannot stand in "params" with Megatron.

    Raises:
        ConfigError: naming the key.
    """
    mode = params.get(TP_MODE, TP_MODES[0])
    if mode not in TP_MODES:
        raise ConfigError(f"optimizer.params.{TP_MODE}: must be one of {', '.join(TP_MODES)}, got {mode!r}{_meant(mode)}")
    if DIAGNOSTICS_PERIOD in params:
        raise ConfigError(f"optimizer.params.{DIAGNOSTICS_PERIOD}: not possible with Megatron; remove it")
    check_optimizer_params({key: value for key, value in params.items() if key != TP_MODE})


def _meant(mode: Any) -> str:
    return f"; {closest(mode, list(TP_MODES))}" if isinstance(mode, str) else ""
