"""Builds BasisRotation for a DeepSpeed engine: parameters routed by module, in the user's own groups."""

from collections.abc import Sequence
from typing import Any

from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule
from torch import Tensor, nn

from ..optim.basis_rotation import BasisRotation
from ..optim.routing import describe, is_linear, named_rotation, pattern_matches, route
from . import agreement
from .config import ConfigError
from .log import log
from .refusals import check_experts


def build(engine: Any, model_parameters: Sequence[Any], params: dict[str, Any]) -> BasisRotation:
    """BasisRotation over `model_parameters` (tensors or groups, as given to deepspeed.initialize) with the JSON's `params`, checked before.

    Raises:
        ConfigError: a pattern that matches nothing, or nothing to rotate, in the whole model; experts spread over ranks.
    """
    check_experts(engine.module, "optimizer.type: BasisRotation")
    params = dict(params)
    patterns = params.pop("rotate", None)
    try:
        routes = route(engine.module, patterns, holds_output=_holds_output(engine.module))
    except ValueError as error:
        raise ConfigError(f"optimizer.params.{error}") from None
    names = {parameter: name for name, parameter in engine.module.named_parameters()}

    def routed(group: dict[str, Any]) -> dict[str, Any]:
        parameters = list(group["params"])
        named = [(names.get(p, f"parameter outside the model {index}"), p) for index, p in enumerate(parameters)]
        if group.get("rotate") is not None:  # the script's own routing, which only patterns overrule
            flags = named_rotation(parameters, [name for name, _ in named], group["rotate"], patterns or {})
        else:
            flags = [name in routes and routes[name].rotate for name, _ in named]
        return {**group, "params": named, "rotate": flags}

    groups = [item if isinstance(item, dict) else None for item in model_parameters]
    loose: list[Tensor] = [item for item, group in zip(model_parameters, groups) if group is None]
    optimizer = BasisRotation([routed(g) for g in ([{"params": loose}] if loose else []) + [g for g in groups if g]], **params)

    rotated = sum(sum(group["rotate"]) for group in optimizer.param_groups)
    matches = pattern_matches(patterns, names.values())  # a stage sees only its part of the model, hence the sum over all ranks
    total = agreement.agree(agreement.common_facts(engine._config._param_dict), {"rotated": rotated, **matches})
    unmatched = next((pattern for pattern in matches if total[pattern] == 0), None)
    if unmatched is not None:
        raise ConfigError(f"optimizer.params.{unmatched} matches no parameter; in a pipeline, names begin with the number of the layer")
    if total["rotated"] == 0:
        raise ConfigError(
            f"optimizer.params.rotate: nothing would be rotated ({describe(routes)}); include matrices by pattern, or use AdamW"
        )
    _log(engine, routes)
    return optimizer


def _holds_output(module: nn.Module) -> bool:
    """Whether the output head can be in this module: always, but for a pipeline stage that is not the last or ends in one more block."""
    if not isinstance(module, PipelineModule):
        return True
    if module.stage_id != module.num_stages - 1:
        return False
    linears = [name for name, child in module.named_modules() if is_linear(child)]
    layer, _, inner = linears[-1].partition(".") if linears else ("", "", "")
    if not (layer.isdigit() and inner):
        return True
    kinds = [spec.typename if isinstance(spec, LayerSpec) else type(spec) for spec in module._layer_specs]
    return kinds.count(kinds[int(layer)]) == 1


def _log(engine: Any, routes: dict) -> None:
    grid = getattr(engine.module, "_grid", None)
    where = "" if grid is None else f"stage {grid.get_stage_id()}: "
    speaker = engine.global_rank if grid is not None and grid.get_data_parallel_id() == 0 else 0
    log(f"{where}BasisRotation, {describe(routes)}", rank=speaker)
    others = sorted({name for name, r in routes.items() if not r.rotate and r.reason not in ("norm or bias",)})
    if others:
        log(f"{where}AdamW for " + ", ".join(f"{n} ({routes[n].reason})" for n in others[:20]), rank=speaker)
