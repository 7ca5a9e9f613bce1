"""Fused weights are told by their owner's name for them and its sizes; what is not certain stays one matrix and says so."""

from types import SimpleNamespace

import pytest
from torch import nn

from ds_basisrot.optim.routing import route

WIDTH = 12


def attention(class_name="Attention", name="query_key_value", rows=3 * WIDTH, **facts):
    """Two equal blocks with one attention module each, that has a fused linear map and says these facts of itself."""

    kind = type(class_name, (nn.Module,), {})

    def block():
        module = kind()
        setattr(module, name, nn.Linear(WIDTH, rows, bias=False))
        for fact, value in facts.items():
            setattr(module, fact, value)
        return module

    return nn.ModuleList([block(), block()])


def splits(model):
    """Reason, and rows and groups of the layout."""
    (first, *_) = route(model).values()
    layout = {} if first.layout is True else first.layout
    return first.reason, layout.get("rows"), layout.get("groups")


INTERLEAVED = "fused QKV, interleaved by head, as q, k, v"
UNKNOWN = "fused QKV of unknown layout, as one matrix", None, None


@pytest.mark.parametrize(
    "class_name, name, rows, facts, expected",
    [
        ("BloomAttention", "query_key_value", 36, {"num_heads": 4, "head_dim": 3}, (INTERLEAVED, [3, 3, 3], 4)),
        ("FalconAttention", "query_key_value", 24, {"num_heads": 4, "num_kv_heads": 2, "head_dim": 3}, (INTERLEAVED, [6, 3, 3], 2)),
        ("FalconAttention", "query_key_value", 18, {"num_heads": 4, "num_kv_heads": 1, "head_dim": 3}, (INTERLEAVED, [12, 3, 3], 1)),
        (
            "SelfAttention", "linear_qkv", 24,  # Megatron, with the sizes of one rank
            {"num_attention_heads_per_partition": 4, "num_query_groups_per_partition": 2, "hidden_size_per_attention_head": 3,
             "config": SimpleNamespace(num_attention_heads=8, num_query_groups=4)}, (INTERLEAVED, [6, 3, 3], 2),
        ),
        ("GPTBigCodeAttention", "c_attn", 36, {"num_heads": 4, "kv_heads": 4, "head_dim": 3}, (INTERLEAVED, [3, 3, 3], 4)),
        ("GPTBigCodeAttention", "c_attn", 18, {"num_heads": 4, "kv_heads": 1, "head_dim": 3}, (INTERLEAVED, [12, 3, 3], 1)),
        ("DisentangledSelfAttention", "in_proj", 36, {"num_attention_heads": 4}, (INTERLEAVED, [3, 3, 3], 4)),
        ("AttentionCl", "qkv", 36, {"num_heads": 4, "dim_head": 3, "head_first": True}, (INTERLEAVED, [3, 3, 3], 4)),
        ("AttentionCl", "qkv", 36, {"num_heads": 4, "dim_head": 3, "head_first": False}, ("fused QKV as q, k, v", [12] * 3, 1)),
        ("MPTAttention", "Wqkv", 18, {"config": {"n_heads": 4, "kv_n_heads": 1, "d_model": 12}}, ("fused QKV as q, k, v", [12, 3, 3], 1)),
        ("CausalSelfAttention", "c_attn", 36, {"n_head": 4, "n_embd": 12}, ("fused QKV as q, k, v", [12] * 3, 1)),
        ("SelfAttention", "query_key_value", 24,
         {"multi_query_attention": True, "num_attention_heads_per_partition": 4, "num_multi_query_groups_per_partition": 2},
         ("fused QKV as q, k, v", [12, 6, 6], 1)),
        ("Wide", "qkv_proj", 96, {"num_heads": 4, "head_dim": 8}, ("fused QKV as q, k, v", [32] * 3, 1)),
        ("Unspoken", "qkv", 36, {}, ("fused QKV as q, k, v", [12] * 3, 1)),
        ("Unspoken", "qkv", 24, {}, UNKNOWN),
        ("Unspoken", "query_key_value", 36, {}, UNKNOWN),
        ("Attention", "wqkv", 36, {"num_heads": 4}, UNKNOWN),
        ("InternLM2Attention", "wqkv", 24, {"num_heads": 4, "num_key_value_heads": 2}, (INTERLEAVED, [6, 3, 3], 2)),
        ("CodeGenAttention", "qkv_proj", 36, {"num_attention_heads": 4, "head_dim": 3}, UNKNOWN),
        ("Attention", "qkv", 36, {"num_heads": 4, "num_kv_heads": 2}, UNKNOWN),
        ("Attention", "query_key_value", 36, {"num_heads": 4, "num_kv_heads": 3}, UNKNOWN),
        ("Attention", "in_proj", 36, {"num_heads": 4}, ("fused QKV as q, k, v", [12] * 3, 1)),
        ("MambaMixer", "in_proj", 36, {"num_heads": 4, "head_dim": 3}, ("linear weight", None, None)),
        ("Attention", "projection", 36, {"num_heads": 4}, ("linear weight", None, None)),
        ("Attention", "qkv", 36, {"num_heads": True, "head_dim": "3"}, ("fused QKV as q, k, v", [12] * 3, 1)),
    ],
)  # fmt: skip
def test_fused_qkv_by_name_and_sizes(class_name, name, rows, facts, expected):
    assert splits(attention(class_name, name, rows, **facts)) == expected


def test_a_compiled_attention_is_still_recognised():
    model = attention(name="qkv", num_heads=4)
    wrapped = nn.ModuleList()
    for block in model:
        outer = nn.Module()
        outer._orig_mod, block.qkv = block, nn.ModuleDict({"_orig_mod": block.qkv})
        wrapped.append(outer)
    assert splits(wrapped) == ("fused QKV as q, k, v", [WIDTH] * 3, 1)


def feed_forward(name, rows, inputs_back, **facts):
    """Two equal blocks with a linear map of this name and the one that leads back, that say these facts of themselves."""
    kind = type("MLP", (nn.Module,), {})

    def block():
        module = kind()
        setattr(module, name, nn.Linear(WIDTH, rows, bias=False))
        module.back = nn.Linear(inputs_back, WIDTH, bias=False)
        for fact, value in facts.items():
            setattr(module, fact, value)
        return module

    return nn.ModuleList([block(), block()])


@pytest.mark.parametrize(
    "name, rows, inputs_back, facts, expected",
    [
        ("gate_up_proj", 20, 10, {}, ("gate and up", [10, 10])),
        ("w12", 20, 7, {}, ("gate and up", [10, 10])),
        ("w12", 21, 7, {}, ("gate and up of unknown layout, as one matrix", None)),
        ("fc1", 20, 10, {}, ("gate and up", [10, 10])),
        ("fc1", 20, 20, {}, ("linear weight", None)),
        ("Wi", 20, 10, {}, ("gate and up", [10, 10])),
        ("linear_fc1", 20, 10, {"config": SimpleNamespace(gated_linear_unit=True)}, ("gate and up", [10, 10])),
        ("linear_fc1", 20, 20, {"config": SimpleNamespace(gated_linear_unit=False, activation="gelu")}, ("linear weight", None)),
        ("dense_h_to_4h", 20, 7, {"config": {"hidden_act": "swiglu"}}, ("gate and up", [10, 10])),
        ("up_proj", 20, 10, {"swiglu": True}, ("linear weight", None)),
    ],
)
def test_gate_and_up_by_name_and_by_evidence(name, rows, inputs_back, facts, expected):
    assert splits(feed_forward(name, rows, inputs_back, **facts))[:2] == expected
