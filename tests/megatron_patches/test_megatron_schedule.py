"""The no-flush schedule on real Megatron processes trains as the simulation of late gradients does."""

import pytest
import torch
from megatron_job import Job
from megatron_processes import run_jobs, run_simulations
from megatron_shards import largest_difference, largest_movement, load, mean_over_replicas

ASYNC = {"pipeline": {"schedule": "async_1f1b"}}
NO_STASH = {"pipeline": {"schedule": "async_1f1b", "weight_stashing": False}}
BY_STAGE = {"pipeline": {"schedule": "async_1f1b", "clip_scope": "stage"}}

ROTATED = {"optimizer": {"type": "BasisRotation", "params": {"refresh_period": 3}}, **ASYNC}
BY_LATENESS = {"optimizer": {"type": "BasisRotation", "params": {"refresh_period": 4, "refresh_allocation": "stage_aware"}}, **ASYNC}

EXACT = [
    Job("two", pp=2, basisrot=ASYNC, evaluate_after=3),
    Job("one_microbatch", pp=2, microbatches=1, steps=12, basisrot=ASYNC),
    Job("bf16", pp=2, bf16=True, basisrot=ASYNC, evaluate_after=3),
    Job("no_stash", pp=2, microbatches=1, steps=12, basisrot=NO_STASH),
    Job("no_stash_bf16", pp=2, microbatches=1, steps=12, bf16=True, basisrot=NO_STASH),
    Job("recomputed", pp=2, microbatches=2, bf16=True, recompute=True, basisrot=ASYNC),
    Job("experts", pp=2, microbatches=2, experts=4, basisrot=ASYNC),
    Job("four", pp=4, microbatches=2, basisrot=ASYNC, evaluate_after=3),
    Job("four_one_bf16", pp=4, microbatches=1, steps=12, bf16=True, basisrot=ASYNC),
    Job("replicas", pp=2, dp=2, basisrot=ASYNC, warmup=2),
    Job("tied", pp=2, microbatches=1, steps=10, tied=True, basisrot=ASYNC),
    Job("four_tied", pp=4, microbatches=2, steps=10, tied=True, basisrot=ASYNC),
    Job("tied_sharded", pp=2, dp=2, bf16=True, microbatches=2, tied=True, distributed_optimizer=True, basisrot=ASYNC),
    Job("sharded", pp=2, dp=2, bf16=True, microbatches=2, distributed_optimizer=True, basisrot=ASYNC, evaluate_after=3),
    Job("rotated", pp=2, microbatches=1, steps=12, swiglu=True, query_groups=2, basisrot=ROTATED),
    Job("rotated_bf16", pp=2, bf16=True, microbatches=2, steps=8, basisrot=ROTATED),
    Job("four_rotated", pp=4, microbatches=1, steps=12, basisrot=BY_LATENESS),
    Job("rotated_replicas", pp=2, dp=2, microbatches=2, steps=8, basisrot=ROTATED),
    Job("rotated_sharded", pp=2, dp=2, bf16=True, microbatches=2, steps=8, distributed_optimizer=True, basisrot=ROTATED),
]
SPLIT = [  # over tensor-parallel ranks, and so is their simulation
    Job("split", pp=2, tp=2, swiglu=True, query_groups=2, basisrot=ASYNC),
    Job("split_rotated_bf16", pp=2, tp=2, microbatches=1, steps=8, bf16=True, basisrot=ROTATED),
]
CLOSE = [  # a norm is a sum in another order
    Job("clipped", pp=2, microbatches=1, steps=10, clip=0.5, basisrot=ASYNC),
    Job("clipped_by_stage", pp=2, microbatches=1, steps=10, clip=0.5, basisrot=BY_STAGE),
    # without biases: a key's cancels in the softmax, its gradient is rounding noise, which Adam makes full steps of
    Job("tied_clipped_bf16", pp=2, microbatches=1, steps=10, tied=True, clip=0.5, bf16=True, swiglu=True, basisrot=ASYNC),
    Job("four_clipped", pp=4, microbatches=1, steps=10, clip=0.5, basisrot=ASYNC),
    Job("four_tied_clipped", pp=4, microbatches=2, steps=10, tied=True, clip=0.5, basisrot=ASYNC),
    Job("tied_sharded_clipped", pp=2, dp=2, microbatches=2, tied=True, clip=0.5, distributed_optimizer=True, basisrot=ASYNC),
    Job("tensor_parallel", pp=2, tp=2, swiglu=True, query_groups=2, clip=0.5, basisrot=ASYNC),
]
JOBS = [*EXACT, *SPLIT, *CLOSE]
ALWAYS = (
    "two", "no_stash_bf16", "rotated_bf16", "clipped", "tied_clipped_bf16",
    "four_tied", "tied_sharded", "rotated_sharded", "split_rotated_bf16",
)  # fmt: skip


def cases(jobs):
    """Jobs as parameters; those that are not in ALWAYS run with --full."""
    return [pytest.param(job, id=job.name, marks=[] if job.name in ALWAYS else pytest.mark.full) for job in jobs]


@pytest.fixture(scope="module")
def out(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("megatron_schedule")
    jobs = JOBS if request.config.getoption("--full") else [job for job in JOBS if job.name in ALWAYS]
    run_jobs(jobs, folder)
    run_simulations([job for job in jobs if job not in SPLIT], folder)
    run_simulations([job for job in jobs if job in SPLIT], folder, ranks=2)
    return folder


@pytest.mark.parametrize("job", cases(EXACT))
def test_bit_for_bit_as_simulated(out, job):
    results, simulated = load(out, job.name), torch.load(out / job.name / "simulated.pt")
    assert largest_movement(results) > 1e-3
    assert largest_difference(results, simulated["weights"]) == 0
    if job.bf16 and not job.distributed_optimizer:
        assert largest_difference(results, simulated["weights"], "main_weights") == 0
    assert mean_over_replicas(results) == pytest.approx(simulated["losses"], abs=1e-6)
    assert mean_over_replicas(results, "evaluations") == pytest.approx(simulated["evaluations"], abs=1e-6)


@pytest.mark.parametrize("job", cases(SPLIT))
def test_bit_for_bit_as_simulated_by_tensor_parallel_ranks(out, job):
    results = load(out, job.name)
    assert largest_movement(results) > 1e-3
    for rank in range(job.tp):
        mine = [{**r, "partitions": {}} for r in results if r["tp_rank"] == rank]  # the simulation has the same shards
        simulated = torch.load(out / job.name / f"simulated_{rank}.pt")["weights"]
        assert largest_difference(mine, simulated, "main_weights" if job.bf16 else "weights") == 0


@pytest.mark.parametrize("job", cases(CLOSE))
def test_other_roundings_stay_close(out, job):
    results, simulated = load(out, job.name), torch.load(out / job.name / "simulated.pt")
    kind = "main_weights" if job.bf16 else "weights"
    assert largest_difference(results, simulated["weights"], kind) < 1e-3 * largest_movement(results)


@pytest.mark.parametrize("job", cases([job for job in JOBS if job.tied]))
def test_tied_copies_are_equal(out, job):
    results = load(out, job.name)
    first = [r["weights"]["embedding.word_embeddings.weight"] for r in results if r["stage"] == 0]
    last = [r["weights"]["output_layer.weight"] for r in results if r["stage"] == job.pp - 1]
    assert all(torch.equal(a, b) for a, b in zip(first, last))


@pytest.mark.parametrize("job", cases(JOBS))
def test_each_end_reads_what_it_forwards(out, job):
    trained = job.steps * job.microbatches
    for result in load(out, job.name):
        if result["tp_rank"] == 0 and result["stage"] in (0, job.pp - 1):
            assert result["drawn"] == trained + job.pp - 1 - result["stage"]
