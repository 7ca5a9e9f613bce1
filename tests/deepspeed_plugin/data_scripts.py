"""Iterators of the scripts of calls, and what a script must give: the synchronous meaning of each call, simulated with its delays.

Steps of a script: ["new", name, spec] makes an iterator, ["again", name, spec] lets one of kind "renewed" begin anew, ["train", name] is
one train_batch() with it, ["evaluate", spec], ["drain"], ["barrier"], ["reset"], ["batch_size", samples], ["save"], ["load", case].

A spec: "start" (0) of its microbatches, "count" (None: endless), "rows" {index: samples in that microbatch}, "kind" ("generator": a
generator; "list": Python's list iterator; "renewed": one object for all epochs), "short_replica" {replica: count}.
"""

import itertools

import torch
from models import BATCH, OPTIMIZERS, blocks, microbatch
from simulate import Stage

from ds_basisrot.pipeline.simulator import PipelineSimulator


def microbatches(spec, replica=0):
    """The microbatches of a spec."""
    count = spec.get("short_replica", {}).get(str(replica), spec.get("count"))
    rows = {int(k): v for k, v in spec.get("rows", {}).items()}
    for index in itertools.count(spec.get("start", 0)) if count is None else range(spec.get("start", 0), spec.get("start", 0) + count):
        x, y = microbatch(index, replica)
        n = rows.get(index, BATCH)
        yield x.repeat(-(-n // BATCH), 1)[:n], y.repeat(-(-n // BATCH), 1)[:n]


def make_iterator(spec, replica, reads):
    """An iterator that notes what is read of it."""
    if spec.get("kind") == "renewed":
        return Renewed(spec, replica)
    if spec.get("kind") == "list":
        return iter(list(microbatches(spec, replica)))

    def noted():
        for index, each in enumerate(microbatches(spec, replica)):
            reads.append(index)
            yield each

    return noted()


class Renewed:
    """The iterator of a loader that is its own iterator, as DeepSpeed's is, or that keeps its workers over epochs."""

    def __init__(self, spec, replica):
        self.begin(spec, replica)

    def begin(self, spec, replica):
        self._left = microbatches(spec, replica)

    def __iter__(self):
        return self

    def __next__(self):
        return next(self._left)


def expected(case):
    """(what each call gives, weights by name for each stage, labels in the order of training) of a case without replicas."""
    stages, gas = case["stages"], case.get("gas", 1)
    layers = blocks(stages)
    parts = [torch.nn.ModuleDict({str(i): layers[i] for i in (2 * k, 2 * k + 1)}) for k in range(stages)]
    params = {k: v for k, v in OPTIMIZERS[case.get("optimizer", "AdamW")]["params"].items() if k != "torch_adam"}
    optimizers = [getattr(torch.optim, case.get("optimizer", "AdamW"))(p.parameters(), **params) for p in parts]
    loss_fn = torch.nn.functional.mse_loss
    simulator = PipelineSimulator([Stage(p) for p in parts], loss_fn, optimizers, accumulation=gas)
    gave, seen, left, last = [], [], {}, None
    for step, *arguments in case["script"]:
        if step in ("new", "again"):
            name, spec = arguments
            left[name] = microbatches(spec)
            last = None if last == name else last
        elif step == "train":
            name = arguments[0]
            batch = list(itertools.islice(left[name], gas))
            if last != name or len(batch) < gas:
                simulator.cut()
            last = name
            if len(batch) < gas:
                left[name], last = iter(batch), None
                gave.append("StopIteration")
                continue
            seen += [y for _, y in batch]
            gave.append(simulator.train_batch([batch]))
        elif step == "evaluate":
            with torch.no_grad():
                gave.append(
                    float(
                        sum(loss_fn(_forward(simulator.stages, x), y) for x, y in itertools.islice(microbatches(arguments[0]), gas)) / gas
                    )
                )
        elif step in ("drain", "save"):
            simulator.cut()
        elif step == "batch_size":
            gas = arguments[0] // BATCH
            simulator.set_accumulation(gas)
    return gave, [{name: p.detach().clone() for name, p in part.named_parameters()} for part in parts], seen


def _forward(stages, x):
    for stage in stages:
        stage.eval()
        x = stage(x)
        stage.train()
    return x
