"""Cases of BasisRotation inside Megatron's optimizers, by name: sizes of the parallel groups, and what a rank does and reports."""

import re
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from optimizer_model import (
    PARAMS,
    config,
    entry_of,
    in_plain_loop,
    initial_weight,
    made_up,
    named,
    norm_of,
    optimizer_of,
    set_weights,
    sliced,
    train,
    whole_shape,
    wrapped,
)

EXPERTS = 4


def global_name(name: str) -> str:
    """An expert's number among those of all ranks."""
    first = parallel_state.get_expert_model_parallel_rank() * EXPERTS // parallel_state.get_expert_model_parallel_world_size()
    return re.sub(r"local_experts\.(\d+)", lambda found: f"local_experts.{int(found[1]) + first}", name)


def deviation(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], initial: dict[str, torch.Tensor]) -> float:
    """The largest difference of any parameter, relative to its movement."""
    return max(float((found[name] - each).norm() / (each - initial[name]).norm()) for name, each in expected.items())


def weights(model: torch.nn.Module, distributed: bool) -> dict[str, torch.Tensor]:
    """The float32 weights, where this rank has them whole, else the model's."""
    return {global_name(n): (p if distributed else getattr(p, "main_param", p)).detach().float() for n, p in named(model).items()}


def all_shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Whole shapes of all parameters, in the order of the optimizer's groups; experts of all ranks, which have orders of their own."""
    return {global_name(name): whole_shape(p) for name, p in named(model).items()}


def trained(distributed: bool, bf16: bool, clip: float, bucket_size: int | None, settings: dict[str, Any], params: dict[str, Any]) -> tuple:
    model = wrapped(config(bf16, **settings), distributed, bf16, bucket_size)
    optimizer = optimizer_of(model, {**PARAMS, **params}, distributed, bf16, clip)
    set_weights(model, optimizer, global_name)
    return model, optimizer, train(model, optimizer, rename=global_name)


def equals_plain_loop(
    distributed: bool = False,
    bf16: bool = False,
    clip: float = 0.0,
    bucket_size: int | None = None,
    qkv: Any = None,
    scale: Any = None,
    tp_mode: str = "exact",
    params: dict[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Trains and compares with a plain loop over the same matrices: whole ones, or with "blockwise" this rank's parts of them."""
    params = params or {}
    model, _, norms = trained(distributed, bf16, clip, bucket_size, settings, {**params, "tp_mode": tp_mode})
    parameters = {global_name(name): p for name, p in named(model).items()}
    shapes = {name: whole_shape(p) for name, p in parameters.items()}
    everything = sorted({each for of_rank in gathered(list(shapes.items())) for each in of_rank})
    norm = norm_of(everything, 0)

    def part(of: Any) -> Any:
        return lambda name, shape, *number: sliced(name, of(name, shapes[name], *number), parameters[name])

    def entry(name: str) -> Any:
        found = entry_of(name)
        found = qkv if qkv and name.endswith("linear_qkv.weight") else found
        if tp_mode == "blockwise" and isinstance(found, dict):
            size = parallel_state.get_tensor_model_parallel_world_size()
            smaller = {"groups": found["groups"] // size} if "groups" in found else {"rows": [rows // size for rows in found["rows"]]}
            return found | smaller
        return found

    whole, expected = tp_mode == "exact", {}
    # Megatron has an optimizer of its own for experts that expert parallelism spreads, with refreshes of its own.
    spread = parallel_state.get_expert_model_parallel_world_size() > 1
    for experts in (False, True) if spread else (None,):
        chosen = {name: each for name, each in shapes.items() if experts is None or ("local_experts" in name) == experts}
        expected |= in_plain_loop(
            chosen if whole else {name: tuple(parameters[name].shape) for name in chosen},
            entry,
            made_up if whole else part(made_up),
            initial_weight if whole else part(initial_weight),
            bf16,
            clip,
            {**PARAMS, **params},
            norms=norms,
        )
    if whole:
        expected = {name: sliced(name, each, parameters[name]) for name, each in expected.items()}
    start = {name: sliced(name, initial_weight(name, shapes[name]), p) for name, p in parameters.items()}
    if bf16 and distributed:
        expected = {name: each.to(torch.bfloat16).float() for name, each in expected.items()}
    return {"deviation": deviation(weights(model, distributed), expected, start), "norm": abs(norms[0] / norm - 1.0)}


def gathered(value: Any) -> list[Any]:
    """What every rank of the world has."""
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, value)
    return of_ranks


TP2, EP2 = {"tensor_model_parallel_size": 2}, {"expert_model_parallel_size": 2}
ONE_GROUP = {"rows": [32, 8, 8], "groups": 1}

CASES = {
    "plain 1": ({}, lambda: equals_plain_loop()),
    "clipped 1": ({}, lambda: equals_plain_loop(clip=1.0)),
    "bf16 1": ({}, lambda: equals_plain_loop(bf16=True)),
    "distributed 1": ({}, lambda: equals_plain_loop(distributed=True)),
    "experts 1": ({}, lambda: equals_plain_loop(experts=EXPERTS, clip=1.0)),
    "plain dp2": ({}, lambda: equals_plain_loop()),
    "distributed dp2": ({}, lambda: equals_plain_loop(distributed=True)),
    "distributed buckets dp2": ({}, lambda: equals_plain_loop(distributed=True, bucket_size=3000)),
    "bf16 dp2": ({}, lambda: equals_plain_loop(bf16=True)),
    "bf16 distributed dp2": ({}, lambda: equals_plain_loop(bf16=True, distributed=True)),
    "exact tp2": (TP2, lambda: equals_plain_loop(clip=1.0)),
    "exact distributed tp2": (TP2, lambda: equals_plain_loop(distributed=True)),
    "exact one group tp2": (TP2, lambda: equals_plain_loop(query_groups=1, qkv=ONE_GROUP)),
    "blockwise tp2": (TP2, lambda: equals_plain_loop(tp_mode="blockwise")),
    "blockwise distributed tp2": (TP2, lambda: equals_plain_loop(tp_mode="blockwise", distributed=True, clip=1.0)),
    "experts ep2": (EP2, lambda: equals_plain_loop(experts=EXPERTS, clip=1.0)),
    "experts distributed ep2": (EP2, lambda: equals_plain_loop(experts=EXPERTS, clip=1.0, distributed=True)),
    "experts distributed unclipped ep2": (EP2, lambda: equals_plain_loop(experts=EXPERTS, distributed=True)),
    "exact tp2 dp2": (TP2, lambda: equals_plain_loop()),
    "exact distributed tp2 dp2": (TP2, lambda: equals_plain_loop(distributed=True, bucket_size=3000, clip=1.0)),
    "blockwise tp2 dp2": (TP2, lambda: equals_plain_loop(tp_mode="blockwise", bf16=True)),
    "experts exact tp2 ep2": (TP2 | EP2, lambda: equals_plain_loop(experts=EXPERTS)),
    "experts distributed ep2 dp4": (EP2, lambda: equals_plain_loop(experts=EXPERTS, distributed=True, clip=1.0)),
}
