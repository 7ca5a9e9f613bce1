"""Which of Megatron's parameters are rotated as which matrices: fused, sliced over tensor-parallel ranks, stacked and grouped experts."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("megatron.core")

from megatron.core.transformer.moe.experts import GroupedMLP

from ds_basisrot.common.blocks import ConfigError
from ds_basisrot.optim.layout import parts
from megatron_patches.matrices import Matrices, Place, Places, matrices_of

HIDDEN, FFN, HEADS, GROUPS, SIZE = 8, 6, 4, 2, 2
ALONE = Places(Place(0, 1), Place(0, 1), Place(0, 1))


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


class Linear(nn.Module):
    """With the attributes of Megatron's tensor-parallel linear maps."""

    def __init__(self, weight: torch.Tensor, dim: int, tensor: int):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.weight.tensor_model_parallel, self.weight.partition_dim = True, dim
        rows, columns = weight.shape
        if dim == 0:
            self.output_size, self.output_size_per_partition, self.input_size = rows * tensor, rows, columns
        else:
            self.output_size, self.input_size, self.input_size_per_partition = rows, columns * tensor, columns


class Layer(nn.Module):
    """A transformer layer's linear maps, as a tensor-parallel rank holds them."""

    def __init__(self, number: int, tensor: Place):
        super().__init__()
        self.layer_number = number
        self.self_attention, self.mlp = nn.Module(), nn.Module()
        self.self_attention.config = SimpleNamespace(num_attention_heads=HEADS, num_query_groups=GROUPS, kv_channels=SIZE)
        self.self_attention.num_attention_heads_per_partition = HEADS // tensor.size
        self.self_attention.num_query_groups_per_partition = GROUPS // tensor.size
        self.self_attention.hidden_size_per_attention_head = SIZE
        qkv = numbered((HEADS + 2 * GROUPS) * SIZE, HIDDEN)
        self.self_attention.linear_qkv = Linear(qkv.chunk(tensor.size)[tensor.rank].clone(), 0, tensor.size)
        self.mlp.config = SimpleNamespace(gated_linear_unit=True)
        halves = [half.chunk(tensor.size)[tensor.rank] for half in numbered(2 * FFN, HIDDEN).chunk(2)]
        self.mlp.linear_fc1 = Linear(torch.cat(halves), 0, tensor.size)
        self.mlp.linear_fc2 = Linear(numbered(HIDDEN, FFN).chunk(tensor.size, 1)[tensor.rank].clone(), 1, tensor.size)
        self.norm = nn.LayerNorm(HIDDEN)


class Chunk(nn.Module):
    """What Megatron's optimizers get: a wrapped model."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.module = nn.Module()
        self.module.decoder = nn.Module()
        self.module.decoder.layers = nn.ModuleList(layers)
        self.module.output_layer = Linear(numbered(16, HIDDEN), 0, 1)
        self.module.output_layer.weight.is_embedding_or_output_parameter = True


def of_rank(rank: int, size: int, exact: bool, patterns: dict | None = None) -> dict[str, Matrices]:
    tensor = Place(rank, size)
    found = matrices_of([Chunk(Layer(3, tensor))], Places(tensor, tensor, Place(0, 1)), exact, patterns)
    return {each.name.removeprefix("decoder.layers.2."): each for each in found}


def matrices(each: Matrices, whole: torch.Tensor) -> dict[str, torch.Tensor]:
    return {part.name: part.take(whole.view(each.shape)) for part in parts(each.shape, each.entry)}


def test_layers_are_counted_from_the_first_stage_and_the_output_layer_is_not_rotated():
    found = of_rank(0, 1, False)
    assert set(found) == {
        "self_attention.linear_qkv.weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight", "norm.weight", "norm.bias",
        "output_layer.weight",
    }  # fmt: skip
    assert {name for name, each in found.items() if each.entry is False} == {"norm.weight", "norm.bias", "output_layer.weight"}
    assert not any(each.label for each in found.values())


@pytest.mark.parametrize("name", ["self_attention.linear_qkv.weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"])
def test_exact_matrices_of_two_ranks_are_those_of_one(name):
    alone = of_rank(0, 1, True)[name]
    ranks = [of_rank(rank, 2, True)[name] for rank in range(2)]
    assert ranks[0].shape == ranks[1].shape and ranks[0].entry == ranks[1].entry and ranks[0].shards == 2 and not ranks[0].label
    joined = torch.cat([each.parameter.detach().flatten() for each in ranks])
    expected, found = matrices(alone, alone.parameter.detach()), matrices(ranks[0], joined)
    assert list(found) == list(expected)
    assert all(torch.equal(found[part], expected[part]) for part in expected)


def test_blockwise_matrices_are_each_ranks_own():
    found = of_rank(1, 2, False)
    assert all(each.shards == 1 for each in found.values())
    for name in ("self_attention.linear_qkv.weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"):
        assert found[name].label == "tensor rank 1 of 2: " and found[name].shape == tuple(found[name].parameter.shape)
    assert found["norm.weight"].label == ""
    q = matrices(found["self_attention.linear_qkv.weight"], found["self_attention.linear_qkv.weight"].parameter.detach())["q"]
    assert q.shape == (1, HEADS // 2 * SIZE, HIDDEN)


def test_patterns_are_on_names_in_the_whole_model():
    found = of_rank(0, 2, True, {"exclude": ["decoder.layers.2.mlp.*"], "include": ["output_layer.weight"]})
    assert found["mlp.linear_fc1.weight"].entry is False and found["mlp.linear_fc1.weight"].shards == 1
    assert found["mlp.linear_fc1.weight"].label == "tensor rank 0 of 2: "
    assert found["output_layer.weight"].entry is True and found["output_layer.weight"].shape == (32, HIDDEN)


def test_a_layout_by_pattern_is_refused_for_what_ranks_put_together():
    with pytest.raises(ConfigError, match="rotate.layout: .* is sliced over tensor-parallel ranks"):
        of_rank(0, 2, True, {"layout": {"*linear_fc2*": {"rows": [4, 4]}}})
    assert of_rank(0, 2, False, {"layout": {"*linear_fc2*": {"rows": [4, 4]}}})["mlp.linear_fc2.weight"].entry == {"rows": [4, 4]}


def grouped(gated: bool) -> tuple[Chunk, GroupedMLP]:
    experts = GroupedMLP.__new__(GroupedMLP)
    nn.Module.__init__(experts)
    experts.config, experts.num_local_experts = SimpleNamespace(hidden_size=HIDDEN, gated_linear_unit=gated), 3
    experts.weight1 = nn.Parameter(numbered(HIDDEN, 3 * FFN * (2 if gated else 1)))
    experts.weight2 = nn.Parameter(numbered(3 * FFN, HIDDEN))
    layer = nn.Module()
    layer.mlp = nn.Module()
    layer.mlp.experts = experts
    return Chunk(layer), experts


@pytest.mark.parametrize("gated", [False, True])
def test_stacked_experts_are_transposed_matrices_of_each_expert(gated):
    chunk, experts = grouped(gated)
    places = Places(Place(0, 1), Place(0, 1), Place(1, 2))
    found = {each.name.rpartition(".")[2]: each for each in matrices_of([chunk], places, False, None)}
    first, second = found["weight1"], found["weight2"]
    assert first.label == "expert rank 1 of 2: " and first.is_expert
    whole = experts.weight1.detach().view(3, HIDDEN, -1).mT  # as Megatron's forward pass takes them
    own = matrices(first, experts.weight1.detach())
    expected = dict(zip(("gate", "up"), whole.chunk(2, 1))) if gated else {"": whole}
    assert list(own) == list(expected) and all(torch.equal(own[part], expected[part]) for part in expected)
    assert torch.equal(matrices(second, experts.weight2.detach())[""], experts.weight2.detach().view(3, FFN, HIDDEN).mT)


def test_experts_of_grouped_linear_maps_are_matrices_of_their_own():
    experts, linear, layer = nn.Module(), nn.Module(), nn.Module()
    linear.num_gemms = 2
    for index in range(2):
        linear.register_parameter(f"weight{index}", nn.Parameter(numbered(2 * FFN, HIDDEN)))
    experts.linear_fc1, experts.config = linear, SimpleNamespace(gated_linear_unit=True)
    layer.mlp = nn.Module()
    layer.mlp.experts = experts
    found = {each.name: each for each in matrices_of([Chunk(layer)], ALONE._replace(expert=Place(1, 4)), False, None)}
    each = found["decoder.layers.0.mlp.experts.linear_fc1.weight3"]
    assert each.entry == {"rows": [FFN, FFN], "names": ["gate", "up"]} and each.is_expert


def test_stacked_experts_cannot_be_put_together():
    chunk, experts = grouped(False)
    experts.weight1.tensor_model_parallel, experts.weight1.partition_dim = True, 1
    with pytest.raises(ConfigError, match='tp_mode: "exact" is not possible for .*experts.weight1'):
        matrices_of([chunk], Places(Place(0, 2), Place(0, 2), Place(0, 1)), True, None)
