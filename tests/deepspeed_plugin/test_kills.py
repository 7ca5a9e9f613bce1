"""Asynchronous jobs whose ranks are killed at random moments end soon and say why; started again they end as if nothing had happened."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from processes import HERE, environment

RANKS, UPDATES, SAVED_EVERY, LIMIT_S = 4, 12, 3, 60
WORKER = HERE / "kills_worker.py"
# What the ranks that remain say, or the launcher where it was faster.
REASONS = ("lost its connection to stage", "Connection closed by peer", "Connection reset by peer", "Signal 9", "return code = -9")


class Job:
    """A job of RANKS processes under a launcher, known by a mark in their environment."""

    def __init__(self, folder, stages, launcher="torchrun"):
        folder.mkdir(exist_ok=True)
        self.mark, self.output = uuid.uuid4().hex, folder / "output.txt"
        address = ["--master_addr=127.0.0.1", f"--master_port={random.randrange(20000, 40000)}"]
        start = {
            "torchrun": ["torch.distributed.run", f"--nproc_per_node={RANKS}", *address],
            "deepspeed": ["deepspeed.launcher.runner", f"--num_gpus={RANKS}", "--no_local_rank", *address],
        }[launcher]
        command = [sys.executable, "-m", *start, str(WORKER), str(folder), str(stages), str(UPDATES), str(SAVED_EVERY)]
        with self.output.open("w") as output:
            env = {**environment(), "JOB_OF_THIS_TEST": self.mark}
            self.launcher = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)

    def processes(self):
        """The job's processes: {id: environment}."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                variables = dict(entry.split("=", 1) for entry in (path / "environ").read_bytes().decode().split("\0") if "=" in entry)
                ended = (path / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            except (OSError, UnicodeDecodeError):
                continue
            if variables.get("JOB_OF_THIS_TEST") == self.mark and not ended:
                found[int(path.name)] = variables
        return found

    def kill(self, rank):
        """Kill one rank, as soon as it is there; returns whether it was before the job ended."""
        while self.launcher.poll() is None:
            for process, variables in self.processes().items():
                if variables.get("RANK") == str(rank):
                    os.kill(process, signal.SIGKILL)
                    return True
            time.sleep(0.01)
        return False

    def wait_for(self, words):
        """Wait until the job has said something, or ended."""
        while words not in self.output.read_text() and self.launcher.poll() is None:
            time.sleep(0.005)


@contextmanager
def running(*args):
    job = Job(*args)
    try:
        yield job
    finally:
        for process in job.processes():
            os.kill(process, signal.SIGKILL)
        job.launcher.wait()


def finish(folder, stages, launcher="torchrun"):
    """Run a job to its end; returns the results of its ranks."""
    with running(folder, stages, launcher) as job:
        assert job.launcher.wait(120) == 0, job.output.read_text()[-6000:]
    return [torch.load(folder / f"rank_{rank}.pt") for rank in range(RANKS)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Gives the results of a job with so many stages that nobody killed."""
    known = {}

    def run(stages):
        if stages not in known:
            known[stages] = finish(tmp_path_factory.mktemp("undisturbed"), stages)
        return known[stages]

    return run


def moment(seed):
    """(rank to kill, words to wait for, seconds to wait then): while the job starts, or at an update and what follows, a save for one."""
    draw = random.Random(seed)
    rank = draw.randrange(RANKS)
    if draw.random() < 0.2:
        return rank, "", draw.uniform(0.0, 8.0)
    update = draw.randrange(UPDATES + 1)
    return rank, "ready" if update == 0 else f"update {update} is made", draw.uniform(0.0, 0.15)


def check_round(folder, stages, seed, expected, launcher="torchrun"):
    rank, words, delay = moment(seed)
    about = f"seed {seed}: rank {rank} of {stages} stages, {delay:.3f} s after {words or 'the start'!r}"
    with running(folder, stages, launcher) as job:
        job.wait_for(words)
        time.sleep(delay)
        killed, when = job.kill(rank), time.monotonic()
        while job.launcher.poll() is None and time.monotonic() < when + LIMIT_S:
            time.sleep(0.1)
        code, output = job.launcher.poll(), job.output.read_text()
        assert code is not None, f"{about}: the job goes on\n{output[-4000:]}"
        assert killed or code == 0, f"{about}: ended by itself\n{output[-4000:]}"
        if code != 0:
            assert any(reason in output for reason in REASONS), f"{about}\n{output[-4000:]}"
        while job.processes() and time.monotonic() < when + LIMIT_S:
            time.sleep(0.1)
        assert not job.processes(), f"{about}: left running"
    made = max(map(int, re.findall(r"update (\d+) is made", output)), default=0)
    for path in folder.glob("rank_*.pt"):
        path.unlink()
    results = finish(folder, stages, launcher)
    last_saved = (made - 1) // SAVED_EVERY * SAVED_EVERY if made else 0
    assert last_saved <= results[0]["start"] <= made, about
    for its, whole in zip(results, expected, strict=True):
        assert its["start"] == results[0]["start"] and its["start"] % SAVED_EVERY == 0, about
        assert its["losses"] == whole["losses"][its["start"] :], about
        assert its["weights"].keys() == whole["weights"].keys(), about
        assert all(torch.equal(weight, whole["weights"][name]) for name, weight in its["weights"].items()), about
    shutil.rmtree(folder)
    return killed


def test_a_job_whose_rank_is_killed_ends_soon_and_goes_on_bitwise(tmp_path, undisturbed):
    assert check_round(tmp_path / "job", 4, 12, undisturbed(4))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(20))
def test_so_it_does_at_any_moment(tmp_path, undisturbed, seed):
    stages = 2 if seed % 2 else 4
    check_round(tmp_path / "job", stages, seed, undisturbed(stages))


@pytest.mark.full
def test_so_it_does_under_the_launcher_of_deepspeed(tmp_path, undisturbed):
    assert check_round(tmp_path / "job", 4, 16, undisturbed(4), "deepspeed")
