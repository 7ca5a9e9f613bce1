"""Runs jobs in real processes over gloo, and their simulation, from a test. Needs no Megatron in the test's own process."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from megatron_job import Job

HERE = Path(__file__).parent


def run_jobs(jobs: Sequence[Job], out: Path, timeout: float = 300) -> None:
    """Run each job in as many processes as it needs; each number of processes is started once. Results: see megatron_shards.load.

    Raises:
        AssertionError: a rank did not finish a job; with the end of what was printed.
    """
    by_size = sorted(jobs, key=lambda job: job.processes)
    for processes, cases in groupby(by_size, key=lambda job: job.processes):
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        cases = list(cases)
        missing = [Path(out, job.name, f"rank_{rank}.pt") for job in cases for rank in range(processes)]
        _run([*launcher, HERE / "megatron_worker.py"], cases, {}, out, missing, timeout)


def run_simulations(jobs: Sequence[Job], out: Path, options: Mapping[str, Mapping[str, Any]] | None = None, timeout: float = 300) -> None:
    """Simulate jobs that have run, all in one process; leaves OUT/<name>/simulated.pt, which torch.load reads.

    Args:
        jobs: that left their results in `out`.
        out: the folder of all results.
        options: by name of a job, what `simulate` takes: delayed, cut_after.
        timeout: in seconds.
    """
    _run([HERE / "megatron_simulation.py"], jobs, options or {}, out, [Path(out, job.name, "simulated.pt") for job in jobs], timeout)


def _run(
    command: Sequence[Any], jobs: Sequence[Job], options: Mapping[str, Any], out: Path, expected: Sequence[Path], timeout: float
) -> None:
    path = Path(out) / "jobs.json"
    path.write_text(json.dumps([{**dataclasses.asdict(job), "simulation": options.get(job.name, {})} for job in jobs]))
    paths = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]  # where another Megatron may be
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, *map(str, command), str(path), str(out)]
    job = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    missing = [path for path in expected if not path.exists()]
    assert not missing, f"no {missing[0]} (exit code {job.returncode}):\n{job.stdout[-3000:]}\n{job.stderr[-6000:]}"
