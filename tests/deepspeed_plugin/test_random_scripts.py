"""Random scripts of calls with all kinds of iterators: each trains what the synchronous meaning of its calls says, with the delays."""

import os
import random

import pytest
import torch
from data_scripts import expected
from models import BATCH
from processes import run_cases
from simulate import largest_difference, load

MAX_DIFFERENCE = 1e-6

SEED, NUMBER = int(os.environ.get("DS_BASISROT_TEST_SEED", "1")), int(os.environ.get("DS_BASISROT_TEST_CASES", "30"))


def random_iterator(rng):
    """A spec of `data_scripts`."""
    spec = {"start": 20 * rng.randint(0, 50), "kind": rng.choice(["generator", "generator", "list", "renewed"])}
    if spec["kind"] == "list" or rng.random() < 0.7:
        spec["count"] = rng.randint(0, 9)
    if rng.random() < 0.25:
        spec["rows"] = {str(spec["start"] + i): rng.randint(1, 9) for i in range(12) if rng.random() < 0.4}
    return spec


def random_script(rng):
    """Mostly training, with one to three iterators in turn."""
    names = ["a", "b", "c"][: rng.randint(1, 3)]
    steps = [["new", name, random_iterator(rng)] for name in names]
    name = rng.choice(names)
    others = [
        lambda: [["new", name, random_iterator(rng)]],
        lambda: [["evaluate", {"start": 2000 + 100 * rng.randint(0, 9)}]],
        lambda: [["drain"]],
        lambda: [["drain"], ["reset"]],
        lambda: [["barrier"]],
        lambda: [["batch_size", BATCH * rng.randint(1, 4)]],
        lambda: [["save"]],
    ]
    for _ in range(rng.randint(8, 25)):
        if rng.random() < 0.65:
            name = rng.choice(names) if rng.random() < 0.2 else name
            steps.append(["train", name])
        else:
            steps += rng.choices(others, weights=(12, 5, 3, 2, 3, 4, 2))[0]()
    return steps


pytestmark = [pytest.mark.full, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_random_scripts(tmp_path, processes):
    rng = random.Random(f"{SEED} {processes}")
    cases = [
        {"name": f"random-{number}", "stages": processes, "gas": rng.choice([1, 1, 2, 3]), "script": random_script(rng)}
        for number in range(NUMBER)
    ]
    run_cases(processes, cases, tmp_path, "data_worker.py", timeout=60 + 10 * len(cases))
    wrong = []
    for case in cases:
        ranks, (gave, weights, seen) = load(tmp_path, case["name"]), expected(case)
        same_calls = all(r["gave"] == [g if isinstance(g, str) else pytest.approx(g, abs=MAX_DIFFERENCE) for g in gave] for r in ranks)
        labels = ranks[-1]["seen"]
        same_data = len(labels) == len(seen) and all(map(torch.equal, labels, seen))
        if not same_calls or not same_data or largest_difference(ranks, weights) > MAX_DIFFERENCE:
            wrong.append(f"calls as expected: {same_calls}, data: {same_data}: {case}")
    assert not wrong, "\n".join(wrong)
