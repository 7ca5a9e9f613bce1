"""BasisRotation under every ZeRO stage, from the JSON alone: bitwise as without ZeRO where DeepSpeed's sums are, close where not."""

import pytest
import torch
from zero_cases import LONG, SHORT
from zero_results import bitwise, distance, run_zero

MAX_DISTANCE = 1e-2  # relative to the movement; measured: at most 1e-4
WRAPPERS = {
    ("fp32", 0): "BasisRotation",
    ("bf16", 0): "FP16_UnfusedOptimizer",
    ("bf16-fp32-sums", 1): "BF16_Optimizer",
    ("fp32", 1): "DeepSpeedZeroOptimizer",
    ("fp32", 2): "DeepSpeedZeroOptimizer",
    ("bf16", 1): "DeepSpeedZeroOptimizer",
    ("fp32", 3): "DeepSpeedZeroOptimizer_Stage3",
    ("bf16", 3): "DeepSpeedZeroOptimizer_Stage3",
}


def compared(jobs):
    pairs = [(processes, case) for processes, cases in jobs for case in cases if "equals" in case or "close_to" in case]
    return pytest.mark.parametrize("processes, case", pairs, ids=lambda value: value["name"] if isinstance(value, dict) else str(value))


def run_zeros(jobs, out):
    """Run them; returns what loads the results of a case on so many processes."""
    loaders = {}
    for processes, cases in jobs:
        folder = out / str(processes)
        folder.mkdir(exist_ok=True)
        loaders[processes] = run_zero(processes, cases, folder)
    return lambda processes, name: loaders[processes](name)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_zeros(SHORT, tmp_path_factory.mktemp("zero"))


@pytest.fixture(scope="module")
def long_results(tmp_path_factory):
    return run_zeros(LONG, tmp_path_factory.mktemp("zero_long"))


def check(results, processes, case):
    ranks, others = results(processes, case["name"]), results(processes, case.get("equals") or case["close_to"])
    if "equals" in case:
        assert bitwise(ranks, others)
    else:
        assert max(distance(*pair) for pair in zip(ranks, others)) <= MAX_DISTANCE
    assert all(bitwise([rank], ranks[:1]) for rank in ranks)  # replicas
    assert distance(ranks[0], {**ranks[0], "weights": ranks[0]["before"]}) > 0.0


@compared(SHORT)
def test_training_is_that_of_the_reference(results, processes, case):
    check(results, processes, case)


@pytest.mark.full
@compared(LONG)
def test_training_is_that_of_the_reference_with_every_option(long_results, processes, case):
    check(long_results, processes, case)


@pytest.mark.parametrize("processes, stage", [(1, 0), (1, 3), (4, 0), (4, 3)])
def test_other_numbers_of_ranks_train_alike(results, processes, stage):
    assert distance(results(processes, f"fp32-{stage}")[0], results(2, "fp32-0")[0]) <= MAX_DISTANCE


@pytest.mark.parametrize("precision, stage", WRAPPERS)
def test_the_optimizer_is_inside_the_wrapper_that_deepspeed_chooses(results, precision, stage):
    for rank in results(2, f"{precision}-{stage}"):
        sharded = stage > 0
        assert (rank["wrapper"], rank["optimizer"]) == (WRAPPERS[precision, stage], "ShardedBasisRotation" if sharded else "BasisRotation")
        assert rank["gradient_dtype"] == (None if precision == "fp32" else torch.bfloat16)


def test_states_are_shared_out(results):
    for processes, stage in ((2, 1), (2, 2), (2, 3), (4, 3)):
        owned = [rank["state_bytes"] for rank in results(processes, f"fp32-{stage}")]
        assert sum(owned) == results(1, "fp32-3")[0]["state_bytes"] and max(owned) < 1.3 * sum(owned) / processes
    owned = [rank["state_bytes"] for rank in results(4, "few-matrices-3")]
    assert min(owned) == 0 < max(owned)  # some ranks own nothing


@pytest.mark.parametrize("name", ["autocast-3", "sent-as-bf16-0", "sent-as-bf16-1"])
def test_the_precision_of_gradients_is_known_where_it_is_not_that_of_the_weights(results, name):
    assert {rank["gradient_dtype"] for rank in results(2, name)} == {torch.bfloat16}


def test_the_precision_of_fp16_gradients_is_known(results):
    assert {rank["gradient_dtype"] for rank in results(2, "fp16-bad-1")} == {torch.float16}


def test_schedulers_reach_every_group(results):
    for stage in (0, 1, 3):
        assert all(rank["lrs"] == pytest.approx([7 / 8 * 1e-2, 7 / 8 * 5e-3]) for rank in results(2, f"groups-{stage}"))


@pytest.mark.parametrize("name, skipped", [("bad-0", 2), ("bad-1", 0), ("bad-3", 0), ("unchecked-bad-2", 2)])
def test_a_bad_gradient_is_skipped_by_us_or_by_deepspeed(results, name, skipped):
    for rank in results(2, name):
        assert rank["skipped"] == skipped and rank["global_steps"] == 8


def test_a_parameter_without_gradient_on_some_ranks_is_trained(results):
    """Where DeepSpeed can reduce such gradients: its ZeRO 1 to 3 cannot, with any optimizer."""
    for name in ("unused-here-0", "unused-here-fp32-sums-1"):
        rank = results(2, name)[0]
        assert not torch.equal(rank["weights"]["extra.weight"], rank["before"]["extra.weight"])


def test_what_has_no_gradient_yet_stays_as_it_is(results):
    assert all(bitwise(results(2, "late-0"), results(2, f"late-{stage}")) for stage in (0, 3))
    assert not bitwise(results(2, "late-0"), results(2, "short-0"))
