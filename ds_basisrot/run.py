"""`python -m ds_basisrot.run script.py ...` or `... -m module ...`: activates ds_basisrot, then runs the script as `__main__`.

For places where PyTorch's autoload is switched off, and for launchers: `torchrun -m ds_basisrot.run train.py ...`,
`deepspeed --module ds_basisrot.run train.py ...`.
"""

import importlib.util
import os
import runpy
import sys

from ds_basisrot._activation import install_hooks

USAGE = "usage: python -m ds_basisrot.run [-m] script_or_module [arguments ...]"


def main(arguments: list[str]) -> None:
    """Run the script or module that `arguments` name, with the rest of them as its own arguments.

    Raises:
        SystemExit: nothing to run (code 2, one line on stderr), or whatever the script itself raises.
    """
    install_hooks("python -m ds_basisrot.run")
    arguments = list(arguments)
    from_launcher = []  # launchers put --local_rank=N between the module and the script, for the script to read
    while arguments and arguments[0].startswith(("--local_rank=", "--local-rank=")):
        from_launcher.append(arguments.pop(0))
    if arguments and arguments[0] in ("-h", "--help"):
        print(USAGE)
        return
    as_module = arguments[:1] == ["-m"]
    if as_module:
        arguments.pop(0)
    if not arguments or arguments[0].startswith("-"):
        _refuse(USAGE)
    target, *rest = arguments
    sys.argv = [target, *from_launcher, *rest]
    if as_module:
        _run_module(target)
    else:
        _run_script(target)


def _run_module(name: str) -> None:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if not error.name or not f"{name}.".startswith(f"{error.name}."):
            raise  # a parent package exists, but one of its own imports failed
        spec = None
    if spec is None:
        _refuse(f"ds_basisrot.run: no module named {name!r}; give a module that Python can import from here")
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _run_script(path: str) -> None:
    if not os.path.exists(path):
        _refuse(f"ds_basisrot.run: no such script: {path!r}; use -m to run a module")
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(path))  # as `python script.py` does; -m had put the current folder there
    runpy.run_path(path, run_name="__main__")


def _refuse(line: str) -> None:
    print(line, file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
