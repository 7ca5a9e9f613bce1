"""ShardedBasisRotation in one process: over flat buffers it does what BasisRotation does over whole parameters, bit for bit."""

import logging
import math

import pytest
import torch
from torch import nn

from ds_basisrot import BasisRotation
from ds_basisrot.optim.loading import loaded_state
from ds_basisrot.sharding import states
from ds_basisrot.sharding.buffers import Flat
from ds_basisrot.sharding.optimizer import ShardedBasisRotation
from ds_basisrot.sharding.units import Piece

SHAPES = {"up.weight": (12, 5), "up.bias": (12,), "experts": (3, 4, 6), "down.weight": (5, 12), "norm": (7,)}
ROTATE = {"up.weight": True, "up.bias": False, "experts": {"kind": "stack"}, "down.weight": {"rows": [2, 3]}, "norm": False}
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1, "refresh_period": 3}


def groups(make, names=tuple(SHAPES)):
    return [{"params": [(name, make(SHAPES[name])) for name in names], "rotate": [ROTATE[name] for name in names]}]


def weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def gradients(update):
    return {name: g * (update + 1) for name, g in weights(1000 + update).items()}


class Whole:
    def __init__(self, **options):
        self.parameters = {name: nn.Parameter(w) for name, w in weights().items()}
        named = iter(self.parameters.values())
        self.optimizer = BasisRotation(groups(lambda shape: next(named)), **{**OPTIONS, **options})
        self.optimizer.layout_independent = True

    def update(self, gradients):
        for name, p in self.parameters.items():
            p.grad = gradients[name].clone()
        self.optimizer.step()

    def weights(self):
        return {name: p.detach() for name, p in self.parameters.items()}


class Sharded:
    """The same in two buffers with holes, as alignment makes them."""

    BUFFERS = (("up.weight", "up.bias", "experts"), ("down.weight", "norm"))
    HOLE = 3

    def __init__(self, bound=True, **options):
        blueprint = BasisRotation(groups(lambda shape: nn.Parameter(torch.empty(shape, device="meta"))), **{**OPTIONS, **options})
        self.optimizer = ShardedBasisRotation(blueprint, [[nn.Parameter(w) for w in weights().values()]])
        self.flats, start = [], weights()
        for names in self.BUFFERS:
            place, parameters, buffer = self.HOLE, [], torch.zeros(sum(start[n].numel() + self.HOLE for n in names) + self.HOLE)
            for name in names:
                numel = start[name].numel()
                parameters.append((name, (Piece(0, place, 0, numel),)))
                buffer[place : place + numel] = start[name].flatten()
                place += numel + self.HOLE
            self.flats.append(Flat(buffer.requires_grad_(), None, tuple(parameters)))
        self.optimizer.param_groups[0]["params"] = [flat.buffer for flat in self.flats]
        if bound:
            self.optimizer.bind(self.flats)

    def update(self, gradients):
        for flat in self.flats:
            flat.buffer.grad = torch.zeros_like(flat.buffer)
            for name, (piece,) in flat.parameters:
                piece.of(flat.buffer.grad).copy_(gradients[name].flatten())
        self.optimizer.step()

    def weights(self):
        return {name: piece.of(f.buffer.detach()).view(SHAPES[name]) for f in self.flats for name, (piece,) in f.parameters}


def assert_same(one, other, *, but_for=()):
    for name, weight in one.weights().items():
        if name in but_for:  # a stack is rotated as a batch whole, and matrix by matrix when it is sharded
            torch.testing.assert_close(other.weights()[name], weight, rtol=0, atol=1e-5)
        else:
            assert torch.equal(other.weights()[name], weight), name


@pytest.mark.parametrize(
    "options", [{}, {"geometry": "unilateral"}, {"source": "first_order"}, {"state_dtype": "bfloat16"}, {"stagger": False}], ids=str
)
def test_flat_buffers_train_bitwise_as_whole_parameters(options):
    whole, sharded = Whole(**options), Sharded(**options)
    for update in range(12):
        whole.update(gradients(update))
        sharded.update(gradients(update))
    assert_same(whole, sharded, but_for=["experts"])
    assert sharded.optimizer.state_bytes() > 0
    assert all(torch.equal(flat.buffer[: Sharded.HOLE], torch.zeros(Sharded.HOLE)) for flat in sharded.flats)


def test_zeros_before_the_first_gradient_change_nothing_and_do_not_decay():
    whole, sharded = Whole(), Sharded()
    for update in range(6):
        given = gradients(update)
        for name in ("up.weight", "norm") if update < 3 else ():
            given[name].zero_()
        whole.update(given)
        sharded.update(given)
        if update == 2:
            assert torch.equal(sharded.weights()["up.weight"], weights()["up.weight"])
    assert_same(whole, sharded, but_for=["experts"])


@pytest.mark.parametrize("name", ["up.weight", "norm", "experts"])
@pytest.mark.parametrize("value", [math.inf, math.nan, 1e30])
def test_an_unusable_gradient_skips_the_update_and_leaves_the_state(name, value, caplog):
    sharded = Sharded()
    for update in range(4):
        sharded.update(gradients(update))
    before = {n: w.clone() for n, w in sharded.weights().items()}
    kept = {n: {k: v.clone() if torch.is_tensor(v) else v for k, v in s.items()} for n, s in states.named_states(sharded.optimizer).items()}
    bad = gradients(4)
    bad[name].view(-1)[-1] = value
    with caplog.at_level(logging.WARNING):
        sharded.update(bad)
    assert sharded.optimizer.skipped_updates == 1 and f"gradient of {name}" in caplog.text
    assert all(torch.equal(sharded.weights()[n], w) for n, w in before.items())
    for n, state in states.named_states(sharded.optimizer).items():
        assert all(torch.equal(v, kept[n][k]) if torch.is_tensor(v) else v == kept[n][k] for k, v in state.items())


def test_buffers_that_nobody_explained_are_refused_but_for_zeros():
    sharded = Sharded(bound=False)
    sharded.update({name: torch.zeros(shape) for name, shape in SHAPES.items()})  # wrappers make such a step when they are built
    with pytest.raises(RuntimeError, match="not told what they hold"):
        sharded.update(gradients(0))


def test_a_buffer_of_another_kind_is_refused():
    sharded = Sharded(bound=False)
    with pytest.raises(ValueError, match="float32"):
        sharded.optimizer.bind([Flat(torch.zeros(4, dtype=torch.bfloat16), None, ())])
    with pytest.raises(ValueError, match="nobody is in a flat buffer"):
        sharded.optimizer.bind([Flat(torch.zeros(4), None, [("nobody", [Piece(0, 0, 0, 4)])])])


def test_a_learning_rate_that_changes_is_followed():
    whole, sharded = Whole(), Sharded()
    for update in range(5):
        for each in (whole, sharded):
            each.optimizer.param_groups[0]["lr"] = 1e-2 / (1 + update)
            each.update(gradients(update))
    assert_same(whole, sharded, but_for=["experts"])


def test_refreshes_shared_by_stages_reach_the_owners():
    whole, sharded = Whole(refresh_allocation="stage_aware"), Sharded(refresh_allocation="stage_aware")
    for each in (whole, sharded):
        each.optimizer.share_refreshes([3.0, 0.0], [each.optimizer.refresh_cost()] * 2, 1)
    for update in range(12):
        whole.update(gradients(update))
        sharded.update(gradients(update))
    assert_same(whole, sharded, but_for=["experts"])


def test_states_are_restored_by_name():
    sharded, other = Sharded(), Sharded()
    for update in range(5):
        sharded.update(gradients(update))
    named, others = states.named_states(sharded.optimizer), states.flat_bookkeeping(sharded.optimizer)
    assert set(named) == {"up.weight", "down.weight", "experts[0]", "experts[1]", "experts[2]"} and set(others) == {"up.bias", "norm"}
    states.add_flat_states(sharded.optimizer)
    for flat, its in zip(other.flats, sharded.flats):
        other.optimizer.state[flat.buffer] = {
            key: value.clone() if torch.is_tensor(value) else value for key, value in sharded.optimizer.state[its.buffer].items()
        }
        flat.buffer.data.copy_(its.buffer.data)
    states.drop_flat_states(sharded.optimizer)
    states.restore(other.optimizer, named.get, set(named), others, states.layouts(sharded.optimizer))
    for update in range(5, 12):
        sharded.update(gradients(update))
        other.update(gradients(update))
    assert_same(sharded, other)
    assert not other.optimizer.state


def test_the_flat_states_are_adam_s():
    """The momentum is exact: with a fixed basis it is the average that Adam would have."""
    sharded = Sharded(refresh_period=100)
    momentum = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for update in range(5):
        sharded.update(gradients(update))
        for name, g in gradients(update).items():
            momentum[name].lerp_(g, 0.1)
    states.add_flat_states(sharded.optimizer)
    for flat in sharded.flats:
        state = sharded.optimizer.state[flat.buffer]
        assert state["step"] == 5 and (state["exp_avg_sq"] >= 0).all()
        for name, (piece,) in flat.parameters:
            torch.testing.assert_close(piece.of(state["exp_avg"]).view(SHAPES[name]), momentum[name], rtol=1e-4, atol=1e-4)


def test_states_of_adam_keep_their_momentum_and_get_bases_with_the_next_gradient():
    sharded, expected = Sharded(), {name: torch.randn(shape) for name, shape in SHAPES.items()}
    for flat in sharded.flats:
        state = {"step": 7, "exp_avg": torch.zeros_like(flat.buffer), "exp_avg_sq": torch.ones_like(flat.buffer)}
        for name, (piece,) in flat.parameters:
            piece.of(state["exp_avg"]).copy_(expected[name].flatten())
        sharded.optimizer.state[flat.buffer] = state
    assert states.restore_from_adam(sharded.optimizer, 0)
    sharded.update(gradients(0))
    states.add_flat_states(sharded.optimizer)
    for flat in sharded.flats:
        for name, (piece,) in flat.parameters:
            momentum = piece.of(sharded.optimizer.state[flat.buffer]["exp_avg"]).view(SHAPES[name])
            torch.testing.assert_close(momentum, expected[name].lerp(gradients(0)[name], 0.1), rtol=1e-3, atol=1e-4)


def test_a_saved_state_of_another_model_is_refused():
    whole = Whole()
    whole.update(gradients(0))
    p = whole.parameters["up.weight"]
    role, group = whole.optimizer._plan[p], whole.optimizer.param_groups[0]
    with pytest.raises(ValueError, match="another model"):
        loaded_state(p, role, group, {"step": 1, "exp_avg": torch.zeros(3, 3), "exp_avg_sq": torch.zeros(3, 3)})
