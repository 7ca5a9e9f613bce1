"""A parameter as matrices: every layout takes what it should, puts it back where it was, and says what does not fit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ds_basisrot.optim.layout import Part, parts


def numbered(*shape):
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def shapes(shape, entry):
    return {part.name: part.shape for part in parts(shape, entry)}


def assert_round_trip(tensor, entry):
    """Taking every part and putting it into another tensor of the same strides rebuilds the first, whatever was there."""
    copy = torch.full_like(tensor, -1.0)
    assert copy.stride() == tensor.stride()
    found = parts(tensor.shape, entry)
    for part in found:
        matrices = part.take(tensor)
        assert matrices.shape == part.shape
        assert (copy == -1).sum() >= matrices.numel()  # parts do not overlap
        part.put(matrices, copy)
        assert torch.equal(part.take(copy), matrices)
    assert torch.equal(copy, tensor)
    assert sum(torch.Size(part.shape).numel() for part in found) == tensor.numel()


LAYOUTS = [
    ((6, 4), True),
    ((6, 4), {"transposed": True}),
    ((6, 4), {"rows": [2, 2, 2], "names": ["q", "k", "v"]}),
    ((8, 4), {"rows": [4, 2, 2]}),
    ((12, 4), {"rows": [2, 1, 1], "groups": 3}),
    ((4, 12), {"rows": [2, 1, 1], "groups": 3, "transposed": True}),
    ((3, 6, 4), True),
    ((3, 6, 4), {"rows": [3, 3]}),
    ((3, 4, 6), {"rows": [3, 3], "transposed": True}),
    ((3, 4, 6), {"rows": [1, 1], "groups": 3, "transposed": True}),
    ((3, 4, 6), {"transposed": True}),
    ((6, 2, 3), {"kind": "convolution"}),
    ((6, 2, 3), {"kind": "convolution", "rows": [1, 2], "groups": 2}),
    ((6, 2, 3, 3), True),
    ((6, 2, 3, 3), {"rows": [2, 4]}),
    ((6, 2, 3, 3, 2), True),
    ((2, 6, 4), {"kind": "columns"}),
    ((2, 6, 4), {"kind": "columns", "rows": [1, 2], "groups": 2}),
]


@pytest.mark.parametrize("shape, entry", LAYOUTS)
def test_every_layout_round_trips(shape, entry):
    assert_round_trip(numbered(*shape), entry)


@pytest.mark.parametrize("shape, entry", LAYOUTS)
def test_every_layout_round_trips_in_a_tensor_that_is_not_contiguous(shape, entry):
    assert_round_trip(numbered(*reversed(shape)).permute(*reversed(range(len(shape)))), entry)


@pytest.mark.parametrize("entry", [True, {"rows": [2, 4]}, {"rows": [1, 2], "groups": 2}])
@pytest.mark.parametrize("shape, memory", [((6, 2, 3, 3), torch.channels_last), ((6, 2, 3, 3, 2), torch.channels_last_3d)])
def test_channels_last_convolutions_round_trip(shape, memory, entry):
    tensor = numbered(*shape).to(memory_format=memory)
    assert not tensor.is_contiguous()
    assert_round_trip(tensor, entry)
    for part in parts(shape, entry):
        assert torch.equal(part.take(tensor), part.take(tensor.contiguous()))


@pytest.mark.parametrize("shape, entry", LAYOUTS)
def test_every_layout_works_without_storage(shape, entry):
    tensor = torch.empty(shape, device="meta")
    for part in parts(shape, entry):
        matrices = part.take(tensor)
        assert matrices.shape == part.shape and matrices.is_meta
        part.put(matrices, tensor)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_splits_into_rows_round_trip(data):
    rows = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    groups, columns = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    entry = {"rows": rows, "groups": groups, "transposed": data.draw(st.booleans())}
    matrix = [columns, groups * sum(rows)] if entry["transposed"] else [groups * sum(rows), columns]
    stack = data.draw(st.sampled_from([[], [1], [2]]))
    tensor = numbered(*stack, *matrix)
    assert_round_trip(tensor, entry)
    straight = tensor.mT if entry["transposed"] else tensor
    blocks = straight.split(rows * groups, dim=-2)
    for index, part in enumerate(parts(tensor.shape, entry)):
        expected = torch.cat(blocks[index :: len(rows)], dim=-2)
        assert torch.equal(part.take(tensor), expected if stack else expected.unsqueeze(0))


def test_q_k_and_v_are_their_blocks_of_rows():
    weight = numbered(12, 5)
    q, k, v = (part.take(weight)[0] for part in parts(weight.shape, {"rows": [6, 3, 3], "names": ["q", "k", "v"]}))
    assert torch.equal(q, weight[:6]) and torch.equal(k, weight[6:9]) and torch.equal(v, weight[9:])


def test_interleaved_heads_are_collected():
    heads, size, width = 3, 2, 5
    weight = numbered(heads * 3 * size, width)
    q, k, v = parts(weight.shape, {"rows": [size] * 3, "groups": heads, "names": ["q", "k", "v"]})
    by_head = weight.reshape(heads, 3, size, width)
    for index, part in enumerate((q, k, v)):
        assert part.shape == (1, heads * size, width)
        assert torch.equal(part.take(weight)[0], by_head[:, index].reshape(-1, width))


def test_a_transposed_weight_gives_the_matrix_of_the_linear_map():
    weight = numbered(4, 6)  # inputs x outputs
    first, second = parts(weight.shape, {"rows": [2, 4], "transposed": True})
    assert torch.equal(first.take(weight)[0], weight.T[:2]) and torch.equal(second.take(weight)[0], weight.T[2:])


def test_every_expert_is_split():
    stack = numbered(3, 6, 4)
    gate, up = parts(stack.shape, {"rows": [3, 3], "names": ["gate", "up"]})
    assert gate.shape == up.shape == (3, 3, 4)
    assert torch.equal(gate.take(stack), stack[:, :3]) and torch.equal(up.take(stack), stack[:, 3:])
    gate, up = parts((3, 4, 6), {"rows": [3, 3], "transposed": True})
    assert torch.equal(up.take(stack.mT.contiguous()), stack[:, 3:])


def test_a_convolution_is_one_matrix_of_all_its_inputs():
    assert shapes((8, 3, 2, 2), True) == {"": (1, 8, 12)}
    assert shapes((8, 3, 2, 2, 2), True) == {"": (1, 8, 24)}
    assert shapes((8, 3, 2), {"kind": "convolution"}) == {"": (1, 8, 6)}
    assert shapes((8, 3, 2), True) == {"": (8, 3, 2)}
    grouped = nn.Conv2d(4, 8, 3, groups=2)
    assert shapes(grouped.weight.shape, True) == {"": (1, 8, 18)}


def test_parts_are_named():
    assert list(shapes((6, 4), {"rows": [2, 4]})) == ["0", "1"]
    assert list(shapes((6, 4), {"rows": [2, 4], "names": ["a", "b"]})) == ["a", "b"]
    assert list(shapes((6, 4), {"rows": [6]})) == [""]


def test_nothing_is_rotated_where_the_entry_is_false_and_an_empty_layout_is_true():
    assert parts((6, 4), False) == () == parts((3,), False)
    assert parts((6, 4), {}) == parts((6, 4), True)


@pytest.mark.parametrize("shape, entry", [each for each in LAYOUTS if each[1] is True or not {"groups", "kind"} & set(each[1])])
def test_take_is_a_view_where_rows_are_in_one_group(shape, entry):
    tensor = torch.zeros(shape)
    for part in parts(shape, entry):
        part.take(tensor).fill_(1)
    assert tensor.all()


def test_take_is_a_view_of_a_matrix_or_stack_of_any_strides():
    for shape in ((6, 4), (3, 6, 4)):
        wide = torch.zeros(*shape[:-1], 2 * shape[-1])
        for part in parts(shape, {"rows": [2, 4]}):
            part.take(wide[..., ::2]).fill_(1)
        assert wide[..., ::2].all() and not wide[..., 1::2].any()


def test_put_writes_a_part_alone_and_casts():
    weight = torch.zeros(6, 4, dtype=torch.bfloat16)
    parts(weight.shape, {"rows": [2, 4]})[1].put(torch.ones(1, 4, 4), weight)
    assert torch.equal(weight, torch.cat([torch.zeros(2, 4), torch.ones(4, 4)]).bfloat16())


def test_whole_means_one_matrix_that_reshape_gives():
    whole = [((6, 4), True), ((6, 4), {"rows": [6]}), ((6, 4), {"rows": [2], "groups": 3}), ((1, 6, 4), True), ((6, 2, 3, 3), True)]
    others = [((6, 4), {"transposed": True}), ((6, 4), {"rows": [2, 4]}), ((2, 6, 4), True), ((1, 6, 4), {"transposed": True})]
    assert all(part.is_whole for each in whole for part in parts(*each))
    assert not any(part.is_whole for each in others for part in parts(*each))
    for shape, entry in whole:
        part, tensor = parts(shape, entry)[0], numbered(*shape)
        assert torch.equal(part.take(tensor), tensor.reshape(part.shape))


def test_parts_are_values():
    assert parts((6, 4), {"rows": [2, 4]}) == parts(torch.Size([6, 4]), {"rows": (2, 4)})
    assert len({*parts((6, 4), True), *parts((6, 4), True)}) == 1
    assert all(type(part) is Part and type(part.shape) is tuple for part in parts(torch.Size([6, 4]), True))


def test_layouts_survive_a_safe_checkpoint(tmp_path):
    entries = (True, False, *(entry for _, entry in LAYOUTS))
    torch.save({"rotate": entries}, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True)["rotate"] == entries


@pytest.mark.parametrize(
    "shape, entry, message",
    [
        ((6,), True, r"shape \[6\] cannot be rotated: only matrices"),
        ((), True, r"shape \[\] cannot be rotated"),
        ((1,) * 6, True, "cannot be rotated: only"),
        ((6, 4), {"rows": [2, 2]}, r"rows \[2, 2\] make 4 rows, but shape \[6, 4\] has 6$"),
        ((6, 4), {"rows": [2, 2], "groups": 2}, r"rows \[2, 2\] make 2 x 4 rows, but shape \[6, 4\] has 6$"),
        ((6, 4), {"rows": [3, 3], "transposed": True}, "has 4 when transposed$"),
        ((6, 4), {"row": [2, 4]}, "unknown key 'row'; did you mean 'rows'"),
        ((6, 4), {"rows": []}, r"rows must be a list of integers >= 1, .* got \[\]"),
        ((6, 4), {"rows": [7, -1]}, "rows must be"),
        ((6, 4), {"rows": 6}, "rows must be"),
        ((6, 4), {"rows": [6], "groups": 0}, "groups must be an integer >= 1, got 0"),
        ((6, 4), {"groups": 2}, "groups needs rows"),
        ((6, 4), {"rows": [2, 4], "names": ["q"]}, r"names must be as many as blocks of rows, 2, got \['q'\]"),
        ((6, 4), {"rows": [2, 4], "names": ["q", "q"]}, "names must be a list of different names"),
        ((6, 4), {"transposed": 1}, "transposed must be true or false, got 1"),
        ((6, 4), {"kind": "convolutional"}, "kind must be one of matrix, stack, convolution, .*did you mean 'convolution'"),
        ((6, 4), {"kind": "stack"}, "cannot be rotated as a stack, which has 3 dimensions"),
        ((6, 4), {"kind": "convolution"}, "cannot be rotated as a convolution, which has 3 or 4 or 5 dimensions"),
        ((6, 4, 2, 2), {"transposed": True}, "not for a convolution"),
        ((6, 4), "yes", "must be true, false or a layout, got 'yes'"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(shape, entry, message):
    with pytest.raises(ValueError, match=message) as error:
        parts(shape, entry)
    assert "\n" not in str(error.value)


def test_blocks_of_columns_are_one_matrix():
    whole = numbered(6, 8)
    blocks = torch.stack(whole.split(4, dim=1))
    (part,) = parts(blocks.shape, {"kind": "columns"})
    assert torch.equal(part.take(blocks)[0], whole) and not part.is_whole
    upper, lower = parts(blocks.shape, {"kind": "columns", "rows": [2, 4]})
    assert torch.equal(upper.take(blocks)[0], whole[:2]) and torch.equal(lower.take(blocks)[0], whole[2:])
    with pytest.raises(ValueError, match="not for columns"):
        parts(blocks.shape, {"kind": "columns", "transposed": True})
