"""The real engine on real processes equals the one-process simulator: weights, and losses on every stage."""

import math

import pytest
import torch
from models import blocks
from simulate import largest_difference, simulate, warmup

MAX_DIFFERENCE = 1e-6

MATRIX = [
    {"name": f"{optimizer}-{gas}", "optimizer": optimizer, "gas": gas}
    for optimizer in ("AdamW", "NAdam", "BasisRotation")
    for gas in (1, 2, 4)
]
MORE = [
    {"name": "no-stashing", "optimizer": "BasisRotation", "stashing": False},
    {"name": "no-stashing-2", "optimizer": "AdamW", "stashing": False, "gas": 2},
    {"name": "clipped", "clip": 0.05},
    {"name": "scheduled", "scheduler": True, "optimizer": "BasisRotation"},
    {"name": "evaluated", "optimizer": "BasisRotation", "eval_after": [1, 2, 7]},
    {"name": "recomputed", "checkpoint_activations": 1},
    {"name": "tuples", "tuples": True, "gas": 2},
    {"name": "saved", "optimizer": "BasisRotation", "gas": 2, "save_after": 5},
]
ALLOCATED = [
    {"name": f"{allocation}-{gas}", "optimizer": "BasisRotation", "gas": gas, "config": {"optimizer.params.refresh_allocation": allocation}}
    for allocation, gas in (("stage_aware", 1), ("inverse", 1), ("stage_aware", 2))
]
RESUMED = {"name": "resumed", "optimizer": "BasisRotation", "gas": 2, "load": "saved"}
DROPOUT = [
    {"name": "dropout", "optimizer": "BasisRotation", "dropout": 0.3, "save_after": 5},
    {"name": "dropout-resumed", "optimizer": "BasisRotation", "dropout": 0.3, "load": "dropout"},
    {"name": "dropout-evaluated", "optimizer": "BasisRotation", "dropout": 0.3, "save_after": 5, "eval_after": [2, 3, 9]},
]
REPLICATED = [{**case, "name": "replicated-" + case["name"], "stages": 2} for case in (*MATRIX[1::3], *MORE, ALLOCATED[0])]
SEEDED = [
    {"name": "seeded", "dropout": 0.3, "seed_layers": True},
    {"name": "seeded-evaluated", "dropout": 0.3, "seed_layers": True, "eval_after": [2, 3, 9]},
]
ONE_STAGE = {"name": "one-stage", "stages": 1, "optimizer": "BasisRotation", "gas": 2}
AUTOCAST = [
    {"name": "autocast", "autocast": True},
    {"name": "outer-autocast", "outer_autocast": True},
    {"name": "outer-autocast-recomputed", "outer_autocast": True, "checkpoint_activations": 1},
]
OTHERS = [{"name": "changed-by-user", "user_changes": True}, {"name": "frozen-stage", "frozen": [2, 3, 4]}]
RELOADED = [
    {"name": "rolled-back", "optimizer": "SGD", "config": {"optimizer.params.lr": 0.0}, "save_after": 3, "reload_after": 6},
    {"name": "not-rolled-back", "optimizer": "SGD", "config": {"optimizer.params.lr": 0.0}, "save_after": 3},
]
OTHER_STAGES = {"name": "other-stages", "stages": 2, "optimizer": "BasisRotation", "load": "saved", "refused": True}
STAGE_FILES = [f"async_pipeline-stage_00{stage}-replica_000.safetensors" for stage in range(2)]
DAMAGES = [
    ("remove", STAGE_FILES[0], "is missing: copy the whole checkpoint"),
    ("remove", STAGE_FILES[1], "is missing: copy the whole checkpoint"),
    ("truncate", STAGE_FILES[1], "cannot be read"),
    ("flip", STAGE_FILES[0], "is not what was written (its SHA-256 differs)"),
    ("flip", STAGE_FILES[1], "is not what was written (its SHA-256 differs)"),
    ("dropout", STAGE_FILES[1], "is of another save than"),
]
DAMAGED = [
    {"name": f"damaged-{i}", "optimizer": "BasisRotation", "load": "saved", "damage": [how, name], "refused": True}
    for i, (how, name, _) in enumerate(DAMAGES)
]
SYNCHRONOUS = {"name": "synchronous", "schedule": "1f1b", "optimizer": "BasisRotation", "gas": 4}

JOBS = {
    2: [*MATRIX, *MORE, RESUMED, *DROPOUT, *SEEDED, ONE_STAGE, SYNCHRONOUS, *DAMAGED],
    4: [*MATRIX, *MORE, *ALLOCATED, RESUMED, *DROPOUT, *AUTOCAST, *OTHERS, *RELOADED, *REPLICATED, OTHER_STAGES],
}
COMPARED = [
    (n, case)
    for n in JOBS
    for case in JOBS[n]
    if case not in (RESUMED, OTHER_STAGES, SYNCHRONOUS, *DROPOUT, *SEEDED, *AUTOCAST, *OTHERS, *RELOADED, *DAMAGED)
]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("processes, case", COMPARED, ids=lambda value: value["name"] if isinstance(value, dict) else str(value))
def test_weights_and_losses(results, processes, case):
    ranks = results(processes, case["name"])
    stages = case.get("stages", processes)
    weights, losses = simulate({**case, "stages": stages, "replicas": processes // stages})
    assert all(r["asynchronous"] for r in ranks) and {r["stage"] for r in ranks} == set(range(stages))
    assert largest_difference(ranks, weights) <= MAX_DIFFERENCE
    for r in ranks:
        assert r["losses"] == pytest.approx(losses, abs=MAX_DIFFERENCE)
        assert r["global_steps"] == 12 and r["global_samples"] == 12 * case.get("gas", 1) * 4 * processes // stages
        assert r["trained"] == 12 * case.get("gas", 1)


@pytest.mark.parametrize("case", ALLOCATED, ids=lambda case: case["name"])
def test_refreshes_shared_by_staleness_are_bitwise_the_simulator_s(results, case):
    ranks = results(4, case["name"])
    weights, losses = simulate({**case, "stages": 4})
    assert largest_difference(ranks, weights) == 0.0 and not bitwise(ranks, results(4, f"BasisRotation-{case['gas']}"))


def bitwise(a, b):
    return all(torch.equal(x["weights"][name], y["weights"][name]) for x, y in zip(a, b) for name in x["weights"])


@pytest.mark.parametrize("processes", JOBS)
@pytest.mark.parametrize("saved, resumed, updates", [("saved", "resumed", 7), ("dropout", "dropout-resumed", 7)])
def test_a_resumed_run_is_bitwise_the_run_that_saved_and_went_on(results, processes, saved, resumed, updates):
    before, after = results(processes, saved), results(processes, resumed)
    assert bitwise(before, after)
    assert [r["losses"][-updates:] for r in before] == [r["losses"] for r in after]
    assert [(r["global_steps"], r["global_samples"], r["trained"]) for r in before] == [
        (r["global_steps"], r["global_samples"], r["trained"]) for r in after
    ]


def test_a_checkpoint_of_another_number_of_stages_is_refused(results):
    for r in results(4, "other-stages"):
        assert "saved with 4 stages, this run has 2; resume with as many" in r["message"]


@pytest.mark.parametrize("index", range(len(DAMAGES)), ids=lambda index: "-".join(DAMAGES[index][:2]))
def test_a_file_of_ours_that_is_not_that_of_the_save_is_named_and_refused_on_all_ranks(results, index):
    _, name, words = DAMAGES[index]
    for r in results(2, DAMAGED[index]["name"]):
        assert name in r["message"] and words in r["message"] and len(r["message"].splitlines()) == 1


@pytest.mark.parametrize("processes", JOBS)
def test_evaluation_leaves_training_bitwise_unchanged(results, processes):
    assert bitwise(results(processes, "evaluated"), results(processes, "BasisRotation-1"))
    assert bitwise(results(processes, "dropout"), results(processes, "dropout-evaluated"))
    assert bitwise(results(2, "seeded"), results(2, "seeded-evaluated"))
    evaluated = results(processes, "evaluated")
    assert len(evaluated[0]["evals"]) == 3 and all(r["evals"] == evaluated[0]["evals"] for r in evaluated)


def test_the_learning_rate_moves_once_an_update(results):
    assert results(4, "scheduled")[0]["lrs"] == pytest.approx([1e-2 * warmup(t) for t in range(1, 13)])


@pytest.mark.parametrize("gas", [1, 2, 4])
def test_a_stage_stashes_the_versions_that_are_in_flight(results, gas):
    for r in results(4, f"AdamW-{gas}"):
        weights = sum(w.numel() * 4 for w in r["weights"].values())
        tau = 3 - r["stage"]
        versions = 0 if tau == 0 else math.ceil(tau / gas) + 1  # one more while the newest forward runs
        assert r["stash_bytes"] == versions * weights


def test_autocast_follows_fp32_and_recomputation_changes_nothing(results):
    for name in ("autocast", "outer-autocast"):
        for r, reference in zip(results(4, name), results(4, "AdamW-1")):
            assert r["losses"] == pytest.approx(reference["losses"], rel=0.05) and r["losses"] != reference["losses"]
    assert bitwise(results(4, "outer-autocast"), results(4, "outer-autocast-recomputed"))


def test_a_user_s_own_changes_between_calls_are_no_error(results):
    assert bitwise(results(4, "changed-by-user"), results(4, "AdamW-1"))


def test_a_stage_without_trainable_parameters_passes_gradients_on(results):
    start, ranks = blocks(4), results(4, "frozen-stage")
    for r in ranks:
        for name, weight in r["weights"].items():
            layer, _, inner = name.partition(".")
            frozen = int(layer) in (2, 3, 4)
            assert torch.equal(weight, start[int(layer)].get_parameter(inner).detach()) is frozen, name
    assert ranks[0]["losses"][-1] < 0.5 * ranks[0]["losses"][0]


def test_a_run_that_is_rolled_back_goes_on_with_matching_inputs_and_labels(results):
    """With a learning rate of zero the losses are those of the data, in order, whatever is loaded in between."""
    assert [r["losses"] for r in results(4, "rolled-back")] == [r["losses"] for r in results(4, "not-rolled-back")]


def test_the_synchronous_schedule_is_deepspeed_s_own(results):
    ranks = results(2, "synchronous")
    assert not any(r["asynchronous"] for r in ranks) and {r["optimizer"] for r in ranks} == {"BasisRotation"}
    assert ranks[0]["losses"][-1] < 0.5 * ranks[0]["losses"][0]
