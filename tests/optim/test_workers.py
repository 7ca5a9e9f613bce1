"""Tasks on several threads: all of them run, what fails is raised, torch's thread numbers stay as they were, results as on one thread."""

import os
import threading

import pytest
import torch
from torch import nn

from ds_basisrot import BasisRotation
from ds_basisrot.optim import workers


@pytest.fixture
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def run_alike(tasks):
    workers.run(tasks, lambda: [1] * len(tasks))


def test_every_task_runs_once_on_threads_of_one_each(four_threads):
    ran = []
    run_alike([lambda i=i: ran.append((i, threading.current_thread().name, torch.get_num_threads())) for i in range(50)])
    assert sorted(i for i, *_ in ran) == list(range(50))
    assert all(name.startswith("ds_basisrot") and threads == 1 for _, name, threads in ran)
    assert torch.get_num_threads() == 4


def test_threads_made_afterwards_have_torchs_number(four_threads):
    run_alike([lambda: None] * 8)
    seen = []
    later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert seen == [4]


def test_a_task_larger_than_a_share_has_all_threads(four_threads):
    threads = {}
    costs = [100, 30, 1, 1, 1, 1, 1, 1, 1, 1]
    workers.run([lambda i=i: threads.update({i: torch.get_num_threads()}) for i in range(10)], lambda: costs)
    assert threads == {0: 4, 1: 4, **dict.fromkeys(range(2, 10), 1)}


def test_one_thread_runs_them_in_their_order_and_asks_for_no_cost():
    before, order = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        workers.run([lambda i=i: order.append((i, threading.current_thread())) for i in (1, 3, 2)], costs=None)
    finally:
        torch.set_num_threads(before)
    assert order == [(i, threading.main_thread()) for i in (1, 3, 2)]


def test_an_error_is_raised_after_all_tasks_have_ended(four_threads):
    ran = []

    def fail():
        raise RuntimeError("this one")

    with pytest.raises(RuntimeError, match="this one"):
        run_alike([fail, *(lambda i=i: ran.append(i) for i in range(20))])
    assert sorted(ran) == list(range(20))


def test_tasks_run_without_gradients(four_threads):
    enabled = []
    run_alike([lambda: enabled.append(torch.is_grad_enabled())] * 8)
    assert enabled == [False] * 8


def test_a_forked_process_makes_its_own_threads(four_threads):
    run_alike([lambda: None] * 8)
    child = os.fork()
    if child == 0:
        ran = []
        try:
            run_alike([lambda i=i: ran.append(i) for i in range(8)])
        finally:
            os._exit(0 if len(ran) == 8 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_weights_are_those_of_one_thread_within_rounding(four_threads):
    shapes, results = [(40, 24), (24, 24), (3, 16, 20), (64, 96), (8, 8)], []
    for threads in (1, 4):
        torch.set_num_threads(threads)
        generator = torch.Generator().manual_seed(0)
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        optimizer = BasisRotation([{"params": parameters, "rotate": True}], refresh_period=3)
        for _ in range(8):
            for p in parameters:
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
        results.append(torch.cat([p.detach().flatten() for p in parameters]))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)
