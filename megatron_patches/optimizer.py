"""BasisRotation in the optimizers that Megatron builds: in the place of Adam, or of what its registry was asked for."""

import contextlib
import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from ds_basisrot.common.agreement import agree, flat
from ds_basisrot.common.blocks import ConfigError, optimizer_params
from ds_basisrot.common.log import log
from ds_basisrot.optim.basis_rotation import BasisRotation
from ds_basisrot.optim.roles import Role, assign_roles
from ds_basisrot.optim.routing import describe, pattern_matches
from ds_basisrot.sharding.optimizer import ShardedBasisRotation

from . import registry, statistics
from .config import TP_MODE, TP_MODES, check_params
from .matrices import Matrices, matrices_of
from .optimizer_names import check, check_attributes
from .placement import Lot, cuts_by_cost, cuts_of_buckets, cuts_of_owners
from .refusals import WEIGHT_SHARDS
from .sharded import InnerBasisRotation, Share
from .sharers import Groups, place_in

# The JSON's parameter -> (Megatron's flag, how its configuration has it).
MEGATRONS_OWN: dict[str, tuple[str, Callable[[OptimizerConfig], Any]]] = {
    "lr": ("--lr", lambda config: config.lr),
    "betas": ("--adam-beta1, --adam-beta2", lambda config: (config.adam_beta1, config.adam_beta2)),
    "eps": ("--adam-eps", lambda config: config.adam_eps),
    "weight_decay": ("--weight-decay", lambda config: config.weight_decay),
}

# Megatron's option -> (its flag, if it has one; whether it is as we need it; what to do)
NEEDED: dict[str, tuple[str, Callable[[OptimizerConfig], bool], str]] = {
    "optimizer": (
        "--optimizer",
        lambda config: config.optimizer == "adam" or registry.is_chosen(config),
        "set it to adam, in whose place BasisRotation is put",
    ),
    "fp16": ("--fp16", lambda config: not config.fp16, "train in bf16 or fp32"),
    "optimizer_cpu_offload": (
        "--optimizer-cpu-offload",
        lambda config: not config.optimizer_cpu_offload,
        "switch it off: BasisRotation updates on the device",
    ),
    "use_precision_aware_optimizer": (
        "--use-precision-aware-optimizer",
        lambda config: not config.use_precision_aware_optimizer,
        'switch it off; the JSON\'s "state_dtype" stores momentum and bases in bfloat16',
    ),
    "decoupled_weight_decay": (
        "",
        lambda config: config.decoupled_weight_decay,
        "set it to true: BasisRotation decays weights as AdamW does",
    ),
}


def build(
    config: OptimizerConfig,
    model_chunks: Sequence[nn.Module],
    params: Mapping[str, Any],
    native: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> MegatronOptimizer:
    """Megatron's optimizer, as `native` builds it, with BasisRotation in it. Every rank calls it.

    Gradient norm, clipping, float32 copies of weights, learning rates and the distributed optimizer's slices stay Megatron's.

    Args:
        config: Megatron's; learning rate, betas, eps and weight decay are taken from it.
        model_chunks: of this rank, wrapped in DistributedDataParallel.
        params: the JSON's "params": those of BasisRotation, and "tp_mode": "blockwise" rotates each tensor-parallel rank's part of a weight
            as a matrix of its own, "exact" the whole weight.
        native: `megatron.core.optimizer.get_megatron_optimizer`.
        args, kwargs: of `native`, after the first two.

    Raises:
        ConfigError: naming the key or option, or what megatron-core lacks.
    """
    check()
    options, patterns, exact = to_options(config, params)
    _check_chunks(model_chunks)
    by_name = registry.is_chosen(config)
    if by_name:
        registry.check_layer_wise(config, model_chunks)
    with registry.usable() if by_name else contextlib.nullcontext():
        built = native(config, model_chunks, *args, **kwargs)
    given = inspect.signature(native).bind(config, model_chunks, *args, **kwargs).arguments
    groups = Groups(model_chunks[0], given.get("pg_collection"), exact)
    found = matrices_of(model_chunks, groups.places, exact, patterns)
    _agree(found, params, patterns)
    by_layers = by_name and registry.is_layer_wise(built)
    ours: set[str] = set()
    for optimizer in statistics.leaves(built):
        if not optimizer.is_stub_optimizer and (not by_name or isinstance(optimizer.optimizer, registry.Waiting)):
            ours |= _replace_inner(optimizer, found, model_chunks, groups, options, by_layers)
    for each in found if by_name else ():
        if each.entry is not False and each.name not in ours:
            raise ConfigError(
                f"optimizer.params.rotate: Megatron gives {each.name} to Adam, with --optimizer {registry.NAME}; use --optimizer adam"
            )
    return built


def rotations(built: MegatronOptimizer) -> list[ShardedBasisRotation]:
    """BasisRotation of dense and of expert parameters on this rank, as far as there are any."""
    return [each.optimizer.rotation for each in statistics.leaves(built) if isinstance(each.optimizer, InnerBasisRotation)]


def to_options(config: OptimizerConfig, params: Mapping[str, Any]) -> tuple[dict[str, Any], Mapping[str, Any] | None, bool]:
    """Options of BasisRotation, patterns, and whether matrices are whole over tensor parallelism.

    Raises:
        ConfigError: naming the key or Megatron's option.
    """
    for name, (flag, is_fit, instead) in NEEDED.items():
        if not is_fit(config):
            option = f"OptimizerConfig.{name}={getattr(config, name)!r}"
            raise ConfigError(f"{f'{flag} ({option})' if flag else option}: not possible with BasisRotation; {instead}")
    options = optimizer_params({"params": params})
    check_params(options)
    mode = options.pop(TP_MODE, TP_MODES[0])
    for name, (flag, of) in MEGATRONS_OWN.items():
        given = options.pop(name, None)
        if given is not None and (tuple(given) if isinstance(given, list) else given) != of(config):
            raise ConfigError(f"optimizer.params.{name}: {given!r}, but {flag} of Megatron: {of(config)!r}; remove it from the JSON")
        options[name] = of(config)
    return options, options.pop("rotate", None), mode == "exact"


def _check_chunks(model_chunks: Sequence[nn.Module]) -> None:
    for chunk in model_chunks:
        if not isinstance(chunk, DistributedDataParallel) or chunk.ddp_config.use_megatron_fsdp:
            raise ConfigError(
                f"{type(chunk).__name__}: BasisRotation needs megatron.core.distributed.DistributedDataParallel, without FSDP; "
                "switch use_megatron_fsdp and use_torch_fsdp2 off"
            )
        if chunk.ddp_config.num_distributed_optimizer_instances > 1:
            raise ConfigError("num_distributed_optimizer_instances: BasisRotation needs 1")
        if any(getattr(get_model_config(chunk), name, 1) > 1 for name in WEIGHT_SHARDS):
            raise ConfigError("--tensor-parallel-num-weight-shards: not possible with BasisRotation, which needs whole weights; remove it")


def _agree(found: Sequence[Matrices], params: Mapping[str, Any], patterns: Mapping[str, Any] | None) -> None:
    """Refuse on all ranks what differs between them, rotates nothing, or has a pattern that matches nothing; say what is rotated here."""
    matches = pattern_matches(patterns, [each.name for each in found])
    total = agree(flat("optimizer.params", dict(params)), {"rotated": sum(each.entry is not False for each in found), **matches})
    unmatched = next((pattern for pattern in matches if total[pattern] == 0), None)
    if unmatched is not None:
        raise ConfigError(f"optimizer.params.{unmatched} matches no parameter of the model")
    described = describe({each.name: each.route for each in found})
    if total["rotated"] == 0:
        raise ConfigError(f"optimizer.params.rotate: nothing would be rotated ({described}); include matrices by pattern, or use Adam")
    log(f"BasisRotation, on rank 0 {described}")


def _tensors(optimizer: MegatronOptimizer) -> dict[Tensor, Tensor]:
    """What is updated in the place of each of the model's parameters, as far as this rank updates any of it."""
    check_attributes(optimizer, type(optimizer).__name__)
    if isinstance(optimizer, FP32Optimizer):
        return {p: p for group in optimizer.optimizer.param_groups for p in group["params"]}
    if isinstance(optimizer, Float16OptimizerWithFloat16Params):
        pairs = [(optimizer.float16_groups, optimizer.fp32_from_float16_groups), (optimizer.fp32_from_fp32_groups,) * 2]
    else:
        pairs = [
            (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
            (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
        ]
    return {p: updated for models, others in pairs for model, other in zip(models, others) for p, updated in zip(model, other)}


def _replace_inner(
    optimizer: MegatronOptimizer,
    found: Sequence[Matrices],
    model_chunks: Sequence[nn.Module],
    groups: Groups,
    options: Mapping[str, Any],
    by_layers: bool,
) -> set[str]:
    """Put BasisRotation into one of Megatron's optimizers; `by_layers`: each replica updates some parameters, the whole of them.

    Returns:
        The names of what it updates, on all replicas together.
    """
    if not isinstance(optimizer, (FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer)):
        raise ConfigError(f"BasisRotation does not know Megatron's {type(optimizer).__name__}")
    updated, inner_groups = _tensors(optimizer), optimizer.optimizer.param_groups
    is_sliced = isinstance(optimizer, DistributedOptimizer)
    sharers = groups.experts if inner_groups[0]["is_expert_parallel"] else groups.dense
    buffers = {p: buffer for buffer in _buffers(optimizer if is_sliced else None, model_chunks) for p in buffer.params}
    held = _group_indices(found, updated, inner_groups, sharers.replicas)
    index_of = {name: index for of_one in held for name, index in of_one.items()}
    own = [each for each in found if each.name in index_of]
    if not own:  # a pipeline stage without parameters of this kind
        return set()
    blueprint, used = _blueprint(own, index_of, inner_groups, options)

    shares: list[Share] = []
    place, is_copied = place_in(sharers.replicas), not is_sliced and not by_layers
    names = {each.name: updated[each.parameter] for each in own if each.parameter in updated}
    for shards in sorted({each.shards for each in own}):
        group, ranks = sharers.of(shards)
        if len(ranks) != shards:
            raise ConfigError(
                'optimizer.params.tp_mode: "exact" needs expert_tensor_parallel_size equal to tensor_model_parallel_size where '
                'expert_model_parallel_size is 1; use "blockwise"'
            )
        shared = [each for each in own if each.shards == shards]
        lots = [Lot(index, ranks, [each for each in shared if index_of[each.name] == index]) for index in used]
        lots = [lot for lot in lots if lot.members]
        if is_sliced:
            cuts = cuts_of_buckets(shared, list(dict.fromkeys(buffers.values())))
        elif by_layers:
            cuts = cuts_of_owners(shared, held)
        else:
            cuts = cuts_by_cost(lots, _roles_of(blueprint), options.get("state_dtype", "float32"))
        for lot in lots:
            lot.fill(cuts)
            shares.append(Share(lot, place.rank, group, names, is_copied))
        _check_equal(lots, group)

    of_groups = [[share.buffer for share in shares if share.lot.index == index] for index in used]
    rotation = ShardedBasisRotation(blueprint, of_groups)
    rotation.bind([share.flat for share in shares])
    rotation.gradient_dtype = _gradient_dtype(optimizer.config, model_chunks)
    replicas = sharers.replicas if is_copied and place.size > 1 else None
    tensor = sharers.tensor if dist.get_world_size(sharers.tensor) > 1 else None
    optimizer.optimizer = InnerBasisRotation(inner_groups, rotation, shares, used, replicas, tensor)
    optimizer.init_state_fn = registry.no_states
    log(f"{type(optimizer).__name__}: {rotation.describe()}")
    for ownership in rotation.ownership.values():
        moved = f"{sum(ownership.sent)} elements go to owners and back" if replicas is None else "the owners' weights go to all of them"
        log(
            f"{len(ownership.owners)} weights owned by {len(ownership.state_bytes)} rank(s), at most "
            f"{max(ownership.state_bytes) / 1e6:.3g} MB of states each ({ownership.imbalance:.3g} of the mean); "
            f"in an update {moved}"
        )
    return set(index_of)


def _buffers(sliced: DistributedOptimizer | None, model_chunks: Sequence[nn.Module]) -> Iterator[Any]:
    """The buffers of gradients that an optimizer, or any of the chunks, has."""
    of_chunks = [buffer for chunk in model_chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    for buffer in of_chunks if sliced is None else sliced.buffers:
        check_attributes(buffer, "buffer")
        yield buffer


def _group_indices(
    found: Sequence[Matrices], updated: Mapping[Tensor, Tensor], inner_groups: Sequence[Mapping[str, Any]], replicas: Any
) -> list[dict[str, int]]:
    """For every replica, the group of each parameter of which it updates anything."""
    index_of_tensor = {id(tensor): index for index, group in enumerate(inner_groups) for tensor in group["params"]}
    here = {each.name: index_of_tensor[id(updated[each.parameter])] for each in found if each.parameter in updated}
    of_replicas: list[dict[str, int]] = [{} for _ in range(dist.get_world_size(replicas))]
    dist.all_gather_object(of_replicas, here, group=replicas)
    return of_replicas


def _blueprint(
    own: Sequence[Matrices], index_of: Mapping[str, int], inner_groups: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> tuple[BasisRotation, list[int]]:
    """BasisRotation over stand-ins for whole parameters, and which of Megatron's groups its groups are."""
    described, used = [], []
    for index, group in enumerate(inner_groups):
        members = [each for each in own if index_of[each.name] == index]
        if members:
            named = [(each.name, nn.Parameter(torch.empty(each.shape, device="meta"))) for each in members]
            present = {key: group[key] for key in ("lr", "weight_decay") if key in group}
            described.append({"params": named, "rotate": [each.entry for each in members], **present})
            used.append(index)
    return BasisRotation(described, **options), used


def _roles_of(blueprint: BasisRotation) -> dict[str, Role]:
    """The role of each parameter, by name."""
    roles = assign_roles(blueprint.param_groups, None)
    return {name: roles[p] for group in blueprint.param_groups for name, p in zip(group["param_names"], group["params"])}


def _check_equal(lots: Sequence[Lot], group: Any) -> None:
    """Refuse ranks that would exchange different things."""
    here = hashlib.sha256(repr([(lot.index, lot.parameters()) for lot in lots]).encode()).hexdigest()
    of_ranks = [""] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, here, group=group)
    if len(set(of_ranks)) > 1:
        raise ConfigError("ranks of one data-parallel group hold different parameters: BasisRotation needs the same model on all of them")


def _gradient_dtype(config: OptimizerConfig, model_chunks: Sequence[nn.Module]) -> torch.dtype | None:
    """The least precision in which gradients are computed or added up; None for float32."""
    dtypes = {buffer.grad_dtype for buffer in _buffers(None, model_chunks)} | {config.params_dtype}
    return torch.bfloat16 if config.bf16 or torch.bfloat16 in dtypes else None
