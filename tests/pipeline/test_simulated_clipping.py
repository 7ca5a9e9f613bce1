"""Whose norms the simulator clips by, and what it does with tied weights, against numbers worked out by hand."""

import math

import pytest
import torch
from prescribed_stages import Prescribed, microbatch, movement, prescribed, sgd, train
from torch import nn

from ds_basisrot.pipeline.simulator import PipelineSimulator

# -- clipping ------------------------------------------------------------------------------------------------------------------------------

# At 3 stages stage 0 is 2, stage 1 is 1 microbatch ahead in its forwards when it updates. Norms from behind are one update old.
# From before, with one microbatch per update: stage 1 updates after it forwarded microbatch u + 1, which stage 0, itself 2 ahead, forwarded
# when it had made u - 1 updates, so that it sent the norm of update u - 2. With two per update, it was microbatch 2u + 2, which stage 0
# forwarded when it had trained 2u, after update u - 1.
LAGS = {
    1: {(0, 1): 1, (0, 2): 1, (1, 2): 1, (1, 0): 2, (2, 1): 2, (2, 0): 3},
    2: {(0, 1): 1, (0, 2): 1, (1, 2): 1, (1, 0): 1, (2, 1): 1, (2, 0): 2},
    3: {(0, 1): 1, (0, 2): 1, (1, 2): 1, (1, 0): 1, (2, 1): 1, (2, 0): 1},
}


def norm_of(stage, update):
    """A norm that no other stage and update has."""
    return 2.0 + stage + 10 * update % 7 + update / 8


def clipped(own, others, max_norm=1.0):
    return own * max_norm / math.sqrt(own**2 + sum(n**2 for n in others))


@pytest.mark.parametrize("accumulation", LAGS)
def test_a_stage_clips_by_the_norms_that_have_arrived(accumulation):
    modules, simulator = prescribed(3, accumulation=accumulation, max_grad_norm=1.0)
    for u in range(8):
        moved = movement(modules)
        train(simulator, *[microbatch([norm_of(k, u) for k in range(3)])] * accumulation)
        for k, applied in enumerate(moved()):
            known = [u - LAGS[accumulation][k, j] for j in range(3) if j != k]
            names = [j for j in range(3) if j != k]
            others = [norm_of(j, v) for j, v in zip(names, known) if v >= 0]
            assert applied == pytest.approx(clipped(norm_of(k, u), others), rel=2e-6)


def test_the_first_update_is_clipped_by_the_own_norm_alone():
    modules, simulator = prescribed(2, max_grad_norm=1.0)
    moved = movement(modules)
    train(simulator, microbatch([4, 0.5]))
    assert moved() == pytest.approx([1, 0.5])
    moved = movement(modules)
    train(simulator, microbatch([3, 3]))  # stage 0 knows stage 1's 0.5, stage 1 nothing yet of stage 0
    assert moved() == pytest.approx([3 / math.hypot(3, 0.5), 1])
    moved = movement(modules)
    train(simulator, microbatch([0, 3]))  # stage 1 knows stage 0's 4 of two updates ago
    assert moved() == pytest.approx([0, 3 / 5])


def test_after_a_cut_the_norms_from_before_are_those_of_the_last_update_until_the_lag_is_back():
    modules, simulator = prescribed(3, max_grad_norm=1.0)
    heard = {3: {(1, 0): 2, (2, 1): 2, (2, 0): 2}, 4: {(1, 0): 2, (2, 1): 2, (2, 0): 2}, 5: {(1, 0): 3, (2, 1): 3, (2, 0): 2}}
    heard[6] = {(1, 0): 4, (2, 1): 4, (2, 0): 3}
    for u in range(7):
        moved = movement(modules)
        train(simulator, microbatch([norm_of(k, u) for k in range(3)]))
        if u in heard:
            for k, applied in enumerate(moved()):
                others = [norm_of(j, heard[u][k, j] if j < k else u - 1) for j in range(3) if j != k]
                assert applied == pytest.approx(clipped(norm_of(k, u), others), rel=2e-6)
        if u == 2:
            simulator.cut()


def test_with_scope_stage_other_stages_do_not_count():
    modules, simulator = prescribed(3, max_grad_norm=2.0, clip_scope="stage")
    for c, applied in (([4, 8, 1], [2, 2, 1]), ([1, 4, 16], [1, 2, 2])):
        moved = movement(modules)
        train(simulator, microbatch(c))
        assert moved() == pytest.approx(applied, rel=1e-5)


def test_a_norm_is_over_all_gradients_of_a_stage_and_of_the_mean_over_replicas():
    modules, simulator = prescribed(1, max_grad_norm=1.0, accumulation=2)
    moved, moved_b = movement(modules), movement(modules, "b")
    simulator.train_batch([[microbatch([2], [0]), microbatch([4], [2])], [microbatch([3], [5]), microbatch([3], [9])]])
    assert (*moved(), *moved_b()) == pytest.approx((3 / 5, 4 / 5))


def test_a_norm_that_is_not_finite_does_not_travel():
    modules, simulator = prescribed(3, max_grad_norm=1.0)
    for c in ([3, 4, 3], [3, 12, 3]):
        train(simulator, microbatch(c))
    train(simulator, microbatch([3, math.inf, 3]))
    assert math.isnan(modules[1].w.item())  # inf times the factor 0, which the optimizer did not refuse
    moved = movement(modules)
    train(simulator, microbatch([3, math.nan, 3]))
    # Stage 0 still has 12 of stage 1's update 1, and 3 of stage 2's last. Stage 2 has 12 of update 1 too, and 3 of stage 0's update 0.
    assert [moved()[k] for k in (0, 2)] == pytest.approx([3 / math.sqrt(9 + 144 + 9)] * 2)
    moved = movement(modules)
    train(simulator, microbatch([3, 1, 3]))
    assert [moved()[k] for k in (0, 2)] == pytest.approx([3 / math.sqrt(9 + 144 + 9)] * 2)  # of updates 3 and 2: neither was finite


# -- tied weights --------------------------------------------------------------------------------------------------------------------------

ENDS = [((0, "w"), (2, "w"))]


def test_both_copies_apply_the_sum_of_both_gradients_after_the_way_between_them():
    modules, simulator = prescribed(3, tied=ENDS)
    applied = []
    for u in range(5):
        moved = movement(modules)
        train(simulator, microbatch([2**u, 7, 100 * 2**u]))
        applied.append(moved())
    assert applied == [[0, 7, 0], [0, 7, 0], [101, 7, 101], [202, 7, 202], [404, 7, 404]]


def test_a_tied_weight_has_a_zero_gradient_until_the_first_arrives():
    modules, simulator = prescribed(3, tied=ENDS)
    train(simulator, microbatch([5, 5, 5]))
    assert [modules[k].w.grad.item() for k in (0, 2)] == [0, 0]


@pytest.mark.parametrize("stages, accumulation, delay", [(2, 1, 1), (3, 1, 2), (3, 2, 1), (4, 2, 2), (4, 4, 1)])
def test_the_delay_is_the_way_in_updates_rounded_up(stages, accumulation, delay):
    modules, simulator = prescribed(stages, accumulation=accumulation, tied=[((0, "w"), (stages - 1, "w"))])
    for u in range(5):
        moved = movement(modules)
        train(simulator, *[microbatch([2**u] * stages)] * accumulation)
        assert moved()[0] == moved()[-1] == (2 * 2 ** (u - delay) if u >= delay else 0)


def test_what_is_under_way_survives_cuts_and_is_applied_once():
    modules, simulator = prescribed(3, tied=ENDS)
    applied = []
    for u, accumulation in enumerate((1, 1, 1, 2, 2, 1, 1, 1)):
        if accumulation != simulator.accumulation:
            simulator.set_accumulation(accumulation)
        moved = movement(modules)
        train(simulator, *[microbatch([10**u, 0, 0])] * accumulation)
        applied.append(moved()[2])
    # The delay is 2 updates, from update 3 on 1 (what is due of updates 1 and 2 comes at once), from update 5 on 2 again.
    assert applied == [0, 0, 1, 110, 1000, 0, 10**4, 10**5]


def test_a_tied_gradient_is_clipped_by_the_smaller_factor_of_the_update_it_comes_from():
    modules, simulator = prescribed(3, tied=ENDS, max_grad_norm=3.0, clip_scope="stage")
    sums, own = [6, 2, 10, 4, 8, 0, 0], [0, 12, 0, 0, 0, 0, 0]
    applied = []
    for total, b in zip(sums, own):
        moved = movement(modules)
        train(simulator, microbatch([total - 1, 0, 1], [0, 0, b]))
        applied.append(moved()[0])
        assert moved()[0] == moved()[2]
    # Stage 0's norms are those of what it applies, before clipping: 0, 0, 6, 2, 10, 4, 8. Stage 2's are of its own b: 0, 12, 0, ...
    factors = [1, 3 / 12, 3 / 6, 1, 3 / 10]
    assert applied == pytest.approx([0, 0, *(s * f for s, f in zip(sums, factors))], rel=1e-5)


def test_the_earlier_stage_s_norm_counts_the_tied_gradient_once_and_the_other_weights_follow():
    modules, simulator = prescribed(2, tied=[((0, "w"), (1, "w"))], max_grad_norm=1.0)
    train(simulator, microbatch([1, 2], [0, 0]))
    moved = movement(modules, "b")
    train(simulator, microbatch([0, 0], [4, 4]))  # stage 0: hypot(1 + 2, 4) = 5. Stage 1: 4, and it knows nothing of stage 0 yet.
    assert moved() == pytest.approx([4 / 5, 1])


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    "options", [{}, {"max_grad_norm": 0.02}, {"delay_compensation": 0.5, "max_grad_norm": 0.05, "clip_scope": "stage"}]
)
def test_tied_copies_stay_bitwise_equal(accumulation, options):
    torch.manual_seed(0)
    modules = [nn.Embedding(7, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 7, bias=False))]
    modules[2][1].weight.data.copy_(modules[0].weight.data)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.02, weight_decay=0.1) for m in modules]
    tied = [((0, "weight"), (2, "1.weight"))]
    simulator = PipelineSimulator(modules, nn.functional.cross_entropy, optimizers, accumulation=accumulation, tied=tied, **options)
    losses = []
    for update in range(40):
        losses.append(simulator.train_batch([[(torch.arange(7), (torch.arange(7) * 3 + 1) % 7)] * accumulation] * 2))
        if update == 3:
            simulator.cut()
        assert torch.equal(modules[0].weight, modules[2][1].weight)
    assert losses[-1] < 0.7 * losses[0]


def test_tied_gradients_add_up_in_float32():
    modules = [Prescribed(k, torch.bfloat16) for k in range(3)]
    simulator = PipelineSimulator(modules, lambda out, _: out[2], sgd(modules), tied=ENDS)
    for c in ([256, 0, 1], [0, 0, 1]):
        train(simulator, microbatch(c, dtype=torch.bfloat16))
    simulator.set_accumulation(2)  # so that both are due in the next update
    train(simulator, *[microbatch([0, 0, 0], dtype=torch.bfloat16)] * 2)
    assert [modules[k].w.item() for k in (0, 2)] == [-258] * 2  # in bfloat16 256 + 1 is 256


class Copies:
    """SGD on float32 copies of bfloat16 parameters, seen from the simulator."""

    def __init__(self, module):
        self.parameters = list(module.parameters())
        self.copies = [nn.Parameter(p.detach().float()) for p in self.parameters]
        self.optimizer = torch.optim.SGD(self.copies, lr=1.0)
        self.param_groups = self.optimizer.param_groups

    def take_gradients(self):
        for p, copy in zip(self.parameters, self.copies):
            copy.grad = p.grad.float()
        return self.copies

    def step(self):
        self.optimizer.step()
        for p, copy in zip(self.parameters, self.copies):
            p.data.copy_(copy.data)


def test_an_optimizer_of_float32_copies_has_its_gradients_clipped_and_tied_in_float32():
    modules = [Prescribed(k, torch.bfloat16) for k in range(2)]
    optimizers = [Copies(m) for m in modules]
    tied = [((0, "w"), (1, "w"))]
    simulator = PipelineSimulator(modules, lambda out, _: out[2], optimizers, tied=tied, max_grad_norm=300.0, clip_scope="stage")
    for _ in range(2):
        train(simulator, microbatch([256, 1], [0, 400], torch.bfloat16))
    assert 256 + torch.ones((), dtype=torch.bfloat16) == 256  # what a sum in bfloat16 would be
    assert [o.copies[0].item() for o in optimizers] == pytest.approx([-257 * 300 / 400] * 2)
    assert optimizers[1].copies[1].item() == pytest.approx(-600)
    assert modules[0].w.dtype == torch.bfloat16 and modules[0].w.item() == pytest.approx(-257 * 300 / 400, rel=2**-8)
