"""A tiny GPT in Megatron with whole weights and gradients by name, their slices on this rank, and the same updates in a plain loop."""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch import Tensor, nn

from ds_basisrot import BasisRotation
from megatron_patches.optimizer import build

HIDDEN, FFN, HEADS, GROUPS, VOCABULARY, SEQUENCE = 32, 48, 4, 2, 64, 8
HEAD = HIDDEN // HEADS
LR, DECAY, UPDATES = 1e-2, 0.1, 30
PARAMS = {"refresh_period": 5}

QKV = {"rows": [HEADS // GROUPS * HEAD, HEAD, HEAD], "groups": GROUPS, "names": ["q", "k", "v"]}
GATE_UP = {"rows": [FFN, FFN], "names": ["gate", "up"]}


def config(bf16: bool = False, experts: int | None = None, query_groups: int = GROUPS) -> TransformerConfig:
    dtype = torch.bfloat16 if bf16 else torch.float32
    moe = {"num_moe_experts": experts, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall"} if experts else {}
    return TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        num_query_groups=query_groups,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        params_dtype=dtype,
        bf16=bf16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=not experts,
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **moe,
    )


def wrapped(settings: TransformerConfig, distributed: bool, bf16: bool, bucket_size: int | None = None) -> DistributedDataParallel:
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    spec = get_gpt_layer_local_spec(num_experts=settings.num_moe_experts, normalization=settings.normalization)
    model = GPTModel(settings, spec, VOCABULARY, SEQUENCE, position_embedding_type="rope", share_embeddings_and_output_weights=False)
    model = Float16Module(settings, model) if bf16 else model
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=distributed,
        overlap_grad_reduce=bucket_size is not None,
        bucket_size=bucket_size,
    )
    return DistributedDataParallel(settings, ddp, model)


def rate(update: int) -> float:
    """The learning rate, relative to its largest value."""
    return 1.0 - update / (2 * UPDATES)


def optimizer_of(
    model: nn.Module, params: Mapping[str, Any], distributed: bool, bf16: bool, clip: float, native: Mapping[str, Any] | None = None
) -> Any:
    """Megatron's optimizer with BasisRotation.

    Args:
        native: arguments of `get_megatron_optimizer`.
    """
    settings = OptimizerConfig(
        optimizer="adam",
        lr=LR,
        weight_decay=DECAY,
        clip_grad=clip,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=distributed,
    )
    built = build(settings, [model], params, get_megatron_optimizer, **native or {})
    for group in built.param_groups:  # as Megatron's scheduler does
        group["weight_decay"] = DECAY * group["wd_mult"]
    return built


def plain_name(name: str) -> str:
    return name.removeprefix("module.").removeprefix("module.")


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    return {plain_name(name): p for name, p in model.named_parameters()}


def whole_shape(p: Tensor) -> tuple[int, ...]:
    shape, size = list(p.shape), parallel_state.get_tensor_model_parallel_world_size()
    if size > 1 and getattr(p, "tensor_model_parallel", False):
        shape[p.partition_dim] *= size
    return tuple(shape)


def sliced(name: str, whole: Tensor, p: Tensor) -> Tensor:
    """This tensor-parallel rank's part."""
    rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    if size == 1 or not getattr(p, "tensor_model_parallel", False):
        return whole
    if "linear_fc1" in name:
        return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])
    return whole.chunk(size, p.partition_dim)[rank].contiguous()


def made_up(name: str, shape: tuple[int, ...], number: int) -> Tensor:
    """A tensor that its name and a number determine; matrices with a few strong directions."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {number}".encode()))
    noise = 0.1 * torch.randn(shape, generator=generator)
    if len(shape) < 2:
        return noise
    always = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    left, right = (torch.randn(side, 3, generator=always) for side in (shape[0], shape[-1]))
    return noise + (left * torch.randn(3, generator=generator)) @ right.T / 3


def initial_weight(name: str, shape: tuple[int, ...]) -> Tensor:
    return made_up(name, shape, -1) * 0.1 + (1.0 if "norm" in name and name.endswith("weight") else 0.0)


def set_weights(model: nn.Module, optimizer: Any, rename: Any = lambda name: name) -> dict[str, Tensor]:
    """Weights that names determine; those on this rank, whole over tensor parallelism."""
    wholes = {}
    with torch.no_grad():
        for name, p in named(model).items():
            wholes[name] = initial_weight(rename(name), whole_shape(p))
            p.copy_(sliced(name, wholes[name], p))
    optimizer.reload_model_params()
    return wholes


def train(model: nn.Module, optimizer: Any, updates: int = UPDATES, first: int = 0, rename: Any = lambda name: name) -> list[float]:
    """Updates with made-up gradients; the norms that Megatron found."""
    norms = []
    for update in range(first, first + updates):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        for name, p in named(model).items():
            p.main_grad.copy_(sliced(name, made_up(rename(name), whole_shape(p), update), p))
        for group in optimizer.param_groups:
            group["lr"] = group["max_lr"] * rate(update)
        norms.append(optimizer.step()[1])
    return norms


def entry_of(name: str) -> Any:
    """What is rotated, said independently of the product."""
    if name.endswith("linear_qkv.weight"):
        return QKV
    if name.endswith("linear_fc1.weight"):
        return GATE_UP
    return name.endswith(("linear_proj.weight", "linear_fc2.weight"))


def in_plain_loop(
    shapes: Mapping[str, tuple[int, ...]],
    entry: Any = entry_of,
    gradient: Any = made_up,
    start: Any = initial_weight,
    bf16: bool = False,
    clip: float = 0.0,
    params: Mapping[str, Any] = PARAMS,
    updates: int = UPDATES,
    norms: Sequence[float] = (),
    outer_lr: float = LR,
) -> dict[str, Tensor]:
    """The same updates with BasisRotation in one process.

    Args:
        norms: of the gradients, by which they are clipped.
        outer_lr: of embedding and output layer.
    """
    parameters = {
        name: nn.Parameter(start(name, shape).to(torch.bfloat16 if bf16 else torch.float32).float()) for name, shape in shapes.items()
    }
    kinds: dict[tuple[float, float], list[str]] = {(LR, DECAY): [], (LR, 0.0): []}
    for name, shape in shapes.items():
        outer = "embedding" in name or "output_layer" in name
        kinds.setdefault((outer_lr if outer else LR, DECAY * (len(shape) > 1)), []).append(name)
    groups = [
        {
            "params": [(n, parameters[n]) for n in names],
            "rotate": [entry(n) if len(shapes[n]) > 1 else False for n in names],
            "lr": lr,
            "weight_decay": decay,
        }
        for (lr, decay), names in kinds.items()
        if names
    ]
    optimizer = BasisRotation(groups, lr=LR, eps=1e-8, **params)
    optimizer.layout_independent, optimizer.gradient_dtype = True, torch.bfloat16 if bf16 else None
    rates = [group["lr"] for group in optimizer.param_groups]
    for update in range(updates):
        gradients = {name: gradient(name, tuple(p.shape), update) for name, p in parameters.items()}
        for group, lr in zip(optimizer.param_groups, rates):
            group["lr"] = lr * rate(update)
        scale = min(1.0, clip / (norms[update] + 1e-6)) if clip else 1.0
        for name, p in parameters.items():
            p.grad = gradients[name] * scale
        optimizer.step()
    return {name: p.detach() for name, p in parameters.items()}


def norm_of(named_shapes: Iterable[tuple[str, tuple[int, ...]]], update: int) -> float:
    """The norm of all made-up gradients of an update."""
    return float(sum(made_up(name, shape, update).double().square().sum() for name, shape in named_shapes)) ** 0.5
