"""A rank of a world that runs cases of checkpoints one after another: `torchrun ... checkpoint_worker.py OUT WORLD CASE...`."""

import json
import multiprocessing
import os
import sys
import traceback
from pathlib import Path

import cpu_cuda_shim  # noqa: F401  before Megatron
import torch
import torch.distributed as dist
from checkpoint_cases import CASES
from megatron.core import parallel_state
from megatron_worker import forget_groups


def main(out: str, world: str, *names: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in names:
        job, run = CASES[world][name]
        parallel_state.initialize_model_parallel(job.tp, job.pp)
        try:
            result = run(Path(out) / name)
        except Exception:  # the other cases tell more than the first failure does
            result = {"error": traceback.format_exc()}
        Path(out, f"{name}.{dist.get_rank()}.json").write_text(json.dumps(result))
        parallel_state.destroy_model_parallel()
        forget_groups()
    dist.barrier()
    for helper in multiprocessing.active_children():  # a queue of Megatron's writers, which would outlive what follows
        helper.terminate()
        helper.join()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an interpreter that ends by itself


if __name__ == "__main__":
    main(*sys.argv[1:])
