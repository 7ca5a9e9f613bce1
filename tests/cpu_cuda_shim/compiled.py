"""What Megatron's scripts compile at start, and need not: fused GPU kernels, and the index builders of its data sets."""

import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

import wrapt

COMPILING = {"megatron.legacy.fused_kernels": "load", "megatron.core.datasets.utils": "compile_helpers"}
HELPERS = "megatron.core.datasets.helpers_cpp"


class WheelsHelpers:
    """Finds the data sets' C++ helpers in the installed megatron-core, for a checkout in which they were not built."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != HELPERS:
            return None
        try:
            files = importlib.metadata.files("megatron-core") or []
        except importlib.metadata.PackageNotFoundError:
            return None
        built = [file.locate() for file in files if file.name.startswith("helpers_cpp.") and file.suffix == ".so"]
        return importlib.util.spec_from_file_location(name, built[0]) if built else None


def install() -> None:
    """Skip the compilers; look for the helpers in the wheel after everywhere else."""
    for module, function in COMPILING.items():
        wrapt.register_post_import_hook(lambda imported, _name=function: setattr(imported, _name, lambda *args: None), module)
    sys.meta_path.append(WheelsHelpers)
