"""Lets Megatron, which says 'cuda' everywhere, run on CPUs and gloo: import this before megatron.

Importing it patches torch for the whole process, so tests do that in processes of their own (`python -m cpu_cuda_shim SCRIPT`, or an
import at the top of a worker). `pytest -p cpu_cuda_shim` does it for a session that only tests Megatron.

Only Megatron and torch itself get the stand-ins. Calls from the packages under test reach torch as it is, so a product that says 'cuda'
where it means a tensor's device fails here as it would on any machine without a GPU.
"""

import os

# What torch.compile makes of patched functions is not what is tested.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

from . import distributed, factories, missing, movement, runtime

_installed = False


def install() -> None:
    """Patch torch and what Megatron imports, once."""
    global _installed
    if not _installed:
        _installed = True
        for part in (factories, movement, runtime, distributed, missing):
            part.install()


install()
