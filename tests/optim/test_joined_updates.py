"""Parameters that are not rotated are updated together, and get bit by bit what each gets alone, wherever it lies in memory."""

import math

import pytest
import torch
from mixed_parameters import random

from ds_basisrot.optim import adamw
from ds_basisrot.optim.gradient_gate import Gate, largest_elements, largest_elements_on_host

GROUP = {"lr": 3e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
DTYPES = torch.float32, torch.bfloat16, torch.float64


def alone(group, p, state, gate):
    """The formula, operation by operation, over one parameter: the slow twin."""
    (beta1, beta2), step, scale = group["betas"], state["step"], state["gradient_scale"]
    gradient = gate.gradient(p.grad if scale == 1.0 else p.grad / scale).to(torch.float32)
    state["exp_avg"].mul_(gate.decay(beta1)).add_(gradient * (1 - beta1))
    state["exp_avg_sq"].mul_(gate.decay(beta2)).add_(gradient.square().mul_(1 - beta2))
    denominator = state["exp_avg_sq"].sqrt().div_(math.sqrt(1 - beta2**step)).add_(max(group["eps"] / scale, 2.0**-63))
    direction = state["exp_avg"] / denominator
    weight = p if p.dtype in (torch.float32, torch.float64) else p.float()
    weight.mul_(gate.decay(1 - group["lr"] * group["weight_decay"], weight.dtype))
    weight.add_(direction.mul_(gate.amount(-group["lr"] / (1 - beta1**step))).to(weight.dtype))
    p.copy_(weight)


def member(tensor, group=GROUP, scale=1.0):
    """(group, parameter, state) of a tensor, whose elements it holds."""
    moments = {key: torch.zeros(tensor.shape) for key in ("exp_avg", "exp_avg_sq")}
    return group, tensor, {"step": 0, "gradient_scale": scale} | moments


def slices(buffer, sizes, first=0):
    """Consecutive slices of a buffer, so that they begin at all offsets."""
    starts = [first]
    for size in sizes:
        starts.append(starts[-1] + size)
    return [buffer[start : start + size] for start, size in zip(starts, sizes)]


def train(members, update, gates, dtype=torch.float32):
    """One update for each gate, with gradients that are slices too; what a shut gate keeps out counts no step."""
    with torch.no_grad():
        for number, gate in enumerate(gates):
            total = sum(p.numel() for _, p, _ in members)
            flat = slices(random(total + 7, seed=number, dtype=dtype), [p.numel() for _, p, _ in members], number % 7)
            for (_, p, state), gradient in zip(members, flat):
                p.grad = gradient.mul_(state["gradient_scale"]).view(p.shape).to(p.dtype)
                state["step"] += 1
            update(members, gate)
            for _, _, state in members if gate.flag is not None and not gate.flag else ():
                state["step"] -= 1


def one_by_one(members, gate):
    for each in members:
        alone(*each, gate)


def together(members, gate):
    adamw.update(members, gate, layout_independent=True)


def assert_alike(build, gates, dtype=torch.float32):
    """The members that `build` makes end up alike, updated one by one and together."""
    one, other = build(), build()
    train(one, one_by_one, gates, dtype)
    train(other, together, gates, dtype)
    for (_, p, state), (_, q, its) in zip(one, other):
        assert torch.equal(p, q), tuple(p.shape)
        assert all(torch.equal(state[key], its[key]) for key in ("exp_avg", "exp_avg_sq")), tuple(p.shape)


GATES = {
    "none": [Gate()] * 4,
    "open": [Gate(torch.tensor(True))] * 4,
    "skips": [Gate(torch.tensor(flag)) for flag in (True, False, True, True, False)],
}


@pytest.mark.parametrize("gates", GATES.values(), ids=GATES)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_size_at_every_offset_gets_what_it_gets_alone(dtype, weight_decay, gates):
    group = GROUP | {"weight_decay": weight_decay}
    sizes = range(1, 71)
    assert_alike(lambda: [member(t, group) for t in slices(random(sum(sizes), dtype=dtype), sizes)], gates, dtype)
    assert_alike(lambda: [member(t, group) for t in slices(random(sum(sizes) + 1, dtype=dtype), sizes, 1)], gates, dtype)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_skipped_update_changes_no_bit(weight_decay):
    members = [member(t, GROUP | {"weight_decay": weight_decay}) for t in slices(random(500), [7, 64, 1, 33])]
    train(members, together, GATES["none"])
    before = [[t.clone() for t in (p, state["exp_avg"], state["exp_avg_sq"])] for _, p, state in members]
    train(members, together, [Gate(torch.tensor(False))])
    for (_, p, state), kept in zip(members, before):
        assert all(torch.equal(t, its) for t, its in zip((p, state["exp_avg"], state["exp_avg_sq"]), kept))


@pytest.mark.parametrize("flag", [None, True])
def test_a_parameter_is_updated_alike_whole_and_in_slices(flag):
    sizes, gates = [1, 62, 3, 17, 5], [Gate(None if flag is None else torch.tensor(flag))] * 3
    whole, parts = random(sum(sizes)), slices(random(sum(sizes)), sizes)
    train([member(whole)], together, gates)
    train([member(part) for part in parts], together, gates)
    assert torch.equal(whole, torch.cat(parts))


def test_shapes_strides_units_and_groups_may_differ():
    def build():
        transposed, spread = random(5, 6, seed=1).mT, random(4, 18, seed=2)[:, ::2]
        other = GROUP | {"lr": 1e-2, "betas": (0.8, 0.95)}
        ordinary = [member(random(*shape, seed=3)) for shape in ((), (3, 4), (2, 3, 5), (0,))]
        tiny = [member(random(n, seed=n), scale=2.0**-60) for n in (9, 4)]
        late = [member(random(n, seed=n)) for n in (6, 7)]
        for _, _, state in late:
            state["step"] = 40
        mixed = [member(random(8, seed=4, dtype=torch.bfloat16)), member(random(8, seed=5, dtype=torch.float64))]
        return [member(transposed), *ordinary, *tiny, member(spread), *late, *mixed, member(random(11), other), member(random(12), other)]

    assert_alike(build, GATES["none"])


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="gradients have their parameters' dtype in this torch")
def test_gradients_may_have_another_dtype_than_their_parameters():
    one, other = ([member(random(n, seed=n, dtype=dtype)) for n in (9, 5) for dtype in DTYPES] for _ in range(2))
    for members, update in ((one, one_by_one), (other, together)):
        for _, p, state in members:
            p.grad_dtype, p.grad, state["step"] = None, random(p.numel(), seed=1), 1
        update(members, Gate())
    assert all(torch.equal(p, q) and p.dtype == q.dtype for (_, p, _), (_, q, _) in zip(one, other))


def test_large_parameters_are_updated_in_place_and_small_ones_in_batches(monkeypatch):
    monkeypatch.setattr(adamw, "LARGEST_JOINED", 20)
    monkeypatch.setattr(adamw, "LARGEST_BATCH", 50)
    sizes, joined = [20, 20, 21, 10, 1, 300, 20, 20, 5, 5], []
    update_joined = adamw._update_joined

    def watched(members, gate):
        joined.append([p.numel() for _, p, _ in members])
        update_joined(members, gate)

    monkeypatch.setattr(adamw, "_update_joined", watched)
    assert_alike(lambda: [member(t) for t in slices(random(sum(sizes)), sizes)], [Gate()] * 2)
    assert joined == [[21], [20, 20, 10], [300], [1, 20, 20, 5], [5]] * 2


def test_largest_elements_are_found_in_every_dtype_and_nan_is_kept():
    gradients = [torch.tensor([1.0, -3.0]), torch.tensor([[0.5]], dtype=torch.bfloat16), torch.tensor(-1e200, dtype=torch.float64)]
    assert largest_elements(gradients).tolist() == largest_elements_on_host(gradients) == [3.0, 0.5, 1e200]
    assert largest_elements(gradients[:1]).dtype == torch.float64
    odd = [torch.tensor([1.0, -math.inf]), torch.tensor([math.nan, 5.0])]
    for infinite, missing in (largest_elements(odd).tolist(), largest_elements_on_host(odd)):
        assert infinite == math.inf and math.isnan(missing)
