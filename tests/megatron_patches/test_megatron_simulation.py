"""Without a patch, Megatron on the stand-in for torch.cuda trains as one process does without a pipeline: job and simulation agree."""

import pytest
import torch
from megatron_job import Job
from megatron_processes import run_jobs, run_simulations
from megatron_shards import largest_difference, largest_movement, load, mean_over_replicas

EXACT = [
    Job("stages", pp=2, evaluate_after=3),
    Job("halves", pp=2, bf16=True, evaluate_after=3),
    Job("recomputed", pp=2, bf16=True, recompute=True),
    Job("experts", pp=2, experts=4),
    Job("replicas", dp=2, warmup=2),
    Job("sharded", dp=2, bf16=True, distributed_optimizer=True),
    Job("overlapped", dp=2, bf16=True, distributed_optimizer=True, overlap=True, evaluate_after=3),
]
CLOSE = [
    Job("clipped", dp=2, clip=1.0),
    Job("tied", pp=2, tied=True),
    Job("split", tp=2, swiglu=True, query_groups=2),
]
JOBS = [*EXACT, *CLOSE]

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("megatron_jobs")
    run_jobs(JOBS, folder)
    run_simulations(JOBS, folder, {job.name: {"delayed": False} for job in JOBS})
    return folder


@pytest.mark.parametrize("job", EXACT, ids=lambda job: job.name)
def test_a_pipeline_with_flushes_trains_bit_for_bit_as_one_process(out, job):
    results, simulated = load(out, job.name), torch.load(out / job.name / "simulated.pt")
    assert largest_difference(results, simulated["weights"]) == 0
    if job.bf16:
        assert largest_difference(results, simulated["weights"], "main_weights") == 0
    assert mean_over_replicas(results) == pytest.approx(simulated["losses"], abs=1e-6)
    assert mean_over_replicas(results, "evaluations") == pytest.approx(simulated["evaluations"], abs=1e-6)


@pytest.mark.parametrize("job", CLOSE, ids=lambda job: job.name)
def test_other_orders_of_summation_stay_close(out, job):
    results, simulated = load(out, job.name), torch.load(out / job.name / "simulated.pt")
    assert largest_difference(results, simulated["weights"]) < 1e-3 * largest_movement(results)
    assert mean_over_replicas(results) == pytest.approx(simulated["losses"], abs=1e-5)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_a_job_learns(out, job):
    losses = mean_over_replicas(load(out, job.name))
    assert losses[-1] < losses[0] - 0.3
