"""Fused weights of the models in transformers are rotated as the matrices they consist of: Q, K and V, gate and up, experts."""

import importlib.util

import pytest
import torch

from ds_basisrot.optim.layout import parts
from ds_basisrot.optim.routing import route

MISSING = importlib.util.find_spec("transformers") is None
pytestmark = pytest.mark.skipif(MISSING, reason="not installed: transformers")

WIDTH, INNER, HEADS, KEYS, EXPERTS = 48, 40, 4, 2, 3
SIZE = WIDTH // HEADS
LLAMA_LIKE = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 2, "num_attention_heads": HEADS, "vocab_size": 31}
GROUPED = {**LLAMA_LIKE, "num_key_value_heads": KEYS}

ONE_AFTER_THE_OTHER = {"q": (1, WIDTH, WIDTH), "k": (1, WIDTH, WIDTH), "v": (1, WIDTH, WIDTH)}
GROUPED_QKV = {"q": (1, WIDTH, WIDTH), "k": (1, KEYS * SIZE, WIDTH), "v": (1, KEYS * SIZE, WIDTH)}
GATE_AND_UP = {"gate": (1, INNER, WIDTH), "up": (1, INNER, WIDTH)}
EXPERTS_GATE_AND_UP = {"gate": (EXPERTS, INNER, WIDTH), "up": (EXPERTS, INNER, WIDTH)}

# configuration class, its sizes, end of a parameter's name, its matrices [count, m, n]
FUSED = [
    ("GPT2Config", {"n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "vocab_size": 31}, "attn.c_attn.weight", ONE_AFTER_THE_OTHER),
    ("MptConfig", {"d_model": WIDTH, "n_layers": 2, "n_heads": HEADS, "vocab_size": 31}, "attn.Wqkv.weight", ONE_AFTER_THE_OTHER),
    ("GPTNeoXConfig", LLAMA_LIKE, "attention.query_key_value.weight", ONE_AFTER_THE_OTHER),
    ("BloomConfig", {"hidden_size": WIDTH, "n_layer": 2, "n_head": HEADS, "vocab_size": 31}, "query_key_value.weight", ONE_AFTER_THE_OTHER),
    (
        "FalconConfig",
        {**LLAMA_LIKE, "new_decoder_architecture": True, "num_kv_heads": KEYS},
        "self_attention.query_key_value.weight",
        GROUPED_QKV,
    ),
    ("Phi3Config", {**GROUPED, "pad_token_id": 0}, "self_attn.qkv_proj.weight", GROUPED_QKV),
    ("Phi3Config", {**GROUPED, "pad_token_id": 0}, "mlp.gate_up_proj.weight", GATE_AND_UP),
    ("MixtralConfig", {**GROUPED, "num_local_experts": EXPERTS}, "mlp.experts.gate_up_proj", EXPERTS_GATE_AND_UP),
    ("GptOssConfig", {**GROUPED, "num_local_experts": EXPERTS, "head_dim": SIZE}, "mlp.experts.gate_up_proj", EXPERTS_GATE_AND_UP),
    ("Llama4TextConfig", {**GROUPED, "num_local_experts": EXPERTS, "head_dim": SIZE}, "experts.gate_up_proj", EXPERTS_GATE_AND_UP),
]


@pytest.mark.parametrize(("config", "sizes", "ending", "matrices"), FUSED, ids=[f"{row[0]}-{row[2]}" for row in FUSED])
def test_fused_weights(config, sizes, ending, matrices):
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**sizes))
    shapes = {name: p.shape for name, p in model.named_parameters()}
    fused = {name: each for name, each in route(model).items() if name.endswith(ending)}
    assert len(fused) == 2
    for name, each in fused.items():
        assert {part.name: tuple(part.shape) for part in parts(shapes[name], each.entry)} == matrices
