"""A run goes on bitwise from its checkpoint, also from one that another program has touched; what does not fit is refused in one line."""

import copy
import io

import pytest
import torch
from mixed_parameters import KINDS, assert_same, build, random, snapshot, train

from ds_basisrot.optim import eigenbasis


def through_a_file(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(parameters, optimizer, change=lambda state_dict: state_dict, dtype=torch.float32, **options):
    """Other parameters of the same values, with an optimizer that loaded a changed copy of the state."""
    others, its = build(dtype, kinds=tuple(parameters), **options)
    with torch.no_grad():
        for kind, p in parameters.items():
            others[kind].copy_(p)
    its.load_state_dict(change(through_a_file(optimizer.state_dict())))
    return others, its


def each_state(change):
    """A change of a state_dict that changes each parameter's state."""

    def whole(state_dict):
        for state in state_dict["state"].values():
            change(state)
        return state_dict

    return whole


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("source", eigenbasis.SOURCES)
def test_a_run_resumed_from_a_file_is_bitwise_the_run_that_went_on(source, dtype, state_dtype):
    options = {"source": source, "state_dtype": state_dtype}
    parameters, optimizer = build(dtype, **options)
    train(parameters, optimizer, range(7))
    others, its = resumed(parameters, optimizer, dtype=dtype, **options)
    for each in ((parameters, optimizer), (others, its)):
        train(*each, range(7, 15))
    assert_same(snapshot(parameters, optimizer), snapshot(others, its))
    kept = {"rotated_exp_avg", "left_basis", "right_basis"}
    for p in parameters.values():
        for key, value in optimizer.state[p].items():
            if torch.is_tensor(value):
                assert value.dtype == (torch.bfloat16 if state_dtype == "bfloat16" and key.split(".")[-1] in kept else torch.float32), key


def numbers_as_tensors(state):
    for key in [key for key in state if key.split(".")[-1] in ("step", "gradient_scale", "failed_refreshes")]:
        state[key] = torch.tensor(state[key], dtype=torch.float64)


def without_bookkeeping(state):
    for key in [key for key in state if key.split(".")[-1] in ("cold", "failed_refreshes", "gradient_scale")]:
        del state[key]


@pytest.mark.parametrize("change", [numbers_as_tensors, without_bookkeeping])
def test_a_state_with_tensors_for_numbers_or_without_bookkeeping_is_resumed_bitwise(change):
    parameters, optimizer = build()
    train(parameters, optimizer, range(7))
    others, its = resumed(parameters, optimizer, each_state(change))
    for each in ((parameters, optimizer), (others, its)):
        train(*each, range(7, 12))
    assert_same(snapshot(parameters, optimizer), snapshot(others, its))


@pytest.mark.parametrize(
    "kind, key", [("matrix", "left_basis"), ("fused", "k.right_covariance"), ("vector", "exp_avg_sq"), ("stack", "step")]
)
def test_a_state_that_lacks_a_key_is_refused_in_one_line(kind, key):
    parameters, optimizer = build()
    train(parameters, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][list(KINDS).index(kind)][key]
    with pytest.raises(ValueError, match=rf"^the saved state of {kind} .*differing: {key}.*resume with") as refusal:
        build()[1].load_state_dict(saved)
    assert "\n" not in str(refusal.value)


def test_a_parameter_without_state_in_the_checkpoint_begins_with_its_next_gradient():
    parameters, optimizer = build()
    for seed in range(3):
        parameters["matrix"].grad = random(6, 9, seed=seed)
        optimizer.step()
    others, its = resumed(parameters, optimizer)
    assert [others[kind] in its.state for kind in KINDS] == [True, False, False, False, False]
    for each in ((parameters, optimizer), (others, its)):
        train(*each, range(3, 7))
    assert_same(snapshot(parameters, optimizer), snapshot(others, its))
