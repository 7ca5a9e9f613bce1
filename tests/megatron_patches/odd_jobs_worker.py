"""A rank that runs all odd jobs of its world's size: `torchrun ... odd_jobs_worker.py OUT` leaves OUT/<name>_<rank>.pt."""

import os
import sys
from datetime import timedelta
from pathlib import Path

import cpu_cuda_shim  # noqa: F401  before Megatron
import torch
import torch.distributed as dist


def main(out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    import odd_jobs

    import megatron_patches

    jobs = odd_jobs.PAIRS if dist.get_world_size() == 2 else odd_jobs.SQUARES
    for job in jobs:
        torch.save(job(), Path(out) / f"{job.__name__}_{dist.get_rank()}.pt")
        if job is jobs[-1]:
            break  # its pipeline does not go on
        megatron_patches.drain()
        dist.barrier()
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an interpreter that ends by itself


if __name__ == "__main__":
    main(*sys.argv[1:])
