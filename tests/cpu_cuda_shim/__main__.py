"""`python -m cpu_cuda_shim SCRIPT ARGUMENTS` or `-m MODULE ARGUMENTS`: runs it, as it is, on CPUs and gloo; also under torchrun."""

import os
import runpy
import sys


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
    if module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(target)))
        runpy.run_path(target, run_name="__main__")


main(sys.argv[1:])
