"""Ranks that differ, or never answer, are named."""

import json
from datetime import timedelta

import pytest
import torch.distributed as dist

from ds_basisrot.common import agreement


@pytest.fixture
def answers(monkeypatch):
    monkeypatch.setattr(agreement, "TIMEOUT", timedelta(seconds=0.2))
    store = dist.HashStore()

    def judge(facts, *others):
        for rank, (theirs, amounts) in enumerate(others):
            store.set(f"test/{rank}", json.dumps([theirs, amounts]))
        return agreement._judge(store, "test", 3, facts)

    return judge


def test_equal_facts_and_the_sums(answers):
    facts = {"version": "1", "pipeline.schedule": "async_1f1b"}
    assert answers(facts, *[(facts, {"rotated": n}) for n in (2, 0, 3)]) == (None, {"rotated": 5})


def test_the_first_difference_is_named(answers):
    ours, theirs = {"a": 1, "betas": (0.9, 0.99)}, {"a": 1, "betas": [0.9, 0.9]}
    fault, _ = answers(ours, (ours, {}), (ours, {}), (theirs, {}))
    assert fault == "rank 2 differs from rank 0 in betas: [0.9, 0.9] against (0.9, 0.99); make them equal"


def test_a_missing_key_is_a_difference(answers):
    fault, _ = answers({"a": 1, "b": 2}, ({"a": 1, "b": 2}, {}), ({"a": 1}, {}), ({"a": 1, "b": 2}, {}))
    assert fault.startswith("rank 1 differs from rank 0 in b: None against 2")


def test_a_silent_rank_is_named(answers):
    fault, _ = answers({}, ({}, {}), ({}, {}))
    assert fault.startswith("rank 2 did not answer within")


def test_nested_blocks_are_compared_key_by_key():
    assert agreement.flat("", {"optimizer": {"params": {"lr": 1}}, "x": 2}) == {"optimizer.params.lr": 1, "x": 2}


def test_one_process_agrees_with_itself():
    assert agreement.agree({"a": 1}, {"n": 3}) == {"n": 3}
