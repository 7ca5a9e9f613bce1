"""Finite and odd data: every call trains what DeepSpeed's own schedule would have, nothing is skipped or seen twice, nothing hangs."""

import json
import time

import pytest
import torch
from data_scripts import expected
from processes import HERE, run_job
from simulate import largest_difference

MAX_DIFFERENCE = 1e-6

TRAIN = ["train", "a"]


def epochs(number, calls, **spec):
    """A new iterator for each epoch."""
    return [step for e in range(number) for step in (["new", "a", {"start": e * spec["count"], **spec}], *[TRAIN] * calls)]


SCRIPTS = {
    "epochs": epochs(3, 6, count=6),
    "epochs-of-lists": epochs(3, 6, count=6, kind="list"),
    "epochs-of-one-object": [
        ["new", "a", {"count": 6, "kind": "renewed"}],
        *[TRAIN] * 6,
        ["again", "a", {"start": 6, "count": 6}],
        *[TRAIN] * 7,
        ["again", "a", {"start": 12, "count": 6}],
        *[TRAIN] * 6,
    ],
    "a-loader-ends": [["new", "a", {"count": 7}], *[TRAIN] * 9, ["new", "a", {"start": 7}], *[TRAIN] * 4],
    "an-empty-loader": [["new", "a", {"count": 0}], TRAIN, ["new", "a", {}], TRAIN, TRAIN],
    "a-loader-shorter-than-the-pipeline": [*epochs(2, 1, count=1), TRAIN, ["new", "a", {"start": 2, "count": 2}], TRAIN, TRAIN, TRAIN],
    "a-new-iterator-each-call": [s for u in range(6) for s in (["new", "a", {"start": 3 * u}], TRAIN)],
    "a-new-list-each-call": [s for u in range(6) for s in (["new", "a", {"start": u, "count": 1, "kind": "list"}], TRAIN)],
    "two-iterators-in-turn": [["new", "a", {}], ["new", "b", {"start": 100}], *[TRAIN, TRAIN, ["train", "b"]] * 4],
    "short-last-batches": epochs(3, 6, count=6, rows={5: 2, 11: 1, 17: 3}),
    "shapes-change": [["new", "a", {"rows": {4: 7, 5: 7, 6: 7, 7: 2, 9: 9}}], *[TRAIN] * 12],
    "shapes-change-after-a-drain": [
        ["new", "a", {"rows": dict.fromkeys(range(5, 30), 8)}],
        *[TRAIN] * 5,
        ["drain"],
        ["reset"],
        *[TRAIN] * 5,
    ],
    "evaluations-of-other-shapes": [
        ["new", "a", {"rows": dict.fromkeys(range(4, 30), 8)}],
        *[TRAIN] * 3,
        ["evaluate", {"start": 500}],
        *[TRAIN] * 3,
        ["reset"],
        ["evaluate", {"start": 500, "rows": dict.fromkeys(range(500, 520), 6)}],
        *[TRAIN] * 3,
    ],
    "barriers": [["new", "a", {"count": 6}], *[TRAIN, ["barrier"]] * 7, ["new", "a", {"start": 6}], *[TRAIN, ["barrier"]] * 3],
    "a-checkpoint-at-the-end-of-the-data": [
        ["new", "a", {"count": 5}],
        *[TRAIN] * 5,
        ["save"],
        TRAIN,
        ["new", "a", {"start": 5}],
        TRAIN,
        TRAIN,
    ],
    "other-batch-size": [["new", "a", {}], *[TRAIN] * 3, ["batch_size", 12], *[TRAIN] * 3, ["batch_size", 4], *[TRAIN] * 3],
}
ACCUMULATED = {
    "epochs": epochs(3, 3, count=6),
    "leftovers": [["new", "a", {"count": 7}], *[TRAIN] * 4, ["new", "a", {"start": 7, "count": 5}], *[TRAIN] * 4],
    "a-new-list-each-call": [s for u in range(6) for s in (["new", "a", {"start": 4 * u, "count": 4, "kind": "list"}], TRAIN)],
    "shapes-change": [["new", "a", {"rows": {4: 7, 5: 7, 6: 7, 7: 2, 9: 9}}], *[TRAIN] * 6],
}
CASES = {
    processes: [{"name": name, "script": script, "stages": processes} for name, script in SCRIPTS.items()]
    + [
        {"name": f"{name}-gas-{gas}", "script": script, "stages": processes, "gas": gas}
        for name, script in ACCUMULATED.items()
        for gas in (2, 4)
    ]
    for processes in (1, 2, 4)
}
REPLICAS = [
    {"name": "one-replica-runs-out", "stages": 2, "gas": gas, "script": [["new", "a", {"short_replica": {"1": 5}}], *[TRAIN] * 7]}
    for gas in (1, 4)
] + [
    {
        "name": "replicas-in-epochs", "stages": 2, "gas": 2,
        "script": epochs(2, 4, count=8) + [["new", "a", {"count": 1, "short_replica": {"0": 8}}], TRAIN, TRAIN],
    }
]  # fmt: skip
REPLICAS.append(
    {
        "name": "one-replica-changes", "stages": 2, "gas": 2,
        "script": [["new", "a", {}], *[TRAIN] * 4, ["new", "a", {"start": 50, "replicas": [0]}], *[TRAIN] * 4],
    }
)  # fmt: skip
for case in REPLICAS:
    case["name"] += f"-gas-{case['gas']}"
DISAGREEING = [
    {"name": "the-last-stage-ends-first", "script": [["new", "a", {"count": 5, "on_last_stage": {"count": 3}}], *[TRAIN] * 6]},
    {"name": "the-first-stage-ends-first", "script": [["new", "a", {"count": 3, "on_last_stage": {"count": 5}}], *[TRAIN] * 6]},
]  # fmt: skip
# A run that saves after five updates, and runs that go on from there with iterators of several kinds: one that was set to the first
# microbatch that was not trained, one that restored its own state (what was read ahead is behind it), and lists in epochs.
SAVED = [{"name": f"saved-gas-{gas}", "gas": gas, "script": [["new", "a", {}], *[TRAIN] * 5, ["save"], *[TRAIN] * 4]} for gas in (1, 2)] + [
    {
        "name": "saved-in-an-epoch",
        "gas": 2,
        "script": [["new", "a", {"count": 12}], *[TRAIN] * 5, ["save"], TRAIN, ["new", "a", {"start": 20}], TRAIN],
    }
]
GOING_ON = [
    {
        "name": f"going-on-{kind}-gas-{gas}", "gas": gas, "of": f"saved-gas-{gas}",
        "script": [["load", f"saved-gas-{gas}"], ["new", "a", {"start": start}], *[TRAIN] * 4],
    }
    for gas in (1, 2)
    for kind, start in (("by-position", 5 * gas), ("by-its-state", 5 * gas + 3))
] + [
    {"name": "going-on-after-stops", "of": "saved-gas-1",
     "script": [["new", "a", {"count": 0}], TRAIN, TRAIN, ["load", "saved-gas-1"], ["new", "a", {"start": 5}], *[TRAIN] * 4]},
    {"name": "going-on-from-a-copy", "of": "saved-gas-1", "script": [["load", "copied"], ["new", "a", {"start": 8}], *[TRAIN] * 4]},
    {"name": "going-on-twice", "of": "saved-gas-1",
     "script": [*[["load", "saved-gas-1"], ["new", "a", {"start": 8}], TRAIN, TRAIN] * 2, TRAIN, TRAIN]},
    {
        "name": "going-on-in-an-epoch", "gas": 2, "of": "saved-in-an-epoch",
        "script": [["load", "saved-in-an-epoch"], ["new", "a", {"count": 0}], TRAIN, ["new", "a", {"start": 20}], TRAIN],
    }
]  # fmt: skip
COPIED = {"name": "copied", "script": [["load", "saved-gas-1"], ["save"]]}
WORKER = "data_worker.py"
JOBS = {1: CASES[1], 2: CASES[2], 4: [*CASES[4], *REPLICAS, *SAVED, COPIED, *GOING_ON]}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    "processes, case", [(n, case) for n in CASES for case in CASES[n]], ids=lambda v: v["name"] if isinstance(v, dict) else v
)
def test_each_call_trains_the_next_microbatches_of_its_iterator(results, processes, case):
    ranks, (gave, weights, seen) = results(processes, case["name"]), expected(case)
    for r in ranks:
        assert [g if isinstance(g, str) else pytest.approx(g, abs=MAX_DIFFERENCE) for g in gave] == r["gave"]
    assert largest_difference(ranks, weights) <= MAX_DIFFERENCE
    labels = ranks[-1]["seen"]
    assert len(labels) == len(seen) and all(torch.equal(a, b) for a, b in zip(labels, seen))


@pytest.mark.parametrize("case", GOING_ON, ids=lambda case: case["name"])
def test_a_resumed_run_gets_each_microbatch_once_whichever_way_its_loader_resumes(results, case):
    for whole, resumed in zip(results(4, case["of"]), results(4, case["name"])):
        assert all(torch.equal(whole["weights"][name], resumed["weights"][name]) for name in whole["weights"])
        assert resumed["gave"][-len(whole["gave"][5:]) :] == whole["gave"][5:]


@pytest.mark.parametrize("name, updates", [("one-replica-runs-out-gas-1", 5), ("one-replica-runs-out-gas-4", 1)])
def test_all_replicas_end_where_one_of_them_does(results, name, updates):
    for r in results(4, name):
        assert [g == "StopIteration" for g in r["gave"]] == [False] * updates + [True] * (7 - updates)
        assert r["global_steps"] == updates
    assert len({tuple(r["losses"]) for r in results(4, name)}) == 1


def test_one_replica_may_change_its_iterator_alone(results):
    ranks = results(4, "one-replica-changes-gas-2")
    assert len({tuple(r["gave"]) for r in ranks}) == 1 and all(r["global_steps"] == 8 for r in ranks)
    for a, b in ((0, 1), (2, 3)):  # the replicas of a stage
        assert all(torch.equal(w, ranks[b]["weights"][name]) for name, w in ranks[a]["weights"].items())


def test_replicas_go_on_with_a_new_epoch(results):
    for r in results(4, "replicas-in-epochs-gas-2"):
        assert [g == "StopIteration" for g in r["gave"]] == [False] * 8 + [True] * 2


@pytest.mark.parametrize("case", DISAGREEING, ids=lambda case: case["name"])
def test_first_and_last_stage_that_disagree_end_the_job_with_the_reason(tmp_path, case):
    path = tmp_path / "cases.json"
    path.write_text(json.dumps([{**case, "stages": 3}]))
    start = time.monotonic()
    job = run_job(3, HERE / WORKER, path, tmp_path)
    assert job.returncode != 0 and time.monotonic() - start < 60
    assert "give both the same microbatches" in job.stderr or "both must give the same microbatches" in job.stderr
