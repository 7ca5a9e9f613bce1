"""The plan for ranks: sums are the model's, what is cut moves, and little else."""

import inspect

import pytest
import torch
from torch import nn

from ds_basisrot import BasisRotation, param_groups
from ds_basisrot.cli.cost_plan import cost_plan
from ds_basisrot.cli.rank_plan import rank_plan
from ds_basisrot.sharding.layouts import LAYOUTS


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


class Model(nn.Module):
    def __init__(self, width=16, layers=4, vocabulary=50):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)


def options(**given):
    defaults = {name: p.default for name, p in inspect.signature(BasisRotation).parameters.items() if p.default is not p.empty}
    return {**defaults, **given}


@pytest.mark.parametrize("stage", LAYOUTS)
@pytest.mark.parametrize("ranks", (1, 2, 4, 7))
def test_ranks_together_have_what_the_whole_model_has(stage, ranks):
    model = Model()
    whole, plan = cost_plan(model, options())["totals"], rank_plan(model, options(), stage, ranks)
    assert sum(plan["by_rank"]["rotation_state_bytes"]) == whole["rotated_state_bytes"]
    assert sum(plan["by_rank"]["state_bytes"]) == whole["state_bytes"]
    assert sum(plan["by_rank"]["update_madds"]) == pytest.approx(whole["update_madds"] + whole["mean_refresh_madds"], rel=1e-4)
    assert plan["rotation_state_bytes"]["mean"] == whole["rotated_state_bytes"] / ranks
    for key in ("rotation_state_bytes", "state_bytes"):
        assert plan[key]["most"] == max(plan["by_rank"][key])
    assert sum(plan["by_rank"]["sent_gradient_numbers"]) == sum(plan["by_rank"]["received_gradient_numbers"])


@pytest.mark.parametrize("state_dtype", ("float32", "bfloat16"))
def test_one_rank_keeps_what_an_optimizer_of_the_whole_model_keeps(state_dtype):
    model = Model()
    optimizer = BasisRotation(param_groups(model), state_dtype=state_dtype)
    for p in model.parameters():
        p.grad = torch.randn(p.shape)
    optimizer.step()
    rotated = [state for state in optimizer.state.values() if "left_basis" in state or any(key.endswith(".left_basis") for key in state)]
    kept = sum(each.nbytes for state in rotated for each in state.values() if torch.is_tensor(each))
    (planned,) = rank_plan(model, options(state_dtype=state_dtype), 3, 1)["by_rank"]["rotation_state_bytes"]
    assert kept == planned


def test_without_zero_every_rank_keeps_everything_and_nothing_moves():
    plan, whole = rank_plan(Model(), options(), 0, 3), cost_plan(Model(), options())["totals"]
    assert plan["by_rank"]["state_bytes"] == [whole["state_bytes"]] * 3
    assert plan["exchanged_bytes"] == {"mean": 0, "most": 0, "imbalance": 1}
    assert (plan["matrices"]["moving"], plan["messages"], plan["ranks"]) == (0, 0, 3)
    assert plan["update_madds"]["imbalance"] == plan["rotation_state_bytes"]["imbalance"] == 1


@pytest.mark.parametrize("stage", LAYOUTS)
def test_alone_a_rank_exchanges_nothing(stage):
    plan = rank_plan(Model(), options(), stage, 1)
    assert (plan["exchanged_bytes"]["most"], plan["matrices"]["moving"], plan["messages"]) == (0, 0, 0)


def test_with_zero_3_everything_but_the_owners_parts_moves():
    model, ranks = Model(), 4
    plan = rank_plan(model, options(), 3, ranks)
    rotated = sum(p.numel() for name, p in model.named_parameters() if name.startswith("layers") and p.ndim == 2)
    assert sum(plan["by_rank"]["sent_gradient_numbers"]) == rotated * (ranks - 1) // ranks
    assert plan["exchanged_bytes"]["mean"] == 4 * 2 * rotated * (ranks - 1) / ranks**2
    assert plan["matrices"] == {"all": 16, "moving": 16, "cut": 16}


@pytest.mark.parametrize("ranks", (2, 4))
@pytest.mark.parametrize("stage", (1, 2))
def test_with_zero_1_and_2_only_matrices_at_a_border_move(stage, ranks):
    plan = rank_plan(Model(layers=8, vocabulary=1), options(), stage, ranks)
    assert plan["matrices"]["moving"] == plan["matrices"]["cut"] <= ranks - 1
    assert plan["messages"] <= 1


def test_without_stagger_the_work_of_many_ranks_is_better_balanced():
    staggered, at_once = (rank_plan(Model(), options(stagger=stagger), 3, 8)["update_madds"] for stagger in (True, False))
    assert staggered["imbalance_at_once"] == at_once["imbalance"] == at_once["imbalance_at_once"]
    assert 1 <= at_once["imbalance"] < 0.7 * staggered["imbalance"]


def test_frozen_parameters_are_no_part_of_the_buffers():
    model = Model()
    model.embedding.weight.requires_grad_(False)
    plan = rank_plan(model, options(), 1, 2)
    whole = cost_plan(model, options())["totals"]
    assert sum(plan["by_rank"]["state_bytes"]) == whole["state_bytes"]
    assert plan["matrices"]["all"] == 16
