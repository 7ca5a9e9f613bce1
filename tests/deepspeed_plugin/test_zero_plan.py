"""What ranks keep and exchange in real jobs under ZeRO is what `ds-basisrot plan` says."""

import json
import os

import pytest
import torch
from processes import HERE, run_job

from ds_basisrot.cli import main


def planned(stage, ranks, folder, monkeypatch):
    """The figures of the command for the worker's model and configuration."""
    config = {**json.loads((HERE / "zero_plan.json").read_text()), "train_batch_size": 8, "zero_optimization": {"stage": stage}}
    (folder / "ds.json").write_text(json.dumps(config))
    monkeypatch.chdir(HERE)
    arguments = ["--model", "zero_plan_worker:model", "--ranks", str(ranks), "--json", str(folder / "plan.json")]
    assert main(["plan", str(folder / "ds.json"), *arguments]) == 0
    return json.loads((folder / "plan.json").read_text())["ranks"]


@pytest.fixture(scope="module", params=(2, 4))
def job(request, tmp_path_factory):
    """(ranks, by rank what it kept and exchanged for each ZeRO stage) of one job."""
    out = tmp_path_factory.mktemp(f"plan{request.param}")
    done = run_job(request.param, HERE / "zero_plan_worker.py", out)
    assert len(os.listdir(out)) == request.param, done.stderr[-3000:]
    return request.param, [torch.load(out / f"rank_{rank}.pt") for rank in range(request.param)]


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_ranks_keep_and_exchange_what_the_plan_says(job, stage, tmp_path, monkeypatch):
    ranks, measured = job
    plan = planned(stage, ranks, tmp_path, monkeypatch)
    kept = [each[stage]["rotation_state_bytes"] for each in measured]
    assert kept == plan["by_rank"]["rotation_state_bytes"]
    assert max(kept) == plan["rotation_state_bytes"]["most"] == pytest.approx(sum(kept) / ranks * plan["rotation_state_bytes"]["imbalance"])
    own = plan["by_rank"]
    given = [4 * sum(both) for both in zip(own["sent_gradient_numbers"], own["received_gradient_numbers"])]
    assert [each[stage]["exchanged_bytes"] for each in measured] == [[bytes_] * 4 for bytes_ in given]
    assert max(given) == plan["exchanged_bytes"]["most"] > 0


@pytest.mark.parametrize("stage", (1, 2))
def test_with_zero_1_and_2_little_moves(job, stage, tmp_path, monkeypatch):
    plan = planned(stage, job[0], tmp_path, monkeypatch)
    all_numbers = sum(plan["by_rank"]["sent_gradient_numbers"])
    of_stage_3 = sum(planned(3, job[0], tmp_path, monkeypatch)["by_rank"]["sent_gradient_numbers"])
    assert all_numbers < 0.5 * of_stage_3
    assert plan["matrices"]["cut"] <= job[0] - 1  # one at each border
