"""The simulator's remedies for late gradients, against numbers worked out by hand, and options that do not go together."""

import math

import pytest
import torch
from prescribed_stages import Prescribed, Square, microbatch, movement, prescribed, sgd, squares, train

from ds_basisrot.pipeline.simulator import PipelineSimulator

# -- learning rates ------------------------------------------------------------------------------------------------------------------------


def test_the_learning_rate_of_late_stages_rises_to_the_set_one():
    modules, simulator = prescribed(5, lr_correction_updates=4)
    for divided in ([4, 3, 2, 1, 1], [4**0.75, 3**0.75, 2**0.75, 1, 1], [2, 3**0.5, 2**0.5, 1, 1], [2**0.5, 3**0.25, 2**0.25, 1, 1]):
        moved = movement(modules)
        train(simulator, microbatch([1] * 5))
        assert moved() == pytest.approx([1 / d for d in divided])
        assert [o.param_groups[0]["lr"] for o in simulator.optimizers] == [1.0] * 5
    for _ in range(2):
        moved = movement(modules)
        train(simulator, microbatch([1] * 5))
        assert moved() == pytest.approx([1] * 5)


def test_the_correction_follows_the_staleness_in_updates_and_the_scheduler():
    modules = [Prescribed(k) for k in range(4)]
    optimizers = sgd(modules)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda u: 0.5**u) for o in optimizers]
    simulator = PipelineSimulator(
        modules, lambda out, _: out[2], optimizers, accumulation=2, lr_correction_updates=2, lr_schedulers=schedulers
    )
    moved = movement(modules)
    train(simulator, *[microbatch([1] * 4)] * 2)
    assert moved() == pytest.approx([1 / 1.5, 1, 1, 1])  # 3, 2, 1 and 0 microbatches are 1.5, 1, 0.5 and 0 updates
    simulator.set_accumulation(1)
    moved = movement(modules)
    train(simulator, microbatch([1] * 4))
    assert moved() == pytest.approx([0.5 / 3**0.5, 0.5 / 2**0.5, 0.5, 0.5])
    assert optimizers[0].param_groups[0]["lr"] == 0.25


# -- delay compensation --------------------------------------------------------------------------------------------------------------------


def test_gradients_are_compensated_for_what_the_weights_moved_since():
    modules, simulator = squares([2, 2], delay_compensation=0.5)
    expected = [2 - 0.25 * 2]  # forwarded with 2, which is the newest
    expected += [1.5 - 0.25 * (2 + 0.5 * 2**2 * (1.5 - 2))]  # forwarded with 2, and 1.5 is the newest
    expected += [1.25 - 0.25 * (1.5 + 0.5 * 1.5**2 * (1.25 - 1.5))]
    fresh = [2 * 0.75**u for u in range(1, 4)]
    for late, on_time in zip(expected, fresh):
        train(simulator, (torch.zeros(()), None))
        assert [m.w.item() for m in modules] == [late, on_time]
    simulator.cut()
    train(simulator, (torch.zeros(()), None))
    assert modules[0].w.item() == pytest.approx(0.75 * expected[-1])  # forwarded again with the newest


def test_each_microbatch_is_compensated_by_itself():
    modules, simulator = squares([2, 2], delay_compensation=0.5, accumulation=2)
    for expected in (2 - 0.25 * (1 + 1), 1.5 - 0.25 * ((1 + 0.5 * 2 * 1**2 * (1.5 - 2)) + 0.75)):
        train(simulator, *[(torch.zeros(()), None)] * 2)
        assert modules[0].w.item() == expected


def test_compensation_is_computed_in_float32_and_rounded_to_the_gradient_s_precision():
    modules = [Square(33 / 32).bfloat16(), Square(1).bfloat16()]
    simulator = PipelineSimulator(modules, lambda out, _: out, sgd(modules, 1 / 8), delay_compensation=0.7)
    for _ in range(2):
        train(simulator, (torch.zeros((), dtype=torch.bfloat16), None))
    # Forwarded with 33/32, the newest is 231/256: 33/32 - 0.7 * (33/32)**2 * 33/256 = 239.4 / 256. In bfloat16 throughout it is 240 / 256.
    assert modules[0].w.grad.item() == 239 / 256 and modules[0].w.grad.dtype == torch.bfloat16


# -- weight prediction ---------------------------------------------------------------------------------------------------------------------


def adam_by_hand(w, gradients_at, updates, version_of, ahead, lr=0.1, betas=(0.9, 0.99), eps=1e-8):
    """Weights after each update of AdamW without decay, whose gradient in update u is the mean of the weights that it was forwarded on."""
    b1, b2 = betas
    m = v = 0.0
    weights, forwarded = [w], [w]
    for u in range(updates):
        microbatches = gradients_at(u)
        g = sum(forwarded[version_of(i)] for i in microbatches) / len(microbatches)
        t = u + 1
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        w -= lr * (m / (1 - b1**t)) / (math.sqrt(v / (1 - b2**t)) + eps)
        weights.append(w)
        steps = [lr * (b1**s * m / (1 - b1 ** (t + s))) / (math.sqrt(v / (1 - b2 ** (t + s))) + eps) for s in range(1, ahead + 1)]
        forwarded.append(w - sum(steps))
    return weights[1:]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_late_stages_are_forwarded_on_weights_of_as_many_of_adam_s_steps_ahead_as_they_are_late(accumulation):
    start = [2.0, 3.0, 4.0]
    modules = [Square(w) for w in start]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, betas=(0.9, 0.99), weight_decay=0.0) for m in modules]
    simulator = PipelineSimulator(modules, lambda out, _: out, optimizers, accumulation=accumulation, weight_prediction=True)
    seen = []
    for _ in range(9):
        train(simulator, *[(torch.zeros(()), None)] * accumulation)
        seen.append([m.w.item() for m in modules])
    for k, w in enumerate(start):
        tau = 2 - k
        expected = adam_by_hand(
            w,
            lambda u: range(u * accumulation, (u + 1) * accumulation),
            9,
            lambda m, tau=tau: max(0, m - tau) // accumulation,
            math.ceil(tau / accumulation),
        )
        assert [each[k] for each in seen] == pytest.approx(expected, abs=1e-5)


def adam_ahead(optimizer, p, lr, steps):
    """A weight after some more of Adam's updates without new gradients, from the optimizer's present state."""
    state, (b1, b2) = optimizer.state[p], optimizer.param_groups[0]["betas"]
    t, m, v = (state[key].item() for key in ("step", "exp_avg", "exp_avg_sq"))
    return p.item() - sum(lr * b1**s * m / (1 - b1 ** (t + s)) / (math.sqrt(v / (1 - b2 ** (t + s))) + 1e-8) for s in range(1, steps + 1))


def test_prediction_takes_the_scheduled_rate_and_the_present_accumulation_and_compensation_its_weights():
    modules = [Square(w) for w in (2, 3, 4)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in modules]
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda u: 0.9**u) for o in optimizers]
    simulator = PipelineSimulator(
        modules, lambda out, _: out, optimizers,
        weight_prediction=True, delay_compensation=0.5, lr_correction_updates=100, lr_schedulers=schedulers,
    )  # fmt: skip
    ahead = {1: [2, 1, 0], 2: [1, 1, 0]}
    for update, accumulation in enumerate((1, 1, 1, 2, 2)):
        if accumulation != simulator.accumulation:
            simulator.set_accumulation(accumulation)
        else:
            simulator.cut()  # so that the first microbatch sees the newest version
        now, rate = [m.w.item() for m in modules], 0.1 * 0.9**update
        steps = ahead[accumulation] if update else [0, 0, 0]  # nothing is predicted without a state
        then = [adam_ahead(o, m.w, rate, n) if n else m.w.item() for o, m, n in zip(optimizers, modules, steps)]
        train(simulator, *[(torch.zeros(()), None)] * accumulation)
        for k, module in enumerate(modules):
            assert module.seen[-accumulation] == pytest.approx(then[k], abs=1e-6)
            g = [w / accumulation for w in module.seen[-accumulation:]]
            moved = [now[k] - w for w in module.seen[-accumulation:]]
            expected = sum(each + 0.5 * accumulation * each**2 * change for each, change in zip(g, moved))
            assert module.w.grad.item() == pytest.approx(expected, abs=1e-6)


# -- what does not go together -------------------------------------------------------------------------------------------------------------

ENDS = [((0, "w"), (2, "w"))]

WRONG = [
    ({"clip_scope": "global"}, "clip_scope: must be one of lagged_global, stage, got 'global'"),
    ({"lr_correction_updates": -1}, "lr_correction_updates: must be >= 0, got -1"),
    ({"delay_compensation": -0.1}, "delay_compensation: must be >= 0, got -0.1"),
    ({"delay_compensation": 0.1, "weight_stashing": False}, "delay_compensation: needs weight_stashing"),
    ({"weight_prediction": True, "weight_stashing": False}, "weight_prediction: needs weight_stashing"),
    ({"tied": ENDS, "lr_correction_updates": 2}, "lr_correction_updates: tied weights need one learning rate"),
    ({"tied": [((0, "x"), (2, "w"))]}, "tied: stage 0 has no trainable parameter 'x'"),
    ({"tied": [((0, "w"), (3, "w"))]}, "tied: stage 3 has no trainable parameter 'w'"),
    ({"tied": [((2, "w"), (0, "w"))]}, "tied: give the earlier stage first"),
    ({"tied": [((1, "w"), (1, "b"))]}, "tied: give the earlier stage first and two different stages"),
    ({"tied": [((0, "w"), (1, "w")), ((1, "w"), (2, "w"))]}, "tied: a parameter may be in one pair"),
]


@pytest.mark.parametrize("options, message", WRONG)
def test_what_does_not_fit_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        prescribed(3, **options)


def test_tied_copies_must_be_two_and_equal():
    modules = [Square(1), Square(2)]
    with pytest.raises(ValueError, match="tied: the two copies must be equal"):
        PipelineSimulator(modules, lambda out, _: out, sgd(modules), tied=[((0, "w"), (1, "w"))])
    modules[1].w = modules[0].w
    with pytest.raises(ValueError, match="tied: each stage needs a copy of its own"):
        PipelineSimulator(modules, lambda out, _: out, sgd(modules), tied=[((0, "w"), (1, "w"))])
