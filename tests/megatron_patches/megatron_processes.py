"""Runs jobs in real processes over gloo, and their simulation, from a test. Needs no Megatron in the test's own process."""

import dataclasses
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import forked_jobs
from megatron_job import Job

HERE = Path(__file__).parent
IMPORTED = (
    "cpu_cuda_shim", "torch._inductor.compile_fx", "torch.distributed.checkpoint", "megatron.core.optimizer", "megatron.core.models.gpt",
)  # fmt: skip
"""What all workers import."""


def run_jobs(jobs: Sequence[Job], out: Path, timeout: float = 300) -> None:
    """Run each job in as many processes as it needs; each number of processes is started once. Results: see megatron_shards.load.

    Raises:
        AssertionError: a rank did not finish a job; with the end of what was printed.
    """
    by_size = sorted(jobs, key=lambda job: job.processes)
    for processes, cases in groupby(by_size, key=lambda job: job.processes):
        cases = list(cases)
        missing = [Path(out, job.name, f"rank_{rank}.pt") for job in cases for rank in range(processes)]
        _run(processes, "megatron_worker.py", cases, {}, out, missing, timeout)


def run_worker(processes: int, worker: str, *arguments: Any, timeout: float = 300) -> subprocess.CompletedProcess:
    """Run a worker of this folder in so many ranks; returns the finished job with its output as text."""
    paths = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]  # where another Megatron may be
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return forked_jobs.run(IMPORTED, processes, HERE / worker, *arguments, env=environment, timeout=timeout)


def run_simulations(
    jobs: Sequence[Job], out: Path, options: Mapping[str, Mapping[str, Any]] | None = None, ranks: int = 1, timeout: float = 300
) -> None:
    """Simulate jobs that have run; leaves OUT/<name>/simulated.pt, which torch.load reads.

    Args:
        jobs: that left their results in `out`.
        out: the folder of all results.
        options: by name of a job, what `simulate` takes: delayed, cut_after.
        ranks: 1 simulates in one process; more simulate one tensor-parallel rank each, of jobs that have so many, and leave
            simulated_<rank>.pt.
        timeout: in seconds.
    """
    names = ["simulated.pt"] if ranks == 1 else [f"simulated_{rank}.pt" for rank in range(ranks)]
    expected = [Path(out, job.name, name) for job in jobs for name in names]
    _run(ranks, "megatron_simulation.py", jobs, options or {}, out, expected, timeout)


def _run(
    processes: int, worker: str, jobs: Sequence[Job], options: Mapping[str, Any], out: Path, expected: Sequence[Path], timeout: float
) -> None:
    path = Path(out) / "jobs.json"
    path.write_text(json.dumps([{**dataclasses.asdict(job), "simulation": options.get(job.name, {})} for job in jobs]))
    job = run_worker(processes, worker, path, out, timeout=timeout)
    missing = [path for path in expected if not path.exists()]
    assert not missing, f"no {missing[0]} (exit code {job.returncode}):\n{job.stdout[-3000:]}\n{job.stderr[-6000:]}"
