"""Starts jobs of several real processes over gloo."""

import json
import os
from pathlib import Path

import forked_jobs

HERE = Path(__file__).parent
IMPORTED = ("deepspeed", "torch._inductor.compile_fx", "functorch.compile", "torch.distributed.checkpoint", "deepspeed.checkpoint")
"""What all workers import by themselves or through DeepSpeed, some of it when an engine is made."""


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(HERE)}


def run_job(processes, script, *arguments, timeout=240):
    """Run `script` in so many ranks; returns the finished job with its output as text."""
    return forked_jobs.run(IMPORTED, processes, script, *arguments, env=environment(), timeout=timeout)


def run_cases(processes, cases, out, worker="engine_worker.py", timeout=240):
    """Run all `cases` of a worker in one job; results land in `out`/<name>."""
    path = Path(out) / "cases.json"
    path.write_text(json.dumps(cases))
    job = run_job(processes, HERE / worker, path, out, timeout=timeout)
    last = Path(out) / cases[-1]["name"]
    missing = [r for r in range(processes) if not (last / f"rank_{r}.pt").exists()]
    assert not missing, f"ranks {missing} did not finish (exit code {job.returncode}):\n{job.stdout[-3000:]}\n{job.stderr[-6000:]}"
    return job
