"""Which parameters are rotated, told by module."""

import pytest
import torch
from torch import nn

from ds_basisrot import BasisRotation, param_groups, tag
from ds_basisrot.optim.routing import describe, named_rotation, pattern_matches, route


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)


class LanguageModel(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, 4), nn.Parameter(torch.zeros(6, 4))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 11, bias=False)
        if tied:
            self.head.weight = self.tokens.weight


def rotated(model, **options):
    return {name for name, each in route(model, **options).items() if each.rotate}


BLOCK_WEIGHTS = {f"blocks.{i}.{layer}.weight" for i in range(3) for layer in ("up", "down")}


def test_a_language_model():
    routes = route(LanguageModel())
    assert {name for name, each in routes.items() if each.rotate} == BLOCK_WEIGHTS
    assert routes["tokens.weight"].reason == "embedding" and routes["head.weight"].reason == "output head"
    assert routes["positions"].reason == "not the weight of a linear map"
    assert describe(routes).startswith("rotated: 6 (6 linear weight); AdamW: 17 (")
    assert list(routes) == [name for name, _ in LanguageModel().named_parameters()]


def test_a_tied_head_is_an_embedding():
    assert rotated(LanguageModel(tied=True)) == BLOCK_WEIGHTS
    assert "head.weight" not in route(LanguageModel(tied=True))


def test_a_part_without_the_output_has_no_head():
    part = nn.ModuleDict({"3": Block(), "4": Block()})
    assert len(rotated(part, holds_output=False)) == 4
    assert rotated(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), holds_output=False) == {"0.weight", "1.weight"}


def test_a_stack_of_blocks_alone_has_no_head():
    assert len(rotated(nn.Sequential(Block(), Block()))) == 4


def test_the_last_layer_of_a_plain_network_is_its_head():
    assert rotated(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))) == {"0.weight", "2.weight"}


def test_a_model_that_names_its_head_is_believed():
    class Named(LanguageModel):
        def __init__(self):
            super().__init__()
            self.value_head = nn.Linear(4, 2)

        def get_output_embeddings(self):
            return self.head

    assert rotated(Named()) == BLOCK_WEIGHTS | {"value_head.weight"}


def test_a_head_defined_before_the_blocks():
    class HeadFirst(LanguageModel):
        def __init__(self):
            super().__init__()
            head, blocks = self.head, self.blocks
            del self.head, self.blocks
            self.head, self.blocks = head, blocks

    assert rotated(HeadFirst()) == BLOCK_WEIGHTS


def test_torch_s_own_attention():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2)
    layers = ("self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight")
    assert rotated(model) == {f"layers.{i}.{layer}" for i in range(2) for layer in layers}


def test_experts():
    class MixtureExperts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up, self.down = nn.Parameter(torch.zeros(2, 8, 4)), nn.Parameter(torch.zeros(2, 4, 8))
            self.bias = nn.Parameter(torch.zeros(2, 4))

    class Unexpertly(MixtureExperts):
        pass

    assert rotated(nn.ModuleDict({"moe": MixtureExperts()})) == {"moe.gate_up", "moe.down"}
    assert not rotated(nn.ModuleDict({"moe": Unexpertly()}))


def test_linear_layers_of_other_libraries():
    class ColumnParallel(nn.Module):
        def __init__(self):
            super().__init__()
            self.in_features, self.out_features = 3, 5
            self.weight = nn.Parameter(torch.zeros(5, 3))

    assert rotated(nn.Sequential(ColumnParallel(), nn.Linear(5, 1))) == {"0.weight"}


def test_frozen_parameters_are_left_out():
    model = LanguageModel()
    model.blocks[0].requires_grad_(False)
    assert rotated(model) == {name for name in BLOCK_WEIGHTS if not name.startswith("blocks.0")}
    assert not any(name.startswith("blocks.0") for name in route(model))


def test_patterns_win_over_modules_and_exclude_over_include():
    patterns = {"include": ["positions", "head.*"], "exclude": ["blocks.*.down.weight", "head.*"]}
    assert rotated(LanguageModel(), patterns=patterns) == {f"blocks.{i}.up.weight" for i in range(3)} | {"positions"}


@pytest.mark.parametrize(
    "rotate, message",
    [
        ({"excludes": ["x"]}, "rotate: unknown key 'excludes'; did you mean 'exclude'"),
        ({"exclude": "0.*"}, "rotate: must be"),
        (["0.*"], "rotate: must be"),
        ({"exclude": ["*.nonexistent"]}, r"rotate.exclude: '\*.nonexistent' matches no parameter"),
    ],
)
def test_wrong_patterns_are_refused(rotate, message):
    model = LanguageModel()
    with pytest.raises(ValueError, match=message):
        param_groups(model, rotate=rotate)
    with pytest.raises(ValueError, match=message):
        BasisRotation(model.named_parameters(), rotate=rotate)


def test_a_pattern_for_another_part_is_none_of_a_part_s_business():
    assert param_groups(Block(), rotate={"exclude": ["another.*"]}, holds_output=False)


def test_an_included_vector_is_refused():
    with pytest.raises(ValueError, match=r"rotate.include: 'norm.\*' matches norm.weight, .* not a matrix"):
        route(LanguageModel(), {"include": ["norm.*"]})


def test_param_groups_route_for_a_plain_loop():
    model = LanguageModel()
    groups = param_groups(model, rotate={"exclude": ["blocks.2.*"]})
    assert [len(group["params"]) for group in groups] == [4, 19]
    optimizer = BasisRotation(groups, rotate={"exclude": ["blocks.0.*"]})
    named = {n: flag for g in optimizer.param_groups for n, flag in zip(g["param_names"], g["rotate"])}
    assert {n for n, flag in named.items() if flag} == {"blocks.1.up.weight", "blocks.1.down.weight"}


def test_nothing_to_rotate_is_refused():
    with pytest.raises(ValueError, match="nothing would be rotated: .*1 embedding"):
        param_groups(nn.Sequential(nn.Embedding(3, 4), nn.LayerNorm(4)))


def test_an_included_parameter_is_rotated_as_its_module_says_or_as_its_dimensions_do():
    model = nn.ModuleDict(
        {"attention": nn.MultiheadAttention(4, 2, bias=False), "table": nn.Embedding(5, 4), "up": nn.ConvTranspose1d(2, 3, 4)}
    )
    routes = route(model, {"include": ["*weight"]})
    assert routes["attention.in_proj_weight"] == route(model)["attention.in_proj_weight"]
    assert routes["table.weight"].entry is True and routes["table.weight"].reason == "included by pattern"
    assert routes["up.weight"].entry is True


def test_a_layout_pattern_includes_a_parameter_and_loses_to_exclude():
    layout = {"rows": [2, 1], "groups": 2, "names": ["a", "b"]}
    patterns = {
        "layout": {"positions": layout, "blocks.0.up.weight": {"rows": [4, 4]}},
        "exclude": ["blocks.0.*"],
        "include": ["positions"],
    }
    routes = route(LanguageModel(), patterns)
    assert routes["positions"].entry == layout and routes["positions"].reason == "layout by pattern"
    assert not routes["blocks.0.up.weight"].rotate
    assert routes["blocks.1.up.weight"].entry is True
    assert pattern_matches(patterns, routes) == {
        "rotate.layout: 'positions'": 1, "rotate.layout: 'blocks.0.up.weight'": 1, "rotate.exclude: 'blocks.0.*'": 6,
        "rotate.include: 'positions'": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    "layout, message",
    [
        ({"*.up.weight": {"rows": [3, 4]}}, r"rotate.layout: '\*.up.weight' matches blocks.0.up.weight: layout: rows \[3, 4\] make 7 rows"),
        ({"*.up.weight": {"row": [4, 4]}}, r"rotate.layout: '\*.up.weight': unknown key 'row'; did you mean 'rows'"),
        ({"*.up.weight": {"rows": "q"}}, r"rotate.layout: '\*.up.weight': rows must be a list"),
        ({"*.up.weight": True}, "rotate: must be"),
        (["*.up.weight"], "rotate: must be"),
        ({"norm.weight": {}}, "rotate.layout: 'norm.weight' matches norm.weight: shape .* cannot be rotated"),
        ({"*.qkv": {}}, r"rotate.layout: '\*.qkv' matches no parameter"),
    ],
)
def test_wrong_layouts_are_refused(layout, message):
    with pytest.raises(ValueError, match=message) as error:
        param_groups(LanguageModel(), rotate={"layout": layout})
    assert "\n" not in str(error.value)


def test_a_tag_wins_over_the_module_and_loses_to_patterns():
    model = LanguageModel()
    tag(model.positions, rows=[2, 4], names=("first", "rest"))
    assert tag(model.blocks[0].up.weight, rotate=False) is model.blocks[0].up.weight
    tag(model.blocks[1].up.weight, rotate=False)
    tag(model.head.weight)
    routes = route(model, {"exclude": ["head.*"], "include": ["blocks.1.up.weight"]})
    assert routes["positions"].entry == {"rows": [2, 4], "names": ["first", "rest"]} and routes["positions"].reason == "tagged"
    assert not routes["blocks.0.up.weight"].rotate and routes["blocks.0.up.weight"].reason == "tagged not to be rotated"
    assert routes["blocks.1.up.weight"].rotate and not routes["head.weight"].rotate
    assert route(model)["head.weight"].rotate
    assert named_rotation([model.positions, model.blocks[0].up.weight], None, None, {}) == (routes["positions"].entry, False)


@pytest.mark.parametrize(
    "tags, message",
    [
        ({"rows": [1, 2]}, r"tag: layout: rows \[1, 2\] make 3 rows, but shape \[6, 4\] has 6"),
        ({"kind": "matrices"}, "tag: kind must be one of .*did you mean 'matrix'"),
        ({"rotate": False, "rows": [6]}, "tag: rotate=False takes no rows"),
    ],
)
def test_a_tag_that_does_not_fit_is_refused(tags, message):
    with pytest.raises(ValueError, match=message):
        tag(nn.Parameter(torch.zeros(6, 4)), **tags)


def test_vectors_and_empty_parameters_are_not_worth_rotating():
    model = nn.ModuleDict(
        {"one_out": nn.Linear(4, 1), "one_in": nn.Linear(1, 4), "depthwise": nn.Conv2d(3, 3, 1, groups=3), "last": Block()}
    )
    model["last"].nothing = nn.Parameter(torch.zeros(0, 4))
    routes = route(model, {"include": ["last.nothing"]}, holds_output=False)
    assert {name for name, each in routes.items() if each.reason == "vector"} == {f"{n}.weight" for n in ("one_out", "one_in", "depthwise")}
    assert routes["last.nothing"].reason == "empty" and not routes["last.nothing"].rotate
    bare = [nn.Parameter(torch.zeros(shape)) for shape in ((4, 1), (0, 4), (3,), (2, 3, 4), (3, 4))]
    assert named_rotation(bare, None, None, {}) == (False, False, False, False, True)
    assert named_rotation(bare[1:2], None, True, {}) == (False,)


def test_the_entries_of_a_group_may_be_layouts():
    matrix, stack = nn.Parameter(torch.zeros(6, 4)), nn.Parameter(torch.zeros(2, 6, 4))
    rows = {"rows": (2, 4)}
    assert named_rotation([matrix, stack], None, [rows, True], {}) == ({"rows": [2, 4]}, True)
    assert named_rotation([matrix, stack], None, rows, {}) == ({"rows": [2, 4]},) * 2
    assert named_rotation([matrix], None, [{}], {}) == (True,)
    assert named_rotation([matrix, stack], ["m", "s"], [rows, False], {"include": ["*"]}) == ({"rows": [2, 4]}, True)
    assert named_rotation([matrix, stack], ["m", "s"], [rows, True], {"exclude": ["m"], "layout": {"s": rows}}) == (False, {"rows": [2, 4]})
    with pytest.raises(ValueError, match=r"rotate: m: layout: rows \[2, 2\] make 4 rows"):
        named_rotation([matrix], ["m"], {"rows": [2, 2]}, {})
    with pytest.raises(ValueError, match="patterns need names, and so do layouts"):
        named_rotation([matrix], None, True, {"include": ["*"]})


def test_entries_survive_a_safe_checkpoint(tmp_path):
    groups = param_groups(nn.ModuleList([nn.MultiheadAttention(4, 2), Block()]), rotate={"layout": {"1.up.weight": {"rows": [4, 4]}}})
    torch.save(groups[0]["rotate"], tmp_path / "rotate.pt")
    assert torch.load(tmp_path / "rotate.pt", weights_only=True) == groups[0]["rotate"]


def test_an_unrouted_matrix_is_rotated_and_an_impossible_one_refused():
    p = nn.Parameter(torch.zeros(3, 3))
    assert BasisRotation([p]).param_groups[0]["rotate"] == (True,)
    with pytest.raises(ValueError, match="cannot be rotated"):
        BasisRotation([{"params": [nn.Parameter(torch.zeros(3))], "rotate": True}])
    with pytest.raises(ValueError, match="list of 1"):
        BasisRotation([{"params": [p], "rotate": [True, False]}])
