"""A signal stops all ranks after the same update, with a checkpoint, whichever rank it reaches."""

import json

import pytest
import torch
from processes import HERE, run_job

from ds_basisrot.pipeline.stop_requests import NEVER, StopRequests


@pytest.mark.parametrize(
    "ranks, stages, schedule, gas",
    [
        ([3], 4, "async_1f1b", 1),
        ([0, 1, 2, 3], 2, "async_1f1b", 2),
        ([1], 2, "1f1b", 1),
    ],
)
def test_all_ranks_stop_after_the_same_update_and_save(tmp_path, ranks, stages, schedule, gas):
    job = run_job(4, HERE / "stopping_job.py", tmp_path, json.dumps(ranks), stages, schedule, gas)
    assert job.returncode == 0, job.stderr[-3000:]
    last = {torch.load(path)["last"] for path in tmp_path.glob("rank_*.pt")}
    assert len(last) == 1 and None not in last
    assert (tmp_path / "checkpoint" / "latest").read_text() == f"global_step{last.pop()}"


def test_the_first_stage_names_an_update_that_all_can_hear_of():
    for stages, accumulation in [(1, 1), (4, 1), (4, 2), (8, 3), (8, 16)]:
        requests = StopRequests(stages)
        requests.decide(10, accumulation)
        assert requests.after == NEVER and not requests.due(100)
        requests.agreed = True
        requests.decide(10, accumulation)
        assert requests.after == 10 + (stages - 1) // accumulation
        requests.decide(11, accumulation)
        assert not requests.due(requests.after) and requests.due(requests.after + 1)
