"""Cases of BasisRotation inside Megatron's optimizers, by name: sizes of the parallel groups, and what a rank does and reports."""

import copy
import itertools
import re
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.process_groups_config import ProcessGroupCollection
from optimizer_model import (
    LR,
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

from ds_basisrot.common.blocks import ConfigError
from megatron_patches import optimizer_names, rotation_states
from megatron_patches.optimizer import build, rotations

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


def equals_plain_loop(
    distributed: bool = False,
    bf16: bool = False,
    clip: float = 0.0,
    bucket_size: int | None = None,
    qkv: Any = None,
    scale: Any = None,
    tp_mode: str = "exact",
    outer_lr: float = LR,
    native: Any = dict,
    **settings: Any,
) -> dict[str, Any]:
    """Trains and compares with a plain loop over the same matrices: whole ones, or with "blockwise" this rank's parts of them."""
    model = wrapped(config(bf16, **settings), distributed, bf16, bucket_size)
    optimizer = optimizer_of(model, {**PARAMS, "tp_mode": tp_mode}, distributed, bf16, clip, native())
    set_weights(model, optimizer, global_name)
    norms = train(model, optimizer, rename=global_name)
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
            norms=norms,
            outer_lr=outer_lr,
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


def differing_copies(model: torch.nn.Module) -> int:
    """Parameters whose copies on other ranks are not bitwise the same."""
    tensor, replicas = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_data_parallel_group()
    count = 0
    for p in named(model).values():
        groups = [replicas] + [tensor] * (not getattr(p, "tensor_model_parallel", False))
        for group in groups:
            others = [torch.empty_like(p) for _ in range(dist.get_world_size(group))]
            dist.all_gather(others, p.detach().contiguous(), group=group)
            count += any(not torch.equal(p, other) for other in others)
    return count


def resumes(distributed: bool = False, bf16: bool = False, tp_mode: str = "blockwise") -> dict[str, Any]:
    """A run that is saved by name and goes on in a new model and optimizer, compared with one that was not saved."""

    def begin() -> tuple:
        model = wrapped(config(bf16), distributed, bf16)
        optimizer = optimizer_of(model, {**PARAMS, "tp_mode": tp_mode}, distributed, bf16, 0.0)
        set_weights(model, optimizer)
        return model, optimizer

    model, optimizer = begin()
    train(model, optimizer, 7)
    saved, options = rotation_states.sharded(rotations(optimizer)), copy.deepcopy(optimizer.state_dict())
    states = {key: copy.deepcopy(entry.data) for key, entry in saved.items()}
    parameters = {name: p.detach().clone() for name, p in named(model).items()}
    train(model, optimizer, 6, 7)

    resumed, other = begin()
    with torch.no_grad():
        for name, p in named(resumed).items():
            p.copy_(parameters[name])
    other.reload_model_params()
    other.load_state_dict(options)
    asked = rotation_states.wanted(rotations(other), saved)
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, list(saved))
    rotation_states.restore(rotations(other), states, dict.fromkeys(itertools.chain.from_iterable(of_ranks)))
    train(resumed, other, 6, 7)
    rotated = [key for key in states if key.startswith(rotation_states.MATRIX) and key.endswith(rotation_states.FACTS)]
    return {
        "differing": sum(not torch.equal(p, q) for p, q in zip(named(model).values(), named(resumed).values())),
        "differing copies": differing_copies(resumed),
        "names not asked": sorted(set(states) - set(asked)),
        "rotated here": len(rotated),
        "steps": {int(state["step"]) for state in inner_states(other)} == {13},
    }


def inner_states(optimizer: Any) -> list[dict[str, Any]]:
    """What Megatron sees of the states."""
    return [state for each in optimizer.chained_optimizers for state in each.optimizer.state.values()]


def skips_together(distributed: bool = False, tp_mode: str = "blockwise") -> dict[str, Any]:
    """A gradient that is not finite on one rank alone: no rank updates anything, and training goes on."""
    model = wrapped(config(), distributed, False)
    optimizer = optimizer_of(model, {**PARAMS, "tp_mode": tp_mode}, distributed, False, 0.0)
    set_weights(model, optimizer)
    train(model, optimizer, 3)
    before = {name: p.detach().clone() for name, p in named(model).items()}

    model.zero_grad_buffer()
    for p in named(model).values():
        p.main_grad.fill_(torch.nan if dist.get_rank() == 1 else 1.0)
    optimizer.step()
    moved = [each for each, p in named(model).items() if not torch.equal(p, before[each])]
    train(model, optimizer, 2, 3)
    return {
        "moved": moved,
        "skipped": [rotation.skipped_updates for rotation in rotations(optimizer)],
        "differing copies": differing_copies(model),
        "finite": all(bool(p.isfinite().all()) for p in named(model).values()),
    }


def refusals() -> dict[str, str]:
    """What is refused, by what was asked for, and the message."""
    model = wrapped(config(), False, False)
    settings = {"optimizer": "adam", "lr": 1e-2, "clip_grad": 0.0}
    asked = {
        "offload": ({"optimizer_cpu_offload": True}, {}),
        "fp16": ({"fp16": True}, {}),
        "sgd": ({"optimizer": "sgd"}, {}),
        "l2": ({"decoupled_weight_decay": False}, {}),
        "lr": ({}, {"lr": 1.0}),
        "betas": ({}, {"betas": [0.8, 0.9]}),
        "unknown": ({}, {"geometri": "bilateral"}),
        "mode": ({}, {"tp_mode": "exactly"}),
        "pattern": ({}, {"rotate": {"include": ["*.nothing"]}}),
        "nothing": ({}, {"rotate": {"exclude": ["*"]}}),
        "max_dim": ({}, {"max_dim": 0}),
        "diagnostics": ({}, {"diagnostics_period": 5}),
    }
    found = {}
    for name, (options, params) in asked.items():
        found[name] = message_of(lambda o=options, p=params: build(OptimizerConfig(**settings | o), [model], p, get_megatron_optimizer))
    config_of_precision = OptimizerConfig(**settings)
    config_of_precision.use_precision_aware_optimizer = True
    found["precision"] = message_of(lambda: build(config_of_precision, [model], {}, get_megatron_optimizer))
    found["bare"] = message_of(lambda: build(OptimizerConfig(**settings), [model.module], {}, get_megatron_optimizer))
    with mock.patch("megatron.core.__version__", "0.15.0"):
        found["version"] = message_of(lambda: build(OptimizerConfig(**settings), [model], {}, get_megatron_optimizer))
    with mock.patch.dict(optimizer_names.ATTRIBUTES, {"FP32Optimizer": (("no_such_name", "a test"),)}):
        found["name"] = message_of(lambda: build(OptimizerConfig(**settings), [model], {}, get_megatron_optimizer))
    found["same"] = message_of(
        lambda: build(OptimizerConfig(**settings), [model], {"lr": 1e-2, "betas": [0.9, 0.999]}, get_megatron_optimizer)
    )
    return found


def message_of(call: Any) -> str:
    try:
        call()
    except ConfigError as error:
        return str(error)
    return ""


def two_rates() -> dict[str, Any]:
    """Arguments of `get_megatron_optimizer` for a learning rate of their own for embedding and output layer."""
    return {"config_overrides": get_standard_config_overrides(OptimizerConfig(lr=LR, decoupled_lr=LR / 4))}


def collection() -> dict[str, Any]:
    """Arguments of `get_megatron_optimizer` that give it its process groups."""
    return {"pg_collection": ProcessGroupCollection.use_mpu_process_groups(), "use_gloo_process_groups": False}


TP2, EP2 = {"tensor_model_parallel_size": 2}, {"expert_model_parallel_size": 2}
ONE_GROUP = {"rows": [32, 8, 8], "groups": 1}

CASES = {
    "plain 1": ({}, lambda: equals_plain_loop()),
    "clipped 1": ({}, lambda: equals_plain_loop(clip=1.0)),
    "bf16 1": ({}, lambda: equals_plain_loop(bf16=True)),
    "distributed 1": ({}, lambda: equals_plain_loop(distributed=True)),
    "two rates 1": ({}, lambda: equals_plain_loop(outer_lr=LR / 4, native=two_rates)),
    "collection dp2": ({}, lambda: equals_plain_loop(distributed=True, native=collection)),
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
    "refusals": ({}, refusals),
    "resumes 1": ({}, lambda: resumes()),
    "resumes dp2": ({}, lambda: resumes()),
    "resumes bf16 dp2": ({}, lambda: resumes(bf16=True)),
    "resumes distributed dp2": ({}, lambda: resumes(distributed=True)),
    "resumes exact tp2": (TP2, lambda: resumes(tp_mode="exact")),
    "resumes blockwise tp2": (TP2, lambda: resumes()),
    "skips dp2": ({}, lambda: skips_together(distributed=True)),
    "skips blockwise tp2": (TP2, lambda: skips_together()),
    "skips exact tp2": (TP2, lambda: skips_together(tp_mode="exact")),
    "exact tp2 dp2": (TP2, lambda: equals_plain_loop()),
    "exact distributed tp2 dp2": (TP2, lambda: equals_plain_loop(distributed=True, bucket_size=3000, clip=1.0)),
    "blockwise tp2 dp2": (TP2, lambda: equals_plain_loop(tp_mode="blockwise", bf16=True)),
    "experts exact tp2 ep2": (TP2 | EP2, lambda: equals_plain_loop(experts=EXPERTS)),
    "experts distributed ep2 dp4": (EP2, lambda: equals_plain_loop(experts=EXPERTS, distributed=True, clip=1.0)),
}
