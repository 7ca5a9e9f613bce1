"""What checkpoints must keep, case by case; every function runs on all ranks of a world and returns what a test compares."""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from checkpoint_run import OWN, Run, differing, everything
from megatron_job import Job

ADAM = {"pipeline": {"schedule": "async_1f1b"}}
PARAMS = {"refresh_period": 2}
ROTATED = {"optimizer": {"type": "BasisRotation", "params": PARAMS}}
BOTH = {**ROTATED, **ADAM}
EXACT = {"optimizer": {"type": "BasisRotation", "params": {**PARAMS, "tp_mode": "exact"}}, **ADAM}
OTHER_PERIOD = {"optimizer": {"type": "BasisRotation", "params": {"refresh_period": 3}}, **ADAM}
ONE_SIDED = {"optimizer": {"type": "BasisRotation", "params": {**PARAMS, "geometry": "unilateral"}}, **ADAM}

SAVED_AFTER, LATER = 3, 4  # steps


def resumes(job: Job) -> Callable[[Path], dict[str, Any]]:
    """A job that is saved and goes on, and one of another seed that loads, saves again, and goes on."""

    def run(folder: Path) -> dict[str, Any]:
        first = Run(job)
        first.train(SAVED_AFTER)
        first.save(folder / "first")
        before = first.tensors()
        first.train(LATER)
        first.drain()
        second = Run(dataclasses.replace(job, seed=job.seed + 1))
        second.load(folder / "first")
        second.save(folder / "second")
        second.train(LATER)
        second.drain()
        moved = max((first.tensors()[name] - before[name]).abs().max().item() for name in before if before[name].numel())
        return {
            "loaded": differing(*(comparable(everything(folder / each)) for each in ("first", "second"))),
            "tensors": differing(first.tensors(), second.tensors()),
            "reports": differing(first.reports[SAVED_AFTER:], second.reports),
            "moved": moved,
            "finite": all(norm is not None and 0 < norm < 1e6 for _, norm in first.reports),
        }

    return run


def saves(name: str, job: Job) -> Callable[[Path], dict[str, Any]]:
    """A checkpoint for `loads`, and the losses of the steps after it."""

    def run(folder: Path) -> dict[str, Any]:
        first = Run(job)
        first.train(SAVED_AFTER)
        first.save(folder.parent / name)
        first.train(LATER)
        first.drain()
        return {"reports": first.reports[SAVED_AFTER:]}

    return run


def loads(name: str, job: Job) -> Callable[[Path], dict[str, Any]]:
    """What a job says that loads it, what differs when it is saved again, and how it goes on; or the error."""

    def run(folder: Path) -> dict[str, Any]:
        second = Run(dataclasses.replace(job, seed=job.seed + 1))
        with lines() as said:
            try:
                second.load(folder.parent / name)
            except ValueError as error:
                return {"refused": str(error)}
        second.save(folder / "again")
        second.train(LATER)
        second.drain()
        saved, again = (comparable(everything(path)) for path in (folder.parent / name, folder / "again"))
        return {"said": list(said), "loaded": differing(saved, again), "reports": second.reports}

    return run


def comparable(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The model's weights, and what is ours. What Megatron stores of an optimizer has padding in it that nobody writes."""
    return {key: value for key, value in checkpoint.items() if key.startswith((OWN, "decoder", "embedding", "output")) or "|" in key}


@contextmanager
def lines() -> Iterator[list[str]]:
    """What is logged meanwhile."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ds_basisrot")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


PAIR = Job("pair", pp=2, microbatches=2, clip=0.5)
SQUARE = Job("square", pp=2, dp=2, microbatches=2, clip=0.5)
SLICED = Job("sliced", pp=2, tp=2, microbatches=2, clip=0.5, swiglu=True, query_groups=2)


def case(base: Job, basisrot: Mapping[str, Any] | None, **changes: Any) -> Job:
    """A variant of a job."""
    return dataclasses.replace(base, basisrot=basisrot, **changes)


def wider(job: Job) -> Job:
    """The same on twice as many replicas."""
    return dataclasses.replace(job, dp=2 * job.dp)


# Processes -> cases of one world, each saved and loaded by a job of its own.
RESUMES: dict[int, dict[str, Job]] = {
    2: {
        "adam": case(PAIR, ADAM),
        "one stage distributed": case(PAIR, ROTATED, pp=1, dp=2, distributed_optimizer=True),
        "one stage bf16": case(PAIR, ROTATED, pp=1, dp=2, bf16=True),
        "both tied": case(PAIR, BOTH, tied=True, microbatches=1),
        "both experts": case(PAIR, BOTH, experts=4),
    },
    4: {
        "adam four tied": case(PAIR, ADAM, pp=4, microbatches=1, tied=True),
        "both": case(SQUARE, BOTH),
        "both bf16 tied": case(SQUARE, BOTH, bf16=True, tied=True),
        "both distributed": case(SQUARE, BOTH, distributed_optimizer=True),
        "both distributed bf16 tied": case(SQUARE, BOTH, bf16=True, tied=True, distributed_optimizer=True),
        "both distributed experts": case(SQUARE, BOTH, experts=4, distributed_optimizer=True),
        "both blockwise": case(SLICED, BOTH),
        "both exact": case(SLICED, EXACT),
        "both blockwise distributed bf16": case(SLICED, BOTH, distributed_optimizer=True, bf16=True),
        "both exact distributed bf16": case(SLICED, EXACT, distributed_optimizer=True, bf16=True),
    },
}

TIED = case(PAIR, BOTH, tied=True, microbatches=1)
TIED_BF16 = dataclasses.replace(TIED, bf16=True, distributed_optimizer=True)

Case = tuple[Job, Callable[[Path], dict[str, Any]]]


def both(name: str, first: Job, *others: tuple[str, Job]) -> dict[str, Case]:
    """A checkpoint, and who loads it."""
    return {f"saves {name}": (first, saves(name, first)), **{each: (job, loads(name, job)) for each, job in others}}


# World -> its cases. The second world loads what the first has saved, and the third what the second has.
CASES: dict[str, dict[str, Case]] = {
    "2": both("of Adam", case(PAIR, None))  # before anything is patched
    | {f"resumes {name}": (job, resumes(job)) for name, job in RESUMES[2].items()}
    | both("plain of 2", TIED)
    | both("distributed of 2", TIED_BF16)
    | both(
        "two stages",
        case(PAIR, BOTH),
        ("other stages", case(PAIR, BOTH, pp=1, dp=2)),
        ("other period", case(PAIR, OTHER_PERIOD)),
        ("other geometry", case(PAIR, ONE_SIDED)),
        ("other optimizer", case(PAIR, ADAM)),
    )
    | {
        "async after Adam": (case(PAIR, ADAM), loads("of Adam", case(PAIR, ADAM))),
        "both after Adam": (case(PAIR, BOTH), loads("of Adam", case(PAIR, BOTH))),
    },
    "4": {f"resumes {name}": (job, resumes(job)) for name, job in RESUMES[4].items()}
    | {"more replicas": (wider(TIED), loads("plain of 2", wider(TIED)))}
    | {"more replicas distributed": (wider(TIED_BF16), loads("distributed of 2", wider(TIED_BF16)))}
    | both("plain of 4", wider(TIED), ("more stages", case(TIED, BOTH, pp=4)))
    | both("distributed of 4", wider(TIED_BF16))
    | both(
        "blockwise",
        case(SLICED, BOTH),
        ("blockwise becomes exact", case(SLICED, EXACT)),
        ("blockwise on other ranks", case(SLICED, BOTH, tp=1, dp=2)),
    )
    | both("exact", case(SLICED, EXACT), ("exact on other ranks", case(SLICED, EXACT, tp=1, dp=2))),
    "2 again": {
        "fewer replicas": (TIED, loads("plain of 4", TIED)),
        "fewer replicas distributed": (TIED_BF16, loads("distributed of 4", TIED_BF16)),
    },
}
