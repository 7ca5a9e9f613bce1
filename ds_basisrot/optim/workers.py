"""Several matrices at a time on a processor with several cores: a thread for each, instead of all threads for one after the other.

Products of a few hundred rows, narrow panels and elementwise operations do not share well between threads; whole matrices do.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch

_pools: dict[int, ThreadPoolExecutor] = {}
os.register_at_fork(after_in_child=_pools.clear)  # threads do not survive a fork


def run(tasks: Sequence[Callable[[], None]], costs: Callable[[], Sequence[int]]) -> None:
    """Run independent tasks on torch's number of threads, without gradients.

    A task that is more than one thread's share of the rest gets all threads for itself.

    Args:
        costs: of the tasks, in any unit; asked for where there are several threads to share several tasks.

    Raises:
        Exception: what the first of the failed tasks raised, after all of them have ended.
    """
    threads = torch.get_num_threads()
    if threads == 1 or len(tasks) == 1:
        for task in tasks:
            task()
        return
    waiting = sorted(zip(costs(), tasks), key=lambda task: -task[0])
    left = sum(cost for cost, _ in waiting)
    while waiting and (len(waiting) == 1 or waiting[0][0] * threads > left):
        cost, action = waiting.pop(0)
        action()
        left -= cost
    if waiting:
        results = [_pool(threads).submit(torch.no_grad()(action)) for _, action in waiting]
        errors = [result.exception() for result in results]
        for error in filter(None, errors):
            raise error


def _pool(threads: int) -> ThreadPoolExecutor:
    if threads not in _pools:
        barrier = Barrier(threads)

        def start() -> None:
            # Of this thread, and of every thread whose number is not settled yet, which is undone below; asking for it settles this one's.
            torch.set_num_threads(1)
            torch.get_num_threads()
            barrier.wait()

        pool = ThreadPoolExecutor(threads, thread_name_prefix="ds_basisrot", initializer=start)
        for _ in pool.map(lambda _: None, range(threads)):
            pass
        torch.set_num_threads(threads)
        _pools[threads] = pool
    return _pools[threads]
