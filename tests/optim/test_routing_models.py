"""Whole models, built from plain modules: how many matrices of which shape are rotated in each, and what is not and why."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ds_basisrot import param_groups
from ds_basisrot.optim.layout import parts
from ds_basisrot.optim.routing import describe, route

WIDTH, HEADS, SIZE, VOCABULARY, LAYERS = 12, 4, 3, 29, 2


def rotated(model):
    """[m, n] -> number of matrices rotated as such; stacks count every matrix."""
    shapes, counts = {name: p.shape for name, p in model.named_parameters()}, Counter()
    for name, each in route(model).items():
        for part in parts(shapes[name], each.entry):
            counts[part.shape[1:]] += part.shape[0]
    return dict(counts)


def others(model):
    """Reason -> number of parameters left to AdamW."""
    return dict(Counter(each.reason for each in route(model).values() if not each.rotate))


def reasons(model):
    """Reason -> number of rotated parameters."""
    return dict(Counter(each.reason for each in route(model).values() if each.rotate))


def named_parts(model, name):
    return {part.name: part.shape for part in parts(model.get_parameter(name).shape, route(model)[name].entry)}


class Conv1D(nn.Module):
    """A linear map with its weight stored as [inputs, outputs], as Hugging Face has it."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.zeros(nx, nf)), nn.Parameter(torch.zeros(nf))


def gpt2(linear=None, tied=True, cross_attention=False):
    linear = linear or (lambda rows, columns: Conv1D(rows, columns))

    class GPT2Attention(nn.Module):
        def __init__(self, cross=False):
            super().__init__()
            self.embed_dim, self.num_heads, self.head_dim = WIDTH, HEADS, SIZE
            if cross:
                self.c_attn, self.q_attn = linear(2 * WIDTH, WIDTH), linear(WIDTH, WIDTH)
            else:
                self.c_attn = linear(3 * WIDTH, WIDTH)
            self.c_proj = linear(WIDTH, WIDTH)

    class GPT2MLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.c_fc, self.c_proj = linear(4 * WIDTH, WIDTH), linear(WIDTH, 4 * WIDTH)

    class GPT2Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln_1, self.attn = nn.LayerNorm(WIDTH), GPT2Attention()
            self.ln_2, self.mlp = nn.LayerNorm(WIDTH), GPT2MLP()
            if cross_attention:
                self.crossattention = GPT2Attention(cross=True)

    class GPT2(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(16, WIDTH)
            self.h = nn.ModuleList(GPT2Block() for _ in range(LAYERS))
            self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
            if tied:
                self.lm_head.weight = self.wte.weight

    return GPT2()


GPT2_MATRICES = {(WIDTH, WIDTH): 4 * LAYERS, (4 * WIDTH, WIDTH): LAYERS, (WIDTH, 4 * WIDTH): LAYERS}


@pytest.mark.parametrize("linear", [None, lambda rows, columns: nn.Linear(columns, rows)])
def test_gpt2_with_transposed_or_plain_linear_maps(linear):
    model = gpt2(linear)
    assert rotated(model) == GPT2_MATRICES
    assert others(model) == {"embedding": 2, "norm or bias": 8 * LAYERS + 2}
    assert named_parts(model, "h.0.attn.c_attn.weight") == dict.fromkeys("qkv", (1, WIDTH, WIDTH))
    assert describe(route(model)) == (
        f"rotated: {4 * LAYERS} ({LAYERS} fused QKV as q, k, v, {3 * LAYERS} linear weight); "
        f"AdamW: {8 * LAYERS + 4} (2 embedding, {8 * LAYERS + 2} norm or bias)"
    )


def test_a_transposed_linear_map_gives_the_same_matrices_as_a_plain_one():
    transposed, plain = gpt2(), gpt2(lambda rows, columns: nn.Linear(columns, rows))
    for name in ("h.1.attn.c_attn.weight", "h.1.mlp.c_fc.weight"):
        weight = torch.randn(plain.get_parameter(name).shape)
        found = [route(model)[name].entry for model in (transposed, plain)]
        for stored, straight in zip(parts(weight.T.shape, found[0]), parts(weight.shape, found[1])):
            assert torch.equal(stored.take(weight.T.contiguous()), straight.take(weight))


def test_the_cross_attention_of_gpt2_has_k_and_v_in_one():
    model = gpt2(cross_attention=True)
    assert rotated(model)[(WIDTH, WIDTH)] == (4 + 4) * LAYERS
    assert named_parts(model, "h.0.crossattention.c_attn.weight") == dict.fromkeys("kv", (1, WIDTH, WIDTH))
    assert reasons(model)["fused KV as k, v"] == LAYERS


def llama(tied=False, fused=False, feed_forward=None):
    config = SimpleNamespace(num_attention_heads=HEADS, num_key_value_heads=2, hidden_size=WIDTH, intermediate_size=20)

    def linear(rows, columns):
        return nn.Linear(columns, rows, bias=False)

    class LlamaAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.config, self.head_dim = config, SIZE
            if fused:
                self.qkv_proj = linear((HEADS + 4) * SIZE, WIDTH)
            else:
                self.q_proj, self.k_proj, self.v_proj = linear(WIDTH, WIDTH), linear(2 * SIZE, WIDTH), linear(2 * SIZE, WIDTH)
            self.o_proj = linear(WIDTH, WIDTH)

    class LlamaMLP(nn.Module):
        def __init__(self):
            super().__init__()
            if fused:
                self.gate_up_proj = linear(40, WIDTH)
            else:
                self.gate_proj, self.up_proj = linear(20, WIDTH), linear(20, WIDTH)
            self.down_proj = linear(WIDTH, 20)

    class LlamaLayer(nn.Module):
        def __init__(self):
            super().__init__()
            self.self_attn, self.mlp = LlamaAttention(), (feed_forward or LlamaMLP)()
            self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    class Llama(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
            self.layers = nn.ModuleList(LlamaLayer() for _ in range(LAYERS))
            self.norm, self.lm_head = nn.RMSNorm(WIDTH), linear(VOCABULARY, WIDTH)
            if tied:
                self.lm_head.weight = self.embed_tokens.weight

    return Llama()


LLAMA_ATTENTION = {(WIDTH, WIDTH): 2 * LAYERS, (2 * SIZE, WIDTH): 2 * LAYERS}
LLAMA_MATRICES = {**LLAMA_ATTENTION, (20, WIDTH): 2 * LAYERS, (WIDTH, 20): LAYERS}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("fused", [False, True])  # as in Phi-3
def test_llama_with_grouped_queries(tied, fused):
    model = llama(tied, fused)
    assert rotated(model) == LLAMA_MATRICES
    assert others(model) == {"embedding": 1, "norm or bias": 2 * LAYERS + 1, **({} if tied else {"output head": 1})}
    if fused:
        assert reasons(model) == {"fused QKV as q, k, v": LAYERS, "gate and up": LAYERS, "linear weight": 2 * LAYERS}
        assert named_parts(model, "layers.0.self_attn.qkv_proj.weight") == {
            "q": (1, WIDTH, WIDTH), "k": (1, 2 * SIZE, WIDTH), "v": (1, 2 * SIZE, WIDTH)
        }  # fmt: skip


def mixture(transposed=False, width=WIDTH, hidden=5, **facts):
    experts = 3

    class MixtralExperts(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_experts = experts
            up, down = (experts, 2 * hidden, width), (experts, width, hidden)
            if transposed:
                up, down = (experts, width, 2 * hidden), (experts, hidden, width)
            self.gate_up_proj, self.down_proj = nn.Parameter(torch.zeros(up)), nn.Parameter(torch.zeros(down))
            self.gate_up_proj_bias = nn.Parameter(torch.zeros(experts, 2 * hidden))
            for name, value in facts.items():
                setattr(self, name, value)

    class MixtralBlock(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.experts = nn.Linear(width, experts, bias=False), MixtralExperts()

    return MixtralBlock


def test_mixtral_with_a_linear_router_and_stacked_experts():
    model = llama(feed_forward=mixture())
    router, experts = {(3, WIDTH): LAYERS}, {(5, WIDTH): 2 * 3 * LAYERS, (WIDTH, 5): 3 * LAYERS}
    assert rotated(model) == {**LLAMA_ATTENTION, **router, **experts}
    assert reasons(model) == {"linear weight": 5 * LAYERS, "stacked gate and up": LAYERS, "stacked expert weights": LAYERS}
    assert others(model) == {
        "embedding": 1, "norm or bias": 2 * LAYERS + 1, "output head": 1, "not the weight of a linear map": LAYERS
    }  # fmt: skip
    assert named_parts(model, "layers.0.mlp.experts.gate_up_proj") == {"gate": (3, 5, WIDTH), "up": (3, 5, WIDTH)}


@pytest.mark.parametrize("hidden", [5, WIDTH, WIDTH // 2])  # the last: 2f is as large as n
@pytest.mark.parametrize("transposed", [False, True])
def test_the_way_back_tells_whether_experts_are_transposed(transposed, hidden):
    model = nn.ModuleList(mixture(transposed, hidden=hidden)() for _ in range(2))
    assert named_parts(model, "0.experts.gate_up_proj") == {"gate": (3, hidden, WIDTH), "up": (3, hidden, WIDTH)}
    stack = torch.randn(3, 2 * hidden, WIDTH)
    stored = stack.mT.contiguous() if transposed else stack
    gate, up = (part.take(stored) for part in parts(stored.shape, route(model)["0.experts.gate_up_proj"].entry))
    assert torch.equal(torch.cat([gate, up], dim=1), stack)


class LoneExperts(nn.Module):
    def __init__(self, shape, hidden_size=None, **facts):
        super().__init__()
        self.hidden_size, self.gate_up_proj = hidden_size, nn.Parameter(torch.zeros(shape))
        for name, value in facts.items():
            setattr(self, name, value)


def test_the_hidden_size_or_a_flag_tells_it_without_a_way_back():
    both = {"gate": (3, 5, 8), "up": (3, 5, 8)}
    assert named_parts(LoneExperts((3, 10, 8), hidden_size=8), "gate_up_proj") == both
    assert named_parts(LoneExperts((3, 8, 10), hidden_size=8), "gate_up_proj") == both
    assert named_parts(LoneExperts((3, 8, 8), is_transposed=True), "gate_up_proj") == dict.fromkeys(both, (3, 4, 8))
    for unknown in (LoneExperts((3, 8, 8), hidden_size=8), LoneExperts((3, 10, 8)), LoneExperts((3, 9, 8), hidden_size=8)):
        assert named_parts(unknown, "gate_up_proj") == {"": tuple(unknown.gate_up_proj.shape)}
        assert reasons(unknown) == {"stacked gate and up of unknown layout, as one matrix": 1}


def test_alternating_rows_of_gate_and_up():  # as in GPT-OSS
    model = nn.ModuleList(mixture(transposed=True, is_transposed=True, is_concatenated=False)() for _ in range(2))
    stored = torch.randn(3, WIDTH, 10)
    gate, up = (part.take(stored) for part in parts(stored.shape, route(model)["0.experts.gate_up_proj"].entry))
    assert torch.equal(gate, stored[..., ::2].mT) and torch.equal(up, stored[..., 1::2].mT)


def test_experts_that_are_one_module_for_each_map():
    class ParallelExperts(nn.Module):
        def __init__(self, *shape):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(shape))

    class MoE(nn.Module):
        def __init__(self):
            super().__init__()
            self.input_linear, self.output_linear = ParallelExperts(3, 10, 8), ParallelExperts(3, 8, 5)

    assert rotated(nn.ModuleList([MoE(), MoE()])) == {(5, 8): 2 * 2 * 3, (8, 5): 2 * 3}


def vision_transformer():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads, self.head_dim = HEADS, SIZE
            self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.attn, self.norm2, self.mlp = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH), Mlp()

    class VisionTransformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.cls_token, self.pos_embed = nn.Parameter(torch.zeros(1, 1, WIDTH)), nn.Parameter(torch.zeros(1, 17, WIDTH))
            self.patch_embed = nn.Conv2d(3, WIDTH, 5, stride=5)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    return VisionTransformer()


def test_a_vision_transformer():
    model = vision_transformer()
    assert rotated(model) == {**GPT2_MATRICES, (WIDTH, 3 * 5 * 5): 1}
    assert reasons(model) == {"convolution": 1, "fused QKV as q, k, v": LAYERS, "linear weight": 3 * LAYERS}
    # two tokens; biases and norms of the blocks, the patch embedding, the last norm; weight and bias of the head
    assert others(model) == {"not the weight of a linear map": 2, "norm or bias": 8 * LAYERS + 3, "output head": 2}


def test_convolutions_are_one_matrix_and_transposed_ones_are_not_rotated():
    model = nn.ModuleList([nn.Conv1d(2, 3, 4), nn.Conv3d(2, 3, 2), nn.Conv2d(4, 6, 3, groups=2), nn.ConvTranspose1d(2, 3, 4)])
    assert rotated(model) == {(3, 8): 1, (3, 16): 1, (6, 18): 1}
    assert others(model) == {"norm or bias": 4, "not the weight of a linear map": 1}


class LoraLinear(nn.Module):
    """A frozen linear map with an adapter, as PEFT wraps one."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})


def test_lora_adapters_are_rotated_and_their_frozen_base_is_not_routed():
    model = vision_transformer().requires_grad_(False)
    for block in model.blocks:
        block.attn.qkv, block.mlp.fc1 = LoraLinear(block.attn.qkv), LoraLinear(block.mlp.fc1)
    assert rotated(model) == {(2, WIDTH): 2 * LAYERS, (3 * WIDTH, 2): LAYERS, (4 * WIDTH, 2): LAYERS}
    assert others(model) == {} and not any("base_layer" in name for name in route(model))


def test_a_fused_base_that_is_trained_beside_its_adapter_is_still_split():
    model = vision_transformer()
    for block in model.blocks:
        block.attn.qkv = LoraLinear(block.attn.qkv)
        block.attn.qkv.base_layer.requires_grad_(True)
    assert named_parts(model, "blocks.0.attn.qkv.base_layer.weight") == dict.fromkeys("qkv", (1, WIDTH, WIDTH))


def test_lora_as_parameters_of_the_linear_map():
    class LoraInside(nn.Linear):
        def __init__(self):
            super().__init__(6, 8)
            self.lora_A, self.lora_B = nn.Parameter(torch.zeros(2, 6)), nn.Parameter(torch.zeros(8, 2))
            self.weight.requires_grad_(False)

    class NoMap(nn.Module):
        def __init__(self):
            super().__init__()
            self.lora_A = nn.Parameter(torch.zeros(2, 6))

    model = nn.Sequential(LoraInside(), NoMap(), nn.Linear(8, 3))
    assert rotated(model) == {(2, 6): 1, (8, 2): 1}
    assert others(model) == {"norm or bias": 1, "not the weight of a linear map": 1, "output head": 2}


def test_gpt_neox_is_interleaved_by_head():
    class GPTNeoXAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.config, self.head_size = SimpleNamespace(num_attention_heads=HEADS, hidden_size=WIDTH), SIZE
            self.query_key_value, self.dense = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    class GPTNeoXMLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense_h_to_4h, self.dense_4h_to_h = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    class GPTNeoXLayer(nn.Module):
        def __init__(self):
            super().__init__()
            self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.attention, self.mlp = GPTNeoXAttention(), GPTNeoXMLP()

    class GPTNeoX(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed_in, self.layers = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(GPTNeoXLayer() for _ in range(LAYERS))
            self.final_layer_norm, self.embed_out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    model = GPTNeoX()
    assert rotated(model) == GPT2_MATRICES
    assert reasons(model) == {"fused QKV, interleaved by head, as q, k, v": LAYERS, "linear weight": 3 * LAYERS}
    assert others(model) == {"embedding": 1, "norm or bias": 8 * LAYERS + 2, "output head": 1}
    weight = torch.randn(3 * WIDTH, WIDTH)
    by_head = weight.reshape(HEADS, 3, SIZE, WIDTH)
    for index, part in enumerate(parts(weight.shape, route(model)["layers.0.attention.query_key_value.weight"].entry)):
        assert part.name == "qkv"[index] and torch.equal(part.take(weight)[0], by_head[:, index].reshape(WIDTH, WIDTH))


def test_torch_s_own_attention_is_split_too():
    same, other = nn.MultiheadAttention(WIDTH, HEADS, add_bias_kv=True), nn.MultiheadAttention(WIDTH, HEADS, kdim=5, vdim=7)
    model = nn.Sequential(same, other, nn.Linear(WIDTH, 2))
    assert rotated(model) == {(WIDTH, WIDTH): 3 + 1 + 1 + 1, (WIDTH, 5): 1, (WIDTH, 7): 1}
    assert named_parts(model, "0.in_proj_weight") == dict.fromkeys("qkv", (1, WIDTH, WIDTH))
    assert others(model) == {"norm or bias": 4, "not the weight of a linear map": 2, "output head": 2}


@pytest.mark.parametrize("build", [gpt2, llama, vision_transformer, lambda: llama(feed_forward=mixture())])
def test_models_without_storage_are_routed_alike(build):
    real = build()
    with torch.device("meta"):
        shadow = build()
    assert route(shadow) == route(real)
    entries = [[group["rotate"] for group in param_groups(model)] for model in (shadow, real)]
    assert entries[0] == entries[1]
