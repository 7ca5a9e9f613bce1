"""Runs sleeping DeepSpeed pipelines under several schedules, one after the other, and says how near each comes to having no bubbles."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

JOB = Path(__file__).with_name("pipeline_job.py")

MICROBATCH_ROWS = 4

# Of each schedule: whether the pipeline drains at the end of each call of train_batch().
SCHEDULES = {"async_1f1b": False, "1f1b": True}

# Optimizers as DeepSpeed's JSON names them, and what their parameters need so that DeepSpeed takes torch's instead of compiling its own.
OPTIMIZERS: dict[str, dict[str, Any]] = {"SGD": {}, "BasisRotation": {}, "AdamW": {"torch_adam": True}, "NAdam": {}}

# Seconds that a start may take, on a machine that is busy with other things too: in any case, for each process, for each case.
START_S, START_PROCESS_S, START_CASE_S = 60, 20, 20

SLOWER_THAN_EXPECTED = 4
"""The sleeping may take so many times as long as it would without any other work before the job counts as hung."""

STOP_S = 45
"""torchrun, asked to end, ends its processes within 30 seconds."""

TAIL_LINES = 30

# Where torchrun's log in stderr begins to tell of processes that end.
TORCHRUN_REPORT = re.compile(r"^[EW]\d{4} .*torch/distributed/elastic/", re.MULTILINE)


class JobFailed(RuntimeError):
    """The job ended early, or did not end in time; says how, with the last lines of its stderr."""


@dataclass(frozen=True)
class Setting:
    """What all cases of a comparison share.

    Attributes:
        stages: one process each.
        forward_ms, backward_ms: that each stage sleeps for each microbatch.
        microbatches: how long a case is measured, in the work of that many microbatches on one stage.
    """

    stages: int
    forward_ms: float
    backward_ms: float
    microbatches: int

    @property
    def work_ms(self) -> float:
        """Of a microbatch on one stage."""
        return self.forward_ms + self.backward_ms


@dataclass(frozen=True)
class Case:
    """A schedule of `SCHEDULES`, microbatches per update, and an optimizer of `OPTIMIZERS`."""

    schedule: str
    gas: int
    optimizer: str

    def ds_config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": MICROBATCH_ROWS,
            "gradient_accumulation_steps": self.gas,
            "optimizer": {"type": self.optimizer, "params": {"lr": 1e-3, **OPTIMIZERS[self.optimizer]}},
            "pipeline": {"schedule": self.schedule},
            "steps_per_print": 10**9,
        }

    def slots(self, setting: Setting) -> int:
        """The length of a call of train_batch() in the steady state: its microbatches, and the pipeline's filling and draining."""
        return self.gas + (setting.stages - 1 if SCHEDULES[self.schedule] else 0)

    def warm_up_calls(self, setting: Setting) -> int:
        """A pipeline that never drains is full, and its stages are in step, after two microbatches for each; else all calls are alike."""
        return 1 if SCHEDULES[self.schedule] else -(-2 * setting.stages // self.gas)

    def calls(self, setting: Setting) -> int:
        """That count."""
        return -(-setting.microbatches // self.slots(setting))


def flushing_bound(gas: int, stages: int) -> float:
    """The share of the time that stages can work under a schedule that drains after every `gas` microbatches."""
    return gas / (gas + stages - 1)


def expected_s(setting: Setting, cases: Sequence[Case]) -> float:
    """Seconds that the stages sleep, and wait for others that do, over all cases."""
    slots = sum((case.warm_up_calls(setting) + case.calls(setting)) * case.slots(setting) + setting.stages for case in cases)
    return slots * setting.work_ms / 1e3


def measure(setting: Setting, cases: Sequence[Case], limit_s: float | None = None) -> list[float]:
    """Milliseconds per microbatch of each case, in the steady state.

    All cases run in turn in one job of `setting.stages` processes, since starting those takes longer than a measurement.

    Args:
        limit_s: for the whole job (default: several times what it should take).

    Raises:
        JobFailed: the job failed, or took longer than the limit.
    """
    if limit_s is None:
        sleeping_s = SLOWER_THAN_EXPECTED * expected_s(setting, cases)
        limit_s = START_S + START_PROCESS_S * setting.stages + START_CASE_S * len(cases) + sleeping_s
    job = {
        "forward_ms": setting.forward_ms,
        "backward_ms": setting.backward_ms,
        "cases": [
            {"config": case.ds_config(), "warm_up_calls": case.warm_up_calls(setting), "calls": case.calls(setting)} for case in cases
        ],
    }
    with TemporaryDirectory() as folder:
        path = Path(folder) / "cases.json"
        path.write_text(json.dumps(job))
        output = _torchrun(setting.stages, path, limit_s)
    figures = [json.loads(line)["ms_per_microbatch"] for line in output.splitlines() if line.startswith('{"ms_per_microbatch"')]
    if len(figures) != len(cases):
        raise JobFailed(f"the job ended with {len(figures)} of {len(cases)} results; the last of its output:\n{_tail(output)}")
    return figures


def _torchrun(processes: int, cases: Path, limit_s: float) -> str:
    """The stdout of the job, which is started as a user's script is, with the plugin switched on whatever the environment says."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--master_addr", "127.0.0.1"]
    command += ["--master_port", str(_free_port()), "-m", "ds_basisrot.run", str(JOB), str(cases)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        _, errors = _end(process)
        raise JobFailed(f"the job did not end within {limit_s:.0f} s; the last of its stderr:\n{_tail(errors)}") from None
    except BaseException:  # such as Ctrl-C
        _end(process)
        raise
    if process.returncode:
        raise JobFailed(f"the job ended with exit code {process.returncode}; the last of its stderr:\n{_tail(errors)}")
    return output


def _end(process: subprocess.Popen) -> tuple[str, str]:
    """Let torchrun end its processes, and itself; its stdout and stderr."""
    process.terminate()
    try:
        return process.communicate(timeout=STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _tail(text: str) -> str:
    """The last lines that the job itself wrote; torchrun's account of the end, which follows them, only where there are none."""
    own, *_ = TORCHRUN_REPORT.split(text, maxsplit=1)
    return "\n".join((own.strip() or text.strip()).splitlines()[-TAIL_LINES:]) or "(nothing)"
