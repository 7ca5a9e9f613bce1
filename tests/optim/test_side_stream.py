"""Refreshes beside other updates: the second stream waits for the first and is waited for, and every parameter is updated once."""

from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch import nn

from ds_basisrot import BasisRotation
from ds_basisrot.optim import workers
from ds_basisrot.optim.side_stream import SideStream


class FakeAccelerator:
    """Stands for torch.cuda: records which stream waits for which, and which one is current."""

    def __init__(self):
        self.log = []
        self.current = self.Stream("main")

    def Stream(self, name="side", device=None):
        return SimpleNamespace(name=name, wait_stream=lambda other: self.log.append(f"{name} waits for {other.name}"))

    def current_stream(self, device):
        return self.current

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before


def test_the_streams_wait_for_each_other_around_the_work(monkeypatch):
    fake = FakeAccelerator()
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    monkeypatch.setattr(SideStream, "_streams", {})
    for _ in range(2):
        side = SideStream(torch.device("cuda", 0))
        with side:
            fake.log.append(f"work on {fake.current.name}")
        fake.log.append(f"work on {fake.current.name}")
        side.join()
    assert fake.log == ["side waits for main", "work on side", "work on main", "main waits for side"] * 2
    assert len(SideStream._streams) == 1


def test_a_processor_has_no_second_stream():
    side = SideStream(torch.device("cpu"))
    with side:
        pass
    side.join()


def test_updating_beside_is_updating_in_any_order(monkeypatch):
    weights = []
    for beside in (False, True):
        generator = torch.Generator().manual_seed(0)
        parameters = [nn.Parameter(torch.zeros(6, 4)) for _ in range(5)]
        optimizer = BasisRotation(parameters, refresh_period=3)

        def run(tasks, costs, optimizer=optimizer):
            rotated = [(task.args[1], task.args[0]) for task in tasks]
            optimizer._update_beside(rotated, tasks[0].args[2])

        monkeypatch.setattr(workers, "run", run if beside else workers.run)
        for _ in range(8):
            for p in parameters:
                p.grad = torch.randn(6, 4, generator=generator)
            optimizer.step()
        weights.append(torch.stack([p.detach() for p in parameters]))
    assert torch.equal(*weights)
