"""Recognises weights that are several matrices in one, by their owner's name for them and its sizes: Q, K and V; gate and up."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Size, nn

# What an attention module calls a linear map that computes Q, K and V (or K and V) at once -> how its rows are arranged: one block after
# the other, in blocks for each key-value head, or either, depending on the library.
CONTIGUOUS, INTERLEAVED, AMBIGUOUS = "contiguous", "interleaved by head", "ambiguous"
QKV_NAMES = {
    **dict.fromkeys(("c_attn", "qkv", "qkv_proj", "Wqkv", "to_qkv", "W_pack", "att_proj", "in_proj", "kv", "to_kv", "Wkv"), CONTIGUOUS),
    **dict.fromkeys(("query_key_value", "linear_qkv", "linear_kv"), INTERLEAVED),
    "wqkv": AMBIGUOUS,
}
# Names that other modules use as well (state space models, for one): they count in a module that calls itself attention.
NEED_ATTENTION = {"in_proj", "kv"}
# Attention classes that do not follow their names.
QKV_CLASSES = {
    "GPTBigCodeAttention": INTERLEAVED,
    "DisentangledSelfAttention": INTERLEAVED,  # DeBERTa
    "InternLM2Attention": INTERLEAVED,
    "CodeGenAttention": AMBIGUOUS,  # in blocks of the accelerators it was first trained on
}

# What attention modules and their configurations call their sizes; with tensor slicing, those of one rank come first.
HEADS = ("num_attention_heads_per_partition", "num_heads", "n_head", "n_heads", "num_attention_heads", "heads")
KEY_VALUE_HEADS = (
    "num_query_groups_per_partition", "num_multi_query_groups_per_partition", "num_key_value_heads", "num_kv_heads", "n_kv_heads",
    "kv_n_heads", "kv_heads", "n_head_kv", "num_query_groups", "n_query_groups", "multi_query_group_num",
)  # fmt: skip
HEAD_SIZE = ("hidden_size_per_attention_head", "head_dim", "head_size", "dim_head", "kv_channels", "d_head", "d_kv")
WIDTH = ("embed_dim", "hidden_size", "n_embd", "d_model")

# Linear maps whose rows are a gate and an up projection: by name alone, or where a configuration or a neighbour's size says so as well.
GATED_NAMES = {"gate_up_proj", "w12"}
MAYBE_GATED_NAMES = {"linear_fc1", "fc1", "Wi", "dense_h_to_4h", "input_linear"}
GATED_FLAGS = ("gated_linear_unit", "swiglu", "geglu")
ACTIVATIONS = ("activation", "hidden_act", "activation_function", "hidden_activation")

GATE_AND_UP = ["gate", "up"]
UNKNOWN_QKV = "fused QKV of unknown layout, as one matrix"
UNKNOWN_GATE_AND_UP = "gate and up of unknown layout, as one matrix"

Fused = tuple[str, dict[str, Any]]  # the reason to give, and the layout's "rows", "groups" and "names"; {} when they are not known


def words(cls: type) -> list[str]:
    """The words of a class name: GPT2SdpaAttention -> GPT, Sdpa, Attention."""
    return re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", cls.__name__)


def fused_qkv(name: str, rows: int, columns: int, owner: nn.Module | None) -> Fused | None:
    """The layout of a linear map `[rows, columns]` that its owner calls `name`, if that is a name for Q, K and V in one.

    The sizes must agree with what the owner says of its heads. Where it says nothing, three square blocks are Q, K and V for the names
    where one block after the other is the rule. Else the weight stays one matrix, and the reason says so.
    """
    if name not in QKV_NAMES or (name in NEED_ATTENTION and not _is_attention(owner)):
        return None
    order = _order(name, owner)
    heads = _heads(owner, columns)
    if heads is None:
        if order == CONTIGUOUS and rows == 3 * columns:
            return _qkv([columns] * 3, 1, order)
        return UNKNOWN_QKV, {}
    queries, keys, size = heads
    if order == AMBIGUOUS or queries % keys:
        return UNKNOWN_QKV, {}
    groups = keys if order == INTERLEAVED else 1
    query, key = queries * size // groups, keys * size // groups
    for blocks in ([query, key, key], [key, key]):  # the second is for cross-attention
        if groups * sum(blocks) == rows:
            return _qkv(blocks, groups, order)
    return UNKNOWN_QKV, {}


def _qkv(blocks: list[int], groups: int, order: str) -> Fused:
    names = ["q", "k", "v"][-len(blocks) :]
    arranged = f", {order}," if order == INTERLEAVED else ""
    layout = {"rows": blocks, "groups": groups, "names": names}
    return f"fused {''.join(names).upper()}{arranged} as {', '.join(names)}", layout


def _is_attention(owner: nn.Module | None) -> bool:
    return owner is not None and not {"Attention", "Attn", "MHA"}.isdisjoint(words(type(owner)))


def _order(name: str, owner: nn.Module | None) -> str:
    if getattr(owner, "head_first", None) is True:  # timm
        return INTERLEAVED
    if getattr(owner, "multi_query_attention", None) is True:  # ChatGLM
        return CONTIGUOUS
    return QKV_CLASSES.get(type(owner).__name__, QKV_NAMES[name])


def _heads(owner: nn.Module | None, columns: int) -> tuple[int, int, int] | None:
    """Query heads, key-value heads and the size of one, as the owner or its configuration says (None: it does not)."""
    queries = _size(owner, HEADS)
    if queries is None:
        return None
    size = _size(owner, HEAD_SIZE) or (_size(owner, WIDTH) or columns) // queries
    return queries, _size(owner, KEY_VALUE_HEADS) or queries, size


def _size(owner: nn.Module | None, names: Iterable[str]) -> int | None:
    for value in _facts(owner, names):
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _facts(owner: nn.Module | None, names: Iterable[str]) -> Iterable[Any]:
    """What a module, then its configuration, has under these names (None where it has nothing)."""
    for source in (owner, getattr(owner, "config", None)):
        for name in names:
            yield source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)


def fused_gate_up(name: str, rows: int, neighbours: Sequence[int], owner: nn.Module | None) -> Fused | None:
    """The layout of a linear map with these rows that its owner calls `name`, if it is a gate and an up projection in one.

    Args:
        neighbours: columns of the owner's other linear maps, one of which takes half the rows where they are gated.
    """
    if name not in GATED_NAMES and not (name in MAYBE_GATED_NAMES and _is_gated(rows, neighbours, owner)):
        return None
    if rows % 2:
        return UNKNOWN_GATE_AND_UP, {}
    return "gate and up", {"rows": [rows // 2] * 2, "names": GATE_AND_UP}


def _is_gated(rows: int, neighbours: Sequence[int], owner: nn.Module | None) -> bool:
    if any(value is True for value in _facts(owner, GATED_FLAGS)):
        return True
    if any(isinstance(value, str) and value.lower().endswith("glu") for value in _facts(owner, ACTIVATIONS)):
        return True
    return rows not in neighbours and rows % 2 == 0 and rows // 2 in neighbours


def stacked_gate_up(name: str, shape: Size, others: Sequence[Size], experts: nn.Module) -> Fused | None:
    """The layout of a stacked expert weight `[e, 2f, n]`, or `[e, n, 2f]` where it is transposed, if it is a gate and an up in one.

    Args:
        others: shapes of the other stacks beside it, one of which leads back: `[e, n, f]`, or `[e, f, n]` where they are transposed.
    """
    e, m, n = shape
    straight, transposed = (e, n, m // 2) in others, (e, n // 2, m) in others
    if name not in GATED_NAMES and not (name in MAYBE_GATED_NAMES and straight != transposed):
        return None
    said = getattr(experts, "is_transposed", None)
    if isinstance(said, bool):
        straight, transposed = not said, said
    elif straight == transposed:
        hidden = _size(experts, ("hidden_size", "hidden_dim"))
        straight, transposed = n == hidden, m == hidden
    rows = n if transposed else m
    if straight == transposed or rows % 2:
        return "stacked " + UNKNOWN_GATE_AND_UP, {}
    alternating = getattr(experts, "is_concatenated", None) is False or type(experts).__name__ == "GptOssExperts"
    layout = {"rows": [1, 1], "groups": rows // 2} if alternating else {"rows": [rows // 2] * 2}
    return "stacked gate and up", {**layout, "names": GATE_AND_UP, **({"transposed": True} if transposed else {})}
