"""Skipped updates as on accelerators, where the hosts of some ranks know at once that one is skipped and others do not: none hangs."""

import pytest
from zero_cases import TINY, cases
from zero_results import bitwise, distance, run_zero

RANKS = 4
HUGE = {"3": ["blocks.1.out.weight", 1e17]}  # finite, so that DeepSpeed lets it through
LATE = {"unused_on": list(range(RANKS)), "unused_until": 6}  # one rank has a matrix that is cold, the others have not
UNCHECKED = {"precision": "bf16", "config": {"bf16.check_grad_overflow": False}, "model": TINY}  # two ranks have no matrix
CASES = [
    *cases("late-huge", (0, 1, 3), spoil=HUGE, **LATE),
    *cases("first-bad", (2,), spoil={"0": ["norm.weight", float("nan")]}, **UNCHECKED),
    *cases("without-first", (2,), leave_out=[0], **UNCHECKED),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_zero(RANKS, CASES, tmp_path_factory.mktemp("accelerator"), "accelerator_worker.py")


def test_an_update_is_skipped_whoever_s_host_knows(results):
    reference = results("late-huge-0")
    assert {rank["skipped"] for rank in reference} == {1}
    for stage in (1, 3):
        ranks = results(f"late-huge-{stage}")
        assert {rank["skipped"] for rank in ranks} == {1}
        assert distance(ranks[0], reference[0]) <= 1e-3 and all(bitwise([rank], ranks[:1]) for rank in ranks)


def test_ranks_that_own_nothing_skip_the_first_update_too(results):
    ranks = results("first-bad-2")
    assert {rank["skipped"] for rank in ranks} == {1} and bitwise(ranks, results("without-first-2"))
