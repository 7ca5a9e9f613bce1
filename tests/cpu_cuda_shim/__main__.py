"""`python -m cpu_cuda_shim SCRIPT ARGUMENTS` or `-m MODULE ARGUMENTS`: runs it, as it is, on CPUs and gloo; also under torchrun."""

import os
import runpy
import sys
from multiprocessing import spawn
from typing import Any


def main(arguments: list[str]) -> None:
    """Run a script or module as `__main__`.

    Args:
        arguments: the path of a script, or -m and the name of a module; then its own arguments.
    """
    module = arguments[:1] == ["-m"]
    target, *rest = arguments[module:] or [""]
    if not target:
        sys.exit("usage: python -m cpu_cuda_shim (SCRIPT | -m MODULE) ARGUMENTS...")
    sys.argv = [target, *rest]
    spawn.get_preparation_data = without_script(spawn.get_preparation_data)
    if module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(target)))
        runpy.run_path(target, run_name="__main__")


def without_script(prepared: Any) -> Any:
    """What a spawned process is told, but for the script: importing it takes a checkpoint's helpers many seconds, and none needs it."""
    return lambda name: {key: value for key, value in prepared(name).items() if not key.startswith("init_main_from_")}


if __name__ == "__main__":
    main(sys.argv[1:])
