"""`python -m megatron_patches --basisrot-config FILE SCRIPT ARGUMENTS...`: patches Megatron, then runs the script as `__main__`."""

import os
import runpy
import sys

from ds_basisrot.common.blocks import ConfigError

FLAG = "--basisrot-config"
USAGE = f"usage: python -m megatron_patches {FLAG} basisrot.json script.py [arguments ...]"


def main(arguments: list[str]) -> None:
    """Apply the configuration and run the script with the rest of the arguments.

    Raises:
        SystemExit: code 2 and one line on stderr where there is nothing to run or the configuration is refused, or what the script raises.
    """
    config, script, rest = _parse(arguments)
    sys.argv = [script, *rest]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(script))  # as `python script.py` does; -m had put the current folder there
    from . import apply

    try:
        apply(config)
        runpy.run_path(script, run_name="__main__")
    except ConfigError as error:  # of the file, or what Megatron's arguments ask for beside it
        _refuse(f"megatron_patches: {error}")


def _parse(arguments: list[str]) -> tuple[str, str, list[str]]:
    """(configuration, script, the script's arguments)."""
    config, rest = None, list(arguments)
    while rest and rest[0].startswith("-"):
        flag, _, value = rest.pop(0).partition("=")
        if flag in ("-h", "--help"):
            print(USAGE)
            raise SystemExit(0)
        if flag in ("--local_rank", "--local-rank"):
            continue  # from a launcher
        if flag != FLAG:
            _refuse(f"megatron_patches: unknown argument {flag!r} before the script; {USAGE}")
        config = value or (rest.pop(0) if rest else None)
    if config is None:
        _refuse(f"megatron_patches: {FLAG} is missing; {USAGE}")
    if not rest:
        _refuse(f"megatron_patches: no script; {USAGE}")
    if not os.path.exists(rest[0]):
        _refuse(f"megatron_patches: no such script: {rest[0]!r}")
    return config, rest[0], rest[1:]


def _refuse(line: str) -> None:
    print(line, file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
