"""An optimizer as DeepSpeed's JSON names it, built for every stage of a model: BasisRotation, or one of torch."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..optim.basis_rotation import BasisRotation
from ..optim.options import check_names, check_options, check_patterns, closest
from ..optim.routing import param_groups

TYPES: dict[str, type[torch.optim.Optimizer]] = {
    "BasisRotation": BasisRotation,
    "AdamW": torch.optim.AdamW,
    "NAdam": torch.optim.NAdam,
    "SGD": torch.optim.SGD,
}


# What only makes sense around a captured or a differentiated update.
LEFT_OUT = ("params", "capturable", "differentiable")


@dataclass(frozen=True)
class OptimizerBlock:
    """A checked block {"type": ..., "params": {...}}.

    Attributes:
        type: one of `TYPES`.
        params: its parameters; what is missing has the optimizer's own default.
    """

    type: str
    params: dict[str, Any]

    @classmethod
    def read(cls, block: Any, lr: float) -> "OptimizerBlock":
        """Check a block, as JSON has it.

        Args:
            block: {"type": "AdamW", "params": {...}}; the type in any letter case, the params may be left out.
            lr: learning rate where the block has none.

        Raises:
            ValueError: a wrong type, key or value.
        """
        if not isinstance(block, Mapping):
            raise ValueError(f'must be an object such as {{"type": "AdamW", "params": {{...}}}}, got {block!r}')
        check_names(block, ("type", "params"), "optimizer block")
        kind, params = block.get("type"), block.get("params", {})
        by_lower_case = {name.lower(): name for name in TYPES}
        if not isinstance(kind, str) or kind.lower() not in by_lower_case:
            raise ValueError(f"type: unknown optimizer {kind!r}; {closest(str(kind), list(TYPES))}")
        if not isinstance(params, Mapping):
            raise ValueError(f"params: must be an object {{...}}, got {params!r}")
        name = by_lower_case[kind.lower()]
        defaults = {key: each.default for key, each in inspect.signature(TYPES[name]).parameters.items() if key not in LEFT_OUT}
        check_names(params, defaults, "params")
        try:
            if name == "BasisRotation":
                check_patterns(params.get("rotate"))
            else:
                _check_kinds(params, defaults)
            check_options(params)
        except ValueError as error:
            raise ValueError(f"params.{error}") from error
        return cls(name, {"lr": lr, **params})

    def build(self, stages: Sequence[nn.Sequential]) -> list[torch.optim.Optimizer]:
        """One optimizer for each stage; parameters are routed, and patterns matched, in the whole model.

        Args:
            stages: slices of one `nn.Sequential`, which keep its layers' names.

        Raises:
            ValueError: parameters of a wrong kind or value, patterns that match nothing, or nothing to rotate.
        """
        params = dict(self.params)
        try:
            if self.type != "BasisRotation":
                return [TYPES[self.type](stage.named_parameters(), **params) for stage in stages]
            groups = _routed(stages, params.pop("rotate", None))
            return [BasisRotation(own, **params) for own in groups]
        except (ValueError, RuntimeError) as error:  # RuntimeError: torch's optimizers, where two parameters exclude each other
            raise ValueError(f"params: {' '.join(str(error).split())}") from error


def _check_kinds(params: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuse numbers that are none, and switches that are neither on nor off, which torch's optimizers would trip over without a name."""
    for key, value in params.items():
        default, is_switch = defaults[key], isinstance(value, bool)
        if isinstance(default, bool) and not is_switch:
            raise ValueError(f"{key}: must be true or false, got {value!r}")
        if isinstance(default, (int, float)) and not isinstance(default, bool) and (is_switch or not isinstance(value, (int, float))):
            raise ValueError(f"{key}: must be a number, got {value!r}")
        if default is None and not (is_switch or value is None):
            raise ValueError(f"{key}: must be true, false or null, got {value!r}")


def _routed(stages: Sequence[nn.Sequential], rotate: Mapping[str, Any] | None) -> list[list[dict[str, Any]]]:
    """The groups of `param_groups` for the whole model, cut into those of each stage."""
    whole = nn.Sequential()
    for stage in stages:
        for name, layer in stage.named_children():
            whole.add_module(name, layer)
    result = []
    for stage in stages:
        own, groups = dict(stage.named_parameters()), []
        for group in param_groups(whole, rotate=rotate):
            kept = [index for index, (name, _) in enumerate(group["params"]) if name in own]
            entries = group["rotate"] and [group["rotate"][index] for index in kept]
            groups.append({"params": [group["params"][index] for index in kept], "rotate": entries})
        result.append([group for group in groups if group["params"]])
    return result
