"""Adam in a rotated basis and asynchronous pipelines for DeepSpeed; the public names are loaded when first used.

Importing this package explicitly always activates it, whatever `DS_BASISROT_AUTOLOAD` says: that variable only switches off what
PyTorch's autoload does unasked. The import itself is cheap and does not import torch.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from ds_basisrot import _activation

if TYPE_CHECKING:
    from ds_basisrot.deepspeed_plugin.stopping import StopOnSignal
    from ds_basisrot.optim.basis_rotation import BasisRotation
    from ds_basisrot.optim.routing import param_groups, tag

__version__ = "0.1.0"
__all__ = ["BasisRotation", "StopOnSignal", "param_groups", "tag"]

# public name -> module that defines it
_HOMES = {
    "BasisRotation": "ds_basisrot.optim.basis_rotation",
    "StopOnSignal": "ds_basisrot.deepspeed_plugin.stopping",
    "param_groups": "ds_basisrot.optim.routing",
    "tag": "ds_basisrot.optim.routing",
}


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'ds_basisrot' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


if not getattr(sys.modules.get("ds_basisrot_autoload"), "importing", False):
    _activation.install_hooks("import ds_basisrot")
