"""Builds BasisRotation for a DeepSpeed engine: parameters routed by module, in the user's own groups."""

from collections.abc import Sequence
from typing import Any

from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule
from torch import Tensor, nn

from ..optim.basis_rotation import BasisRotation
from ..optim.routing import describe, is_linear, named_rotation, pattern_matches, route
from . import agreement
from .config import DIAGNOSTICS_PERIOD, ConfigError, pipeline_options
from .diagnostics_events import write_diagnostics
from .log import log, log_stage
from .refusals import check_experts


def build(engine: Any, model_parameters: Sequence[Any], params: dict[str, Any]) -> BasisRotation:
    """BasisRotation over `model_parameters` (tensors or groups, as given to deepspeed.initialize) with the JSON's `params`, checked before.

    Raises:
        ConfigError: a pattern that matches nothing, or nothing to rotate, in the whole model; experts spread over ranks.
    """
    check_experts(engine.module, "optimizer.type: BasisRotation")
    params = dict(params)
    patterns, diagnostics_period = params.pop("rotate", None), params.pop(DIAGNOSTICS_PERIOD, 0)
    try:
        routes = route(engine.module, patterns, holds_output=_holds_output(engine.module))
    except ValueError as error:
        raise ConfigError(f"optimizer.params.{error}") from None
    names = {parameter: name for name, parameter in engine.module.named_parameters()}

    def routed(group: dict[str, Any]) -> dict[str, Any]:
        parameters = list(group["params"])
        named = [(names.get(p, f"parameter outside the model {index}"), p) for index, p in enumerate(parameters)]
        if group.get("rotate") is not None:  # the script's own routing, which only patterns overrule
            entries = named_rotation(parameters, [name for name, _ in named], group["rotate"], patterns or {})
        else:
            entries = [routes[name].entry if name in routes else False for name, _ in named]
        return {**group, "params": named, "rotate": entries}

    groups = [item if isinstance(item, dict) else None for item in model_parameters]
    loose: list[Tensor] = [item for item, group in zip(model_parameters, groups) if group is None]
    optimizer = BasisRotation([routed(g) for g in ([{"params": loose}] if loose else []) + [g for g in groups if g]], **params)

    rotated = sum(entry is not False for group in optimizer.param_groups for entry in group["rotate"])
    matches = pattern_matches(patterns, names.values())  # a stage sees only its part of the model, hence the sum over all ranks
    total = agreement.agree(agreement.common_facts(engine._config._param_dict), {"rotated": rotated, **matches})
    unmatched = next((pattern for pattern in matches if total[pattern] == 0), None)
    if unmatched is not None:
        raise ConfigError(f"optimizer.params.{unmatched} matches no parameter; in a pipeline, names begin with the number of the layer")
    if total["rotated"] == 0:
        raise ConfigError(
            f"optimizer.params.rotate: nothing would be rotated ({describe(routes)}); include matrices by pattern, or use AdamW"
        )
    _log(engine, routes, optimizer)
    _log_allocation(engine, optimizer)
    if diagnostics_period > 0:
        write_diagnostics(engine, optimizer, diagnostics_period)
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


def _log(engine: Any, routes: dict, optimizer: BasisRotation) -> None:
    log_stage(engine, f"BasisRotation, {describe(routes)}; {optimizer.describe()}")
    others = sorted({name for name, r in routes.items() if not r.rotate and r.reason not in ("norm or bias",)})
    if others:
        log_stage(engine, "AdamW for " + ", ".join(f"{n} ({routes[n].reason})" for n in others[:20]))


def _log_allocation(engine: Any, optimizer: BasisRotation) -> None:
    """Say that sharing refreshes by staleness changes nothing where nothing is late; the asynchronous pipeline says what it does."""
    allocations = {group["refresh_allocation"] for group in optimizer.param_groups} - {"uniform"}
    late = isinstance(engine.module, PipelineModule) and pipeline_options(engine._config._param_dict.get("pipeline")).asynchronous
    if allocations and not late:
        given = ", ".join(sorted(allocations))
        log(f"refresh_allocation {given} is the same as uniform here: without pipeline.schedule async_1f1b no gradient is late")
