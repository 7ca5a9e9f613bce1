"""Notes the collectives that a process begins. Needs no Megatron."""

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

P2P = ("send", "recv_")


class Recorder(TorchDispatchMode):
    """Notes the collectives that begin in it, messages between two ranks left out.

    Attributes:
        calls: (name, ranks of the group).
    """

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[str, list[int]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        package, _, name = function._schema.name.partition("::")
        if package == "c10d" and name not in P2P:
            groups = [a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())]
            self.calls.append((name, dist.get_process_group_ranks(dist.ProcessGroup.unbox(groups[0]))))
        return function(*args, **(kwargs or {}))
