"""Fixtures of the tests that compare real processes with a simulation in this one."""

import pytest
import torch
from processes import run_cases
from simulate import load


@pytest.fixture(scope="module")
def one_thread():
    """As in the engine's processes: sums in the same order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """Runs the module's JOBS, cases by number of processes, on its WORKER; gives what loads a case's results by both."""
    folders = {}
    for processes, cases in request.module.JOBS.items():
        folders[processes] = tmp_path_factory.mktemp(f"{request.module.__name__}_{processes}")
        run_cases(processes, cases, folders[processes], getattr(request.module, "WORKER", "engine_worker.py"))
    return lambda processes, name: load(folders[processes], name)
