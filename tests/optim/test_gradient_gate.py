"""On an accelerator an update does not wait for the device, and a gradient that is not finite still leaves no trace.

The way of an accelerator is taken here on a processor: the optimizer is told that its gradients are on a device.
"""

import copy
import math
import pickle

import pytest
import torch
from mixed_parameters import KINDS, assert_same, build, loss_of_orthogonality, set_gradients, snapshot, train
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ds_basisrot import BasisRotation
from ds_basisrot.optim import adamw, eigenbasis, moments, rotated_adam
from ds_basisrot.optim.gradient_gate import Gate, Outcome
from ds_basisrot.optim.orthonormal import householder

OPTIONS = [{}, {"source": "first_order"}, {"geometry": "unilateral", "state_dtype": "bfloat16"}, {"product_dtype": "bfloat16"}]


def as_on_a_device(patch):
    """From here on the host looks at gradients beforehand only where it does so on an accelerator too."""
    original, accelerator = BasisRotation._host_decides, torch.device("cuda")
    patch.setattr(BasisRotation, "_host_decides", lambda self, work, device: original(self, work, accelerator))
    patch.setattr(eigenbasis, "orthonormalise", householder)
    patch.setattr(rotated_adam, "_check_finite", lambda bases: None)


@pytest.fixture
def on_a_device(monkeypatch):
    as_on_a_device(monkeypatch)


def spoil(parameters, kind, value):
    parameters[kind].grad.view(-1)[-1] = value


def without_step_counts(states):
    return {kind: (weight, {key: value for key, value in state.items() if key != "step"}) for kind, (weight, state) in states.items()}


# Ordinary gradients


def separate_operations(patch):
    """Decays by an operation of their own on a processor too: on an accelerator, after the first update, the factor is on the device."""
    add_gram, add_to = rotated_adam.add_gram, adamw.add_product_to_weight
    patch.setattr(rotated_adam, "add_gram", lambda packed, x, decay, weight: add_gram(packed, x, torch.as_tensor(decay), weight))
    patch.setattr(adamw, "add_product_to_weight", lambda *rest: add_to(*rest[:-1], Gate(torch.tensor(True))))
    patch.setattr(moments, "_update_fused", moments._update)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_ordinary_gradients_train_bitwise_as_on_a_processor_but_for_the_rounding_of_fused_operations(options, dtype):
    runs = []
    for preparations in ([separate_operations], [separate_operations, as_on_a_device], []):
        parameters, optimizer = build(dtype, **options)
        with pytest.MonkeyPatch.context() as patch:
            for prepare in preparations:
                prepare(patch)
            train(parameters, optimizer, range(30))
            assert (optimizer._unread is not None) == (as_on_a_device in preparations)
            assert optimizer.skipped_updates == 0
        runs.append(snapshot(parameters, optimizer))
    assert_same(runs[0], runs[1])
    coarse = torch.bfloat16 in (dtype, getattr(torch, options.get("state_dtype", "float32")))
    tolerance = 2e-2 if coarse else 1e-3 if "product_dtype" in options else 1e-5  # what is rounded to bfloat16 may round the other way
    for kind, (weight, _) in runs[2].items():
        torch.testing.assert_close(runs[1][kind][0], weight, rtol=0, atol=tolerance)


def test_a_weight_of_double_precision_decays_in_double_precision(on_a_device):
    p = nn.Parameter(torch.ones(3, 3, dtype=torch.float64))
    optimizer = BasisRotation([p], lr=1e-4, weight_decay=1e-3)
    expected = 1.0
    for t in range(30):
        p.grad = torch.eye(3, dtype=torch.float64) * (1e-30 if t == 0 else 0.0)
        before = p.detach().clone()
        optimizer.step()
        expected = (1 - 1e-7) * before[0, 1].item()
        if t > 0:
            assert abs(p[0, 1].item() - expected) <= 1e-9


class NoHostReads(TorchDispatchMode):
    """Raises at whatever makes the host wait for numbers of a tensor."""

    FORBIDDEN = (
        "_local_scalar_dense", "item", "nonzero", "nonzero_numpy", "is_nonzero", "equal", "allclose", "masked_select", "unique", "_unique2",
        "unique_dim", "bincount", "repeat_interleave", "_linalg_check_errors", "linalg_eigh", "_linalg_eigh",
    )  # fmt: skip

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name in self.FORBIDDEN:
            raise AssertionError(f"the host reads from the device: {func}")
        if name in ("index", "index_put_") and any(t is not None and t.dtype == torch.bool for t in args[1]):
            raise AssertionError(f"the host reads from the device: {func} with a mask")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def no_host_reads(monkeypatch):
    """A context in which reading numbers of a tensor raises, but for what has long arrived: the sizes of the update before."""
    reads, reading, original_read = [], [], Outcome.read

    def read(self):
        reading.append(True)
        reads.append(self)
        try:
            return original_read(self)
        finally:
            reading.pop()

    monkeypatch.setattr(Outcome, "read", read)
    for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__"):
        original = getattr(torch.Tensor, name)

        def checked(self, *args, original=original, name=name, **kwargs):
            assert reading or not modes, f"the host reads from the device: Tensor.{name}"
            return original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, checked)
    modes = []

    class Context(NoHostReads):
        def __enter__(self):
            modes.append(self)
            return super().__enter__()

        def __exit__(self, *error):
            modes.pop()
            return super().__exit__(*error)

    return Context(), reads


def test_the_watch_for_host_reads_sees_them(no_host_reads):
    watch, _ = no_host_reads
    x = torch.ones(3)
    for read in (lambda: x.sum().item(), lambda: x.tolist(), lambda: bool(x.any()), lambda: x[x > 0], lambda: torch.equal(x, x), x.nonzero):
        with pytest.raises(AssertionError, match="the host reads from the device"), watch:
            read()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_an_update_reads_nothing_from_the_device_but_the_sizes_of_the_one_before(options, dtype, on_a_device, no_host_reads):
    watch, reads = no_host_reads
    parameters, optimizer = build(dtype, **options)
    train(parameters, optimizer, range(2))  # the first update may look, and nothing is left to settle after it
    for seed in range(2, 12):  # with refreshes
        set_gradients(parameters, seed, math.nan if seed == 7 else 1.0)
        pending = optimizer._unread[1]
        del reads[:]
        with watch:
            optimizer.step()
        assert reads == [pending]
    assert optimizer.skipped_updates == 1


# Gradients that are not finite


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_bad_gradient_leaves_every_bit_where_it_was_and_the_next_update_counts_it(dtype, kind, bad, on_a_device, caplog):
    parameters, optimizer = build(dtype)
    train(parameters, optimizer, range(4))
    before = snapshot(parameters, optimizer)
    set_gradients(parameters, 50)
    spoil(parameters, kind, bad)
    optimizer.step()
    assert_same(without_step_counts(before), without_step_counts(snapshot(parameters, optimizer)))
    assert not caplog.text  # nobody has waited to see it
    train(parameters, optimizer, range(4, 5))
    assert f"the gradient of {kind} {list(KINDS[kind][0])} is not finite (1 skipped so far)" in caplog.text
    assert {optimizer.state[p]["step"] for p in parameters.values()} == {5}
    assert optimizer.skipped_updates == 1


@pytest.mark.parametrize("bad_at", [3, 4, 5, 6])
@pytest.mark.parametrize("stagger", [True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_run_with_bad_updates_is_bitwise_the_run_without_them(options, stagger, bad_at, on_a_device):
    """Also when a refresh is due at the bad update: it changes no basis, and comes with the next update."""
    (clean, its), (disturbed, other) = (build(stagger=stagger, **options) for _ in range(2))
    train(clean, its, range(1, 10))
    for seed in range(1, 10):
        for bad in (math.nan, math.inf) if seed == bad_at else ():
            set_gradients(disturbed, 50)
            spoil(disturbed, "vector", bad)
            other.step()
        train(disturbed, other, [seed])
    assert other.skipped_updates == 2 and its.skipped_updates == 0
    assert_same(snapshot(clean, its), snapshot(disturbed, other))


def test_a_refresh_due_at_a_bad_update_is_made_at_the_next(on_a_device):
    parameters, optimizer = build(kinds=("matrix",), refresh_period=4, stagger=False)
    train(parameters, optimizer, range(3))
    basis = optimizer.state[parameters["matrix"]]["left_basis"]
    before = basis.clone()
    set_gradients(parameters, 50, math.nan)
    optimizer.step()
    assert torch.equal(basis, before)
    train(parameters, optimizer, [3])
    assert not torch.equal(basis, before) and loss_of_orthogonality(basis) <= 1e-4


def test_a_first_gradient_that_is_not_finite_makes_no_state(on_a_device):
    parameters, optimizer = build()
    set_gradients(parameters, 0, math.nan)
    optimizer.step()
    assert not optimizer.state and optimizer.skipped_updates == 1


@pytest.mark.parametrize("look", ["state_dict", "skipped_updates", "deepcopy", "pickle"])
def test_whoever_looks_right_after_a_bad_update_sees_it_settled(look, on_a_device):
    parameters, optimizer = build()
    train(parameters, optimizer, range(3))
    before = snapshot(parameters, optimizer)
    set_gradients(parameters, 50, math.inf)
    optimizer.step()
    if look == "state_dict":
        assert [state["step"] for state in optimizer.state_dict()["state"].values()] == [3] * len(KINDS)
    elif look == "skipped_updates":
        assert optimizer.skipped_updates == 1
    else:
        copied = copy.deepcopy if look == "deepcopy" else lambda pair: pickle.loads(pickle.dumps(pair))
        others, its = copied((parameters, optimizer))
        assert its.skipped_updates == 1
        assert_same(before, snapshot(others, its))
        for each in ((parameters, optimizer), (others, its)):
            train(*each, range(3, 7))
        assert_same(snapshot(parameters, optimizer), snapshot(others, its))
    assert optimizer.skipped_updates == 1


def test_a_run_resumed_right_after_a_bad_update_is_the_run_that_went_on(on_a_device):
    parameters, optimizer = build()
    train(parameters, optimizer, range(3))
    set_gradients(parameters, 50, math.nan)
    optimizer.step()
    others, its = build()
    set_gradients(others, 51)
    its.step()
    set_gradients(others, 51, math.nan)
    its.step()  # what it has not settled yet is of the state it gives up
    with torch.no_grad():
        for kind, p in parameters.items():
            others[kind].copy_(p)
    its.load_state_dict(optimizer.state_dict())
    for each in ((parameters, optimizer), (others, its)):
        train(*each, range(3, 8))
    assert_same(snapshot(parameters, optimizer), snapshot(others, its))


@pytest.mark.parametrize("event", ["add_param_group", "share_refreshes"])
def test_a_bad_update_is_settled_after_a_change_of_plans_too(event, on_a_device):
    parameters, optimizer = build()
    train(parameters, optimizer, range(3))
    set_gradients(parameters, 50, math.nan)
    optimizer.step()
    if event == "add_param_group":
        optimizer.add_param_group({"params": [("late", nn.Parameter(torch.zeros(3, 3)))]})
    else:
        optimizer.share_refreshes([1.0, 0.0], [1.0, 1.0], 0)
    train(parameters, optimizer, range(3, 5))
    assert optimizer.skipped_updates == 1
    assert {optimizer.state[p]["step"] for p in parameters.values()} == {5}


# Gradients of changing size


@pytest.mark.parametrize("first, then", [(1e-30, 1e-10), (1e-30, 1.0), (1e-20, 1.0), (1e-25, 1e5)])
def test_gradients_that_grow_at_once_lose_one_update_at_most_and_train_on(first, then, on_a_device):
    parameters, optimizer = build(kinds=("matrix", "vector", "stack", "fused"), weight_decay=0.0, eps=0.0)
    train(parameters, optimizer, range(4), scale=first)
    before = snapshot(parameters, optimizer)
    set_gradients(parameters, 4, then)
    optimizer.step()
    assert all(torch.equal(p, before[kind][0]) for kind, p in parameters.items())
    train(parameters, optimizer, range(5, 30), scale=then)
    assert optimizer.skipped_updates == 1
    control, its = build(kinds=("matrix", "vector", "stack", "fused"), weight_decay=0.0, eps=0.0)
    train(control, its, range(5, 30))
    for kind, p in parameters.items():  # as far as if there had been no tiny ones
        moved = (p.detach() - before[kind][0]).norm() / (control[kind].detach() - build()[0][kind].detach()).norm()
        assert 0.5 < moved < 2, kind


def test_gradients_that_grow_from_tiny_ones_lose_an_update_for_each_twelve_decades_at_most(on_a_device):
    parameters, optimizer = build(kinds=("matrix",), weight_decay=0.0)
    for t in range(40):
        train(parameters, optimizer, [t], scale=1e-30 * 10.0**t)
    assert optimizer.skipped_updates <= 3 and parameters["matrix"].isfinite().all()
    assert optimizer.state[parameters["matrix"]]["gradient_scale"] == 1.0


@pytest.mark.parametrize("huge", [1e25, 1e17])
def test_an_absurd_gradient_in_between_is_skipped_and_leaves_no_trace(huge, on_a_device, caplog):
    (clean, its), (disturbed, other) = (build() for _ in range(2))
    train(clean, its, range(8))
    train(disturbed, other, range(5))
    train(disturbed, other, [77], scale=huge)
    train(disturbed, other, range(5, 8))
    assert other.skipped_updates == 1 and "too large for what came before" in caplog.text
    assert_same(snapshot(clean, its), snapshot(disturbed, other))


def test_gradients_that_begin_huge_and_become_ordinary_train_ordinarily(on_a_device):
    parameters, optimizer = build(weight_decay=0.0)
    train(parameters, optimizer, range(3), scale=1e25)
    train(parameters, optimizer, range(3, 30))
    assert optimizer.skipped_updates == 0
    assert all(optimizer.state[p]["gradient_scale"] == 1.0 and p.isfinite().all() for p in parameters.values())
    before = snapshot(parameters, optimizer)
    train(parameters, optimizer, range(30, 31))
    assert all((p - before[kind][0]).abs().max() > 1e-4 for kind, p in parameters.items())


# When the host looks first


def test_the_host_looks_first_while_an_expert_or_a_part_has_no_basis(on_a_device):
    parameters, optimizer = build(kinds=("stack", "fused"))
    for t in range(1, 9):
        set_gradients(parameters, t)
        parameters["stack"].grad[1] *= t >= 3
        parameters["fused"].grad[6:] *= t >= 5
        optimizer.step()
        assert (optimizer._unread is not None) == (t > 5)
    assert optimizer.state[parameters["fused"]]["v.cold"] == []


def test_a_parameter_that_joins_late_is_looked_at_once(on_a_device):
    parameters, optimizer = build(kinds=("matrix", "vector"))
    for t in range(6):
        set_gradients(parameters, t)
        if t < 3:
            parameters["vector"].grad = None
        optimizer.step()
        assert (optimizer._unread is None) == (t in (0, 3))
    assert optimizer.state[parameters["vector"]]["step"] == 3


def test_parameters_that_skip_an_update_keep_their_count_when_it_was_bad(on_a_device):
    parameters, optimizer = build(kinds=("matrix", "vector"))
    train(parameters, optimizer, range(3))
    set_gradients(parameters, 3, math.nan)
    parameters["vector"].grad = None
    optimizer.step()
    assert optimizer.skipped_updates == 1
    assert [optimizer.state[p]["step"] for p in parameters.values()] == [3, 3]


def test_zero_gradients_are_ordinary(on_a_device):
    parameters, optimizer = build(kinds=("matrix", "vector"))
    train(parameters, optimizer, range(3))
    before = snapshot(parameters, optimizer)
    for p in parameters.values():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert optimizer.skipped_updates == 0
    for kind, p in parameters.items():
        assert optimizer.state[p]["step"] == 4 and not torch.equal(p, before[kind][0])  # momentum moves it
