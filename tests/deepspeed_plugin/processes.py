"""Starts jobs of several real processes over gloo."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(HERE)}


def torchrun(processes, script, *arguments, timeout=240):
    """Run `script` under torchrun; returns the finished process with its output as text."""
    port = random.randrange(20000, 40000)
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}", "--master_addr=127.0.0.1"]
    command += [f"--master_port={port}", str(script), *map(str, arguments)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=timeout)


def run_cases(processes, cases, out, worker="engine_worker.py", timeout=240):
    """Run all `cases` of a worker in one job; results land in `out`/<name>."""
    path = Path(out) / "cases.json"
    path.write_text(json.dumps(cases))
    job = torchrun(processes, HERE / worker, path, out, timeout=timeout)
    last = Path(out) / cases[-1]["name"]
    missing = [r for r in range(processes) if not (last / f"rank_{r}.pt").exists()]
    assert not missing, f"ranks {missing} did not finish (exit code {job.returncode}):\n{job.stdout[-3000:]}\n{job.stderr[-6000:]}"
    return job
