"""The GPT's layers: their starting weights and their causality."""

import pytest
import torch
from gpt_model import layer_specs, next_byte_loss

SHAPE = {"vocabulary": 256, "layers": 3, "width": 32, "heads": 4, "context": 16}


@pytest.fixture(scope="module")
def layers():
    return [spec.build() for spec in layer_specs(**SHAPE, seed=0)]


def logits(layers, tokens):
    for layer in layers:
        tokens = layer(tokens)
    return tokens


def test_a_layer_starts_the_same_whatever_was_built_before_it(layers):
    specs = layer_specs(**SHAPE, seed=0)
    alone = specs[2].build()
    assert all(torch.equal(p, q) for p, q in zip(alone.parameters(), layers[2].parameters(), strict=True))
    assert not torch.equal(layers[1].attention.query.weight, layers[2].attention.query.weight)
    assert not torch.equal(layers[1].attention.query.weight, layer_specs(**SHAPE, seed=1)[1].build().attention.query.weight)


def test_starting_weights_have_the_documented_spread(layers):
    def spread(linear):
        return linear.weight.std().item()

    std = 0.02 * (384 / SHAPE["width"]) ** 0.5
    embedding, block, head = layers[0], layers[1], layers[-1]
    assert spread(block.mlp.up) == pytest.approx(std, rel=0.05)
    assert spread(block.mlp.down) == pytest.approx(std / (2 * SHAPE["layers"]) ** 0.5, rel=0.05)
    assert spread(head.lm_head) == pytest.approx(std, rel=0.05)
    assert spread(embedding.token_embedding) == pytest.approx(0.3, rel=0.05)
    assert not any(p.any() for layer in layers for name, p in layer.named_parameters() if name.endswith("bias"))


def test_no_position_sees_a_later_byte(layers):
    tokens = torch.randint(256, (2, SHAPE["context"]), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 10:] = 7
    before, after = logits(layers, tokens), logits(layers, changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10], after[:, 10])


def test_the_loss_of_even_logits_is_that_of_guessing(layers):
    labels = torch.zeros(2, SHAPE["context"], dtype=torch.int64)
    assert next_byte_loss(torch.zeros(2, SHAPE["context"], 256), labels).item() == pytest.approx(torch.tensor(256.0).log().item())
