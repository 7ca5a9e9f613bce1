"""Clip scopes, tied weights and remedies for late gradients: the real engine against the simulator, which has them from their formulas."""

import pytest
import torch
from simulate import TIED, largest_difference, simulate

MAX_DIFFERENCE = 1e-6

ZERO, BF16 = {"zero_optimization.stage": 1}, {"bf16.enabled": True}
CLIP = 0.05  # of norms around 1 in this model

CLIPPED = [
    {
        "name": f"{scope}-{optimizer}-{gas}",
        "clip": CLIP,
        "optimizer": optimizer,
        "gas": gas,
        "config": {"pipeline.clip_scope": scope},
        **more,
    }
    for scope in ("lagged_global", "stage")
    for optimizer, gas, more in (("AdamW", 1, {}), ("SGD", 2, {"save_after": 5}), ("BasisRotation", 4, {}), ("SGD", 1, {"save_after": 5}))
]
REMEDIES = [
    {
        "name": f"{key}-{optimizer}-{gas}",
        "optimizer": optimizer,
        "gas": gas,
        "config": {f"pipeline.{key}": value, "optimizer.params.lr": 1e-2},  # which is also that of the schedule
        **more,
    }
    for key, value, optimizers in (
        ("lr_correction_updates", 6, ("AdamW", "BasisRotation", "SGD")),
        ("delay_compensation", 0.5, ("SGD", "AdamW", "BasisRotation")),
        ("weight_prediction", True, ("AdamW", "BasisRotation")),
    )
    for optimizer in optimizers
    for gas, more in ((1, {}), (2, {"save_after": 5, "scheduler": True, "clip": CLIP}))
]
TIED_CASES = [
    {"name": "tied", "tied": True, "optimizer": "AdamW"},
    {"name": "tied-clipped", "tied": True, "optimizer": "BasisRotation", "clip": CLIP, "gas": 2, "save_after": 5},
    {"name": "tied-clipped-stage", "tied": True, "optimizer": "SGD", "clip": CLIP, "config": {"pipeline.clip_scope": "stage"}},
    {"name": "tied-gas-4", "tied": True, "optimizer": "AdamW", "gas": 4, "clip": CLIP},
    {"name": "tied-no-stashing", "tied": True, "optimizer": "AdamW", "stashing": False},
    {"name": "tied-compensated", "tied": True, "optimizer": "SGD", "config": {"pipeline.delay_compensation": 0.5}},
    {"name": "tied-zero", "tied": True, "optimizer": "AdamW", "clip": CLIP, "config": ZERO},
    {"name": "tied-zero-saved", "tied": True, "optimizer": "BasisRotation", "gas": 2, "save_after": 5, "config": ZERO},
    {"name": "tied-bf16", "tied": True, "optimizer": "BasisRotation", "config": BF16, "save_after": 5},
    {"name": "tied-bf16-zero", "tied": True, "optimizer": "AdamW", "config": {**BF16, **ZERO}},
]
BATCH_SIZES = [
    {"name": f"tied-batch-size-{after}", "tied": True, "clip": CLIP, "gas": 2, "batch_size_after": [5, after]} for after in (16, 4)
]
MODES = [{"name": "both-in-zero", "clip": CLIP, "optimizer": "AdamW", "config": {**ZERO, "pipeline.delay_compensation": 0.5}}]
COMPARED = [*CLIPPED, *REMEDIES, *TIED_CASES, *BATCH_SIZES, *MODES]
REPLICATED = [
    {**case, "name": f"replicated-{case['name']}", "stages": 2}
    for case in (*CLIPPED[:3], *REMEDIES[::3], *TIED_CASES)
    if "batch_size_after" not in case
]
LAST_DIGIT = 2**-8  # of bfloat16 weights below 1
# Rounding of bfloat16 weights by DeepSpeed's own way of clipping: not bitwise the simulator's.
ROUNDED = [
    {
        "name": f"clipped-{setting}",
        "clip": CLIP,
        "optimizer": "SGD",
        "tied": tied,
        "config": {**config, "zero_allow_untested_optimizer": True},
    }
    for setting, config, tied in (("bf16", BF16, False), ("bf16-zero", {**BF16, **ZERO}, False), ("bf16-tied", BF16, True))
]
RESUMED = [
    {**case, "name": f"{case['name']}-resumed", "save_after": None, "load": case["name"]}
    for case in (*CLIPPED, *TIED_CASES, *REMEDIES, *REPLICATED)
    if case.get("save_after")
]
FROZEN = {"name": "tied-frozen", "stages": 2, "tied": True, "frozen_after": [3, "shared.up.weight"], "refused": True}
# The first layers are trained from the fifth update on only.
UNFROZEN = [
    {"name": f"unfrozen-{strength}", "frozen": [0], "frozen_after": [5, "0."], "config": {"pipeline.delay_compensation": strength}}
    for strength in (0.0, 0.5)
]
JOBS = {4: [*COMPARED, *REPLICATED, *ROUNDED, *RESUMED, *UNFROZEN, FROZEN]}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("case", [*COMPARED, *REPLICATED], ids=lambda case: case["name"])
def test_weights_and_losses_are_the_simulator_s(results, case):
    ranks, stages = results(4, case["name"]), case.get("stages", 4)
    weights, losses = simulate({**case, "stages": stages, "replicas": 4 // stages})
    assert largest_difference(ranks, weights) <= MAX_DIFFERENCE
    for r in ranks:
        assert r["losses"] == pytest.approx(losses, abs=MAX_DIFFERENCE)


@pytest.mark.parametrize("case", ROUNDED, ids=lambda case: case["name"])
def test_clipping_in_bf16_is_the_simulator_s_up_to_rounding(results, case):
    weights, losses = simulate({**case, "stages": 4})
    unclipped, _ = simulate({**case, "stages": 4, "clip": 0.0})
    far = max((a[n].float() - b[n].float()).abs().max().item() for a, b in zip(weights, unclipped) for n in a)
    assert largest_difference(results(4, case["name"]), weights) <= 0.05 * far + LAST_DIGIT
    assert results(4, case["name"])[0]["losses"] == pytest.approx(losses, rel=0.02)


@pytest.mark.parametrize(
    "case", [c for c in (*TIED_CASES, *BATCH_SIZES, *REPLICATED, *ROUNDED) if c.get("tied")], ids=lambda case: case["name"]
)
def test_both_copies_of_a_tied_weight_are_bitwise_equal(results, case):
    copies = [r["weights"][TIED] for r in results(4, case["name"]) if TIED in r["weights"]]
    assert len(copies) == (2 if case.get("stages", 4) == 4 else 4)
    assert all(torch.equal(copy, copies[0]) for copy in copies)


@pytest.mark.parametrize("case", RESUMED, ids=lambda case: case["name"])
def test_a_resumed_run_is_bitwise_the_one_that_went_on(results, case):
    for whole, resumed in zip(results(4, case["load"]), results(4, case["name"])):
        assert all(torch.equal(whole["weights"][name], resumed["weights"][name]) for name in whole["weights"])
        assert resumed["losses"] == whole["losses"][5:]


def test_the_options_change_what_is_trained(results):
    """Each remedy and scope has an effect, so that their equality with the simulator says something."""

    def differ(a, b):
        return any(not torch.equal(x["weights"][n], y["weights"][n]) for x, y in zip(results(4, a), results(4, b)) for n in x["weights"])

    assert differ("lagged_global-AdamW-1", "stage-AdamW-1")
    names = [case["name"] for case in REMEDIES if case["optimizer"] == "AdamW" and case["gas"] == 1]
    assert len(names) == 3 and all(differ(a, b) for a in names for b in names if a < b)


def test_gradients_of_parameters_unfrozen_later_are_compensated_too(results):
    plain, compensated = (results(4, case["name"])[0]["weights"] for case in UNFROZEN)
    assert not torch.equal(plain["0.up.weight"], compensated["0.up.weight"])


def test_tied_weights_cannot_be_frozen_while_training(results):
    for r in results(4, "tied-frozen"):
        assert "tied_modules.shared.up.weight was frozen" in r["message"] and "do it before initialize()" in r["message"]


def test_the_learning_rate_that_is_logged_is_not_corrected(results):
    assert set(results(4, "lr_correction_updates-AdamW-1")[0]["lrs"]) == {1e-2}
