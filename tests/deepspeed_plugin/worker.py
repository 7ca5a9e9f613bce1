"""What workers that run cases of real engines share: the start of the process, and cases that must end in an error."""

import faulthandler
import gc
import json
import os
import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import groups


def main(run, limit_s=240):
    """Run the cases of the file that the first argument names, in one process group; results go to the folder of the second.

    Args:
        run: (case, folder of all results) -> None. Nothing may be in flight when it returns: process groups end with each case.
        limit_s: a case that takes longer ends the job with tracebacks.
    """
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # no C++ build at start
    deepspeed.init_distributed("gloo")
    with open(sys.argv[1]) as file:
        cases = json.load(file)
    gc.collect()
    gc.freeze()  # what is imported need not be looked at after every case
    for case in cases:
        faulthandler.dump_traceback_later(limit_s, exit=True)
        if case.get("refused"):
            _run_refused(run, case, sys.argv[2])
        else:
            run(case, sys.argv[2])
            _forget_groups()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def _forget_groups():
    """End the groups of the case's engine: each has a thread that wakes up a hundred times a second, and there are hundreds of cases."""
    dist.barrier()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            deepspeed.comm.destroy_process_group(group)
    for name, value in vars(groups).items():  # which keep groups for the next engine
        if isinstance(value, dist.ProcessGroup):
            setattr(groups, name, None)
        elif name.endswith(("_GROUP", "_GROUP_RANKS")) and isinstance(value, dict):
            value.clear()
    gc.collect()  # engines are in cycles and hold groups, whose threads end with them


def _run_refused(run, case, out):
    """A case whose result is the message of the error that it must end in."""
    os.makedirs(os.path.join(out, case["name"]), exist_ok=True)
    try:
        run(case, out)
        message = None
    except (ValueError, RuntimeError) as error:
        message = str(error)
    torch.save({"message": message}, os.path.join(out, case["name"], f"rank_{dist.get_rank()}.pt"))
    dist.barrier()
