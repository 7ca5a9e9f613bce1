"""Builds BasisRotation for a DeepSpeed engine: parameters routed by module, in the user's own groups."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule
from torch import Tensor, nn

from ..common.agreement import agree
from ..common.blocks import DIAGNOSTICS_PERIOD, ConfigError, optimizer_params
from ..common.log import log
from ..optim.basis_rotation import BasisRotation
from ..optim.routing import describe, is_linear, named_rotation, pattern_matches, route
from ..sharding.optimizer import ShardedBasisRotation
from .config import pipeline_options
from .diagnostics_events import write_diagnostics
from .facts import common_facts
from .log import log_stage
from .refusals import check_experts
from .tied_layers import tied_names


def build(engine: Any, model_parameters: Sequence[Any], params: dict[str, Any]) -> BasisRotation | ShardedBasisRotation:
    """BasisRotation over `model_parameters` (tensors or groups, as given to deepspeed.initialize) with the JSON's `params`, checked before.

    Where DeepSpeed will put flat buffers in the place of parameters, it is the sharded one.

    Raises:
        ConfigError: a pattern that matches nothing, or nothing to rotate, in the whole model; experts spread over ranks.
    """
    sharded = is_sharded(engine)
    if not sharded:
        check_experts(engine.module, "zero_optimization.stage: BasisRotation with stage 0", ", or set it to 1")
    params = optimizer_params({"params": params})
    patterns, diagnostics_period = params.pop("rotate", None), params.pop(DIAGNOSTICS_PERIOD, 0)
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    tied = _tied_to_another_stage(engine)

    def routed(group: dict[str, Any]) -> dict[str, Any]:
        parameters = [p for p in group["params"] if is_optimized(p)]
        named = [(names.get(p, f"parameter outside the model {index}"), p) for index, p in enumerate(parameters)]
        if group.get("rotate") is not None:  # the script's own routing, which only patterns overrule
            entries = named_rotation(parameters, [name for name, _ in named], group["rotate"], patterns or {})
        else:
            entries = [routes[name].entry if name in routes else False for name, _ in named]
        entries = [False if name in tied else entry for (name, _), entry in zip(named, entries)]
        if sharded:
            named = [(name, nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"))) for name, p in named]
        return {**group, "params": named, "rotate": entries}

    groups = [item if isinstance(item, dict) else None for item in model_parameters]
    loose: list[Tensor] = [item for item, group in zip(model_parameters, groups) if group is None]
    given = ([{"params": loose}] if loose else []) + [{**g, "params": list(g["params"])} for g in groups if g]
    given = [group for group in given if any(map(is_optimized, group["params"]))]
    with whole_shapes(engine.module):
        try:
            routes = route(engine.module, patterns, holds_output=_holds_output(engine.module))
        except ValueError as error:
            raise ConfigError(f"optimizer.params.{error}") from None
        optimizer = BasisRotation([routed(group) for group in given], **params)
    described = optimizer.describe()

    rotated = sum(entry is not False for group in optimizer.param_groups for entry in group["rotate"])
    matches = pattern_matches(patterns, names.values())  # a stage sees only its part of the model, hence the sum over all ranks
    total = agree(common_facts(engine._config._param_dict), {"rotated": rotated, **matches})
    unmatched = next((pattern for pattern in matches if total[pattern] == 0), None)
    if unmatched is not None:
        raise ConfigError(f"optimizer.params.{unmatched} matches no parameter; in a pipeline, names begin with the number of the layer")
    if total["rotated"] == 0:
        raise ConfigError(
            f"optimizer.params.rotate: nothing would be rotated ({describe(routes)}); include matrices by pattern, or use AdamW"
        )
    _log(engine, routes, described)
    if tied:
        log_stage(engine, f"AdamW for {', '.join(tied)} (tied to another stage: both copies must be updated alike)")
    _log_allocation(engine, optimizer)
    optimizer.layout_independent = True  # as sharded ones are
    if sharded:
        optimizer = ShardedBasisRotation(optimizer, [[p for p in group["params"] if is_optimized(p)] for group in given])
    optimizer.gradient_dtype = _gradient_dtype(engine)
    if diagnostics_period > 0:
        write_diagnostics(engine, optimizer, diagnostics_period)
    return optimizer


def _tied_to_another_stage(engine: Any) -> list[str]:
    """Parameters whose copies on two stages must be updated bitwise alike, which bases refreshed at different times do not do."""
    asynchronous = isinstance(engine.module, PipelineModule) and pipeline_options(engine._config._param_dict.get("pipeline")).asynchronous
    return tied_names(engine.module) if asynchronous else []


def is_sharded(engine: Any) -> bool:
    """Whether DeepSpeed will wrap the optimizer into one that flattens parameters: every ZeRO stage, and bf16 in a pipeline."""
    return engine.zero_optimization() or (engine.bfloat16_enabled() and engine.pipeline_parallelism)


def is_optimized(parameter: Tensor) -> bool:
    """Whether DeepSpeed's wrappers keep a parameter: trainable, and not empty."""
    return parameter.requires_grad and getattr(parameter, "ds_numel", parameter.numel()) > 0


@contextmanager
def whole_shapes(module: nn.Module) -> Iterator[None]:
    """Parameters that ZeRO 3 has partitioned have their whole shapes inside, without the memory for it."""
    partitioned = [(p, p.data) for p in module.parameters() if hasattr(p, "ds_shape") and p.shape != p.ds_shape]
    try:
        for p, data in partitioned:
            p.data = data.new_zeros(1).expand(p.ds_shape)
        yield
    finally:
        for p, data in partitioned:
            p.data = data


def _gradient_dtype(engine: Any) -> torch.dtype | None:
    """The least precision in which gradients are computed, added up or sent; None for float32."""
    dtypes = {*engine.get_data_types(), engine.communication_data_type}
    if engine.torch_autocast_enabled():
        dtypes.add(engine.torch_autocast_dtype())
    return next((dtype for dtype in (torch.bfloat16, torch.float16) if dtype in dtypes), None)


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


def _log(engine: Any, routes: dict, described: str) -> None:
    log_stage(engine, f"BasisRotation, {describe(routes)}; {described}")
    others = sorted({name for name, r in routes.items() if not r.rotate and r.reason not in ("norm or bias",)})
    if others:
        log_stage(engine, "AdamW for " + ", ".join(f"{n} ({routes[n].reason})" for n in others[:20]))


def _log_allocation(engine: Any, optimizer: BasisRotation) -> None:
    """Say that sharing refreshes by staleness changes nothing where nothing is late; the asynchronous pipeline says what it does.

    The optimizer would give advice for other loops, as long as it does not know of stages. A script that gives its groups a staleness has
    reasons of its own.
    """
    allocations = {group["refresh_allocation"] for group in optimizer.param_groups} - {"uniform"}
    late = isinstance(engine.module, PipelineModule) and pipeline_options(engine._config._param_dict.get("pipeline")).asynchronous
    told = len({group["staleness"] for group in optimizer.param_groups}) > 1
    if allocations and not late and not told:
        given = ", ".join(sorted(allocations))
        log(f"refresh_allocation {given} is the same as uniform here: without pipeline.schedule async_1f1b no gradient is late")
        optimizer.share_refreshes([0.0], [optimizer.refresh_cost()], stage=0)
