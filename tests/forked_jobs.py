"""Starts the ranks of a job as forks of a process that has imported what takes longest to import.

Half of what a job of a few small cases takes is importing torch and DeepSpeed in every rank. With --full jobs start as users start them,
under torchrun, where ranks share no imported module and no order of hashes.

Run as a script, this file is the process that forks: it imports the modules that its arguments name, then reads jobs from its standard
input and answers each with its exit code, a line of JSON each.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

GRACE_S = 10.0
"""Between a rank's failure, or the end of a job's time, and the end of the other ranks by force."""

under_torchrun = False
"""Whether jobs start under torchrun instead."""

_servers: dict[tuple[str, ...], subprocess.Popen] = {}


def run(
    modules: Sequence[str], processes: int, script: Path, *arguments: Any, env: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess:
    """Run a script in so many ranks; returns its exit code, of the first rank that failed, and what all ranks printed.

    Args:
        modules: that the ranks need not import.
        processes: number of ranks.
        script: what each runs.
        arguments: of the script.
        env: environment variables; RANK and its like are added.
        timeout: in seconds.

    Raises:
        subprocess.TimeoutExpired: it took longer.
    """
    arguments, port = [str(argument) for argument in arguments], str(free_port())
    if under_torchrun:
        launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={processes}", "--master_addr=127.0.0.1", f"--master_port={port}"]
        command = [sys.executable, *launcher, str(script), *arguments]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    with tempfile.TemporaryDirectory() as folder:
        outputs = [os.path.join(folder, name) for name in ("stdout", "stderr")]
        job = {
            "processes": processes,
            "argv": [str(script), *arguments],
            "env": {
                **env,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes)),
            },
            "cwd": os.getcwd(),
            "outputs": outputs,
            "timeout": timeout,
        }
        server = _server(tuple(modules))
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        line = server.stdout.readline()
        assert line, f"the process that forks ranks has ended (exit code {server.wait()}); its error is above"
        answer = json.loads(line)
        stdout, stderr = (Path(output).read_text(errors="replace") if os.path.exists(output) else "" for output in outputs)
    if answer["timed_out"]:
        raise subprocess.TimeoutExpired(job["argv"], timeout, stdout, stderr)
    return subprocess.CompletedProcess(job["argv"], answer["code"], stdout, stderr)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _server(modules: tuple[str, ...]) -> subprocess.Popen:
    if modules not in _servers:
        command = [sys.executable, __file__, *modules]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        server = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        _servers[modules] = server
        atexit.register(_end, server)
    return _servers[modules]


def _end(server: subprocess.Popen) -> None:
    with server:  # closes its input, which ends it, and waits
        pass


# -- the process that forks ------------------------------------------------------------------------------------------------------------


def _serve(modules: Sequence[str]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what modules print is no answer
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # no collection in a rank looks at what all share
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads after importing {', '.join(modules)}: they would be missing in forks"
    for line in sys.stdin.buffer.raw:
        job = json.loads(line)
        ranks = {}
        for rank in range(job["processes"]):
            pid = os.fork()
            if pid == 0:
                answers.close()
                _be_rank(rank, job)
                return
            ranks[pid] = rank
        answers.write(json.dumps(_wait(ranks, job["timeout"])) + "\n")
        answers.flush()


def _be_rank(rank: int, job: Mapping[str, Any]) -> None:
    """Become what a new process would be that runs the script."""
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(job["env"], RANK=str(rank), LOCAL_RANK=str(rank))
    os.chdir(job["cwd"])
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for descriptor, path in zip((1, 2), job["outputs"]):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    sys.argv = job["argv"]
    paths = [os.path.dirname(sys.argv[0]), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:1] = [path for path in paths if path not in sys.path[1:]]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _wait(ranks: dict[int, int], timeout: float) -> dict[str, Any]:
    """Wait for all ranks, named by their process ids; end them where one fails, time is over, or the tests have gone."""
    code, timed_out, ending, end = 0, False, None, time.monotonic() + timeout
    while ranks:
        for pid in list(ranks):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                code = code or os.waitstatus_to_exitcode(status)
                del ranks[pid]
        timed_out = timed_out or (ranks and time.monotonic() > end)
        gone = select.select([0], [], [], 0.02)[0]  # nothing is sent before the answer
        if ending is None and (code or timed_out or gone):
            ending = time.monotonic()
            _signal(ranks, signal.SIGTERM)
        elif ending is not None and time.monotonic() > ending + GRACE_S:
            _signal(ranks, signal.SIGKILL)
    return {"code": code, "timed_out": bool(timed_out)}


def _signal(ranks: Mapping[int, int], number: int) -> None:
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, number)


if __name__ == "__main__":
    _serve(sys.argv[1:])
