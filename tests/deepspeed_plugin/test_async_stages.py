"""The real engine equals the simulator on other numbers of stages, and in the whole matrix of the options that change what is computed."""

import pytest
from simulate import largest_difference, simulate

MAX_DIFFERENCE = 1e-6

ZERO, BF16 = {"zero_optimization.stage": 1}, {"bf16.enabled": True}


def matrix(stages, accumulations=(1, 2, 4, 16), optimizers=("BasisRotation", "AdamW")):
    """Every accumulation with and without stashing, in fp32 and bf16, at ZeRO 0 and 1; with dropout and recomputation in fp32."""
    cases = []
    for gas in accumulations:
        for optimizer in optimizers:
            for stashing in (True, False):
                for setting, config in (("fp32", {}), ("zero", ZERO), ("bf16", BF16), ("bf16-zero", {**BF16, **ZERO})):
                    name = f"{stages}-stages-{optimizer}-{gas}-{setting}{'' if stashing else '-no-stashing'}"
                    case = {"stages": stages, "optimizer": optimizer, "gas": gas, "stashing": stashing, "config": config}
                    cases.append({"name": name, **case, "updates": 12 if gas < 16 else 5})
            cases.append(
                {"name": f"{stages}-stages-{optimizer}-{gas}-dropout", "stages": stages, "optimizer": optimizer, "gas": gas, "dropout": 0.3}
            )
            recomputed = {"stages": stages, "optimizer": optimizer, "gas": gas, "checkpoint_activations": 1, "eval_after": [1, 4]}
            cases.append({"name": f"{stages}-stages-{optimizer}-{gas}-recomputed", **recomputed})
    return [{"updates": 8, **case} for case in cases]


SHORT = {
    3: [case for case in matrix(3, (1, 2, 4), ("BasisRotation",)) if "zero" not in case["name"]],
    8: [
        {"name": "8-1", "stages": 8, "optimizer": "BasisRotation", "clip": 0.05, "updates": 20},
        {"name": "8-4", "stages": 8, "optimizer": "BasisRotation", "gas": 4, "dropout": 0.3},
        {"name": "8-16", "stages": 8, "optimizer": "AdamW", "gas": 16, "updates": 5},
        {"name": "8-no-stashing", "stages": 8, "optimizer": "AdamW", "gas": 2, "stashing": False},
        {"name": "8-bf16-zero", "stages": 8, "optimizer": "BasisRotation", "config": {**BF16, **ZERO}},
        {"name": "8-tied", "stages": 8, "optimizer": "AdamW", "tied": True, "clip": 0.05, "updates": 20},
        {"name": "4-replicated", "stages": 4, "optimizer": "BasisRotation", "gas": 2, "config": ZERO},
        {"name": "4-replicated-16", "stages": 4, "optimizer": "BasisRotation", "gas": 16, "updates": 4, "dropout": 0.3, "clip": 0.05},
    ],
}
LONG = {2: matrix(2), 3: matrix(3), 4: [*matrix(4), *matrix(2)], 8: [*matrix(8, (1, 2, 4, 16), ("BasisRotation",)), *matrix(4, (2,))]}
REFUSED = {"name": "tied-three-times", "stages": 3, "tied_everywhere": True, "refused": True}
JOBS = {3: [*SHORT[3], REFUSED], 8: SHORT[8]}

pytestmark = pytest.mark.usefixtures("one_thread")


def check(ranks, case, processes):
    weights, losses = simulate({**case, "replicas": processes // case["stages"]})
    assert largest_difference(ranks, weights) <= MAX_DIFFERENCE
    for r in ranks:
        assert r["asynchronous"] and r["losses"] == pytest.approx(losses, abs=MAX_DIFFERENCE)


@pytest.mark.parametrize(
    "processes, case", [(n, c) for n in SHORT for c in SHORT[n]], ids=lambda v: v["name"] if isinstance(v, dict) else v
)
def test_weights_and_losses_are_the_simulator_s(results, processes, case):
    check(results(processes, case["name"]), case, processes)


def test_weights_shared_by_more_than_two_stages_are_refused(results):
    for r in results(3, "tied-three-times"):
        assert "ties weights between two stages" in r["message"] and "'shared' lies on 3 (0, 1, 2)" in r["message"]


@pytest.mark.full
@pytest.mark.parametrize("processes", LONG)
def test_the_whole_matrix(tmp_path, processes):
    from processes import run_cases
    from simulate import load

    run_cases(processes, LONG[processes], tmp_path, timeout=1200)
    for case in LONG[processes]:
        check(load(tmp_path, case["name"]), case, processes)
