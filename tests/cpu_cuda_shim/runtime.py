"""torch.cuda itself: one GPU per process, whose streams are empty and whose random numbers are the CPU's."""

import contextlib
import logging
import os
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch

from .callers import stand_in


class Stream:
    """A stream on which nothing is ever waiting; also a context."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *exception: Any) -> None:
        pass

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    synchronize = wait_event = wait_stream = record_event = _nothing


class Event:
    """An event that has happened, at once."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    record = synchronize = wait = _nothing

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "Event") -> float:
        return 0.0


STREAM = Stream()
GIB = 1 << 30
PROPERTIES = SimpleNamespace(name="CPU", major=9, minor=0, total_memory=16 * GIB, multi_processor_count=1)

NOTHING = "empty_cache ipc_collect reset_peak_memory_stats set_device set_stream synchronize _lazy_init".split()
NO_MEASUREMENT = """clock_rate device_memory_used max_memory_allocated max_memory_reserved memory_allocated memory_reserved power_draw
temperature utilization""".split()


def values() -> dict[str, Any]:
    """What functions of torch.cuda return, by name."""
    return {
        **dict.fromkeys(NOTHING),
        **dict.fromkeys(NO_MEASUREMENT, 0),
        "current_device": 0,
        "current_stream": STREAM,
        "default_stream": STREAM,
        "device_count": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "get_device_capability": (PROPERTIES.major, PROPERTIES.minor),
        "get_device_name": PROPERTIES.name,
        "get_device_properties": PROPERTIES,
        "is_available": True,
        "is_current_stream_capturing": False,
        "is_initialized": True,
        "mem_get_info": (8 * GIB, 16 * GIB),
    }


def install() -> None:
    """Patch torch.cuda."""
    for name, value in values().items():
        stand_in(torch.cuda, name, lambda *args, _value=value, **kwargs: _value)
    stand_in(torch.cuda, "memory_stats", lambda *args, **kwargs: defaultdict(int))
    stand_in(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    stand_in(torch.cuda, "_lazy_call", lambda call, **kwargs: call())
    torch.cuda.Stream, torch.cuda.Event = Stream, Event
    for name in ("range_push", "range_pop"):
        stand_in(torch.cuda.nvtx, name, lambda *args, **kwargs: None)
    stand_in(torch.cuda.nvtx, "range", lambda *args, **kwargs: contextlib.nullcontext())
    _install_random_numbers()


def _install_random_numbers() -> None:
    generator = torch.default_generator

    def get_state(*args: Any, **kwargs: Any) -> torch.Tensor:
        return generator.get_state()

    def set_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        generator.set_state(state)

    for owner in (torch.cuda, torch.cuda.random):
        stand_in(owner, "get_rng_state", get_state)
        stand_in(owner, "set_rng_state", set_state)
        for name in ("manual_seed", "manual_seed_all"):
            stand_in(owner, name, lambda seed: generator.manual_seed(int(seed)))
        stand_in(owner, "initial_seed", torch.initial_seed)
    torch.cuda.default_generators = (generator,)
    torch._C._cuda_setRNGState = set_state  # Megatron calls it past torch.cuda
    # It warns at each weight that drawing the GPU's random numbers moved the CPU's: here they are the same.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
