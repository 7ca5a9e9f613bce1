"""PyTorch's autoload entry point: activates ds_basisrot at the end of `import torch`, and never breaks that import.

This module stands outside the package on purpose: PyTorch turns any exception here into a failure of `import torch`, so what can break
(the package, its dependencies) is imported inside `activate()`, where everything is caught. `DS_BASISROT_AUTOLOAD=0` switches it off.
"""

import os
import sys

importing = False  # True while activate() imports the package, which then knows that nobody imported it explicitly


def activate() -> None:
    """Install ds_basisrot's import hooks; on failure write one line to stderr and return."""
    global importing
    if os.environ.get("DS_BASISROT_AUTOLOAD", "1").strip().lower() in ("0", "false", "no", "off"):
        return
    importing = True
    try:
        from ds_basisrot import _activation

        _activation.install_hooks("PyTorch's autoload")
    except (KeyboardInterrupt, SystemExit):
        raise  # somebody wants this process to end; a signal handler may do so at any line
    except BaseException as error:
        _warn(error)
    finally:
        importing = False


def _warn(error: BaseException) -> None:
    """Every process writes the line, not only rank 0: a job in which some ranks are not activated would hang."""
    try:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        advice = "Reinstall or uninstall it, or switch it off with DS_BASISROT_AUTOLOAD=0."
        sys.stderr.write(f"WARNING: ds_basisrot was not activated ({reason}). {advice}\n")
    except Exception:
        pass  # no usable stderr; there is nowhere left to report to
