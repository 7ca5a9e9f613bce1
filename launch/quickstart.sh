#!/usr/bin/env bash
# From Python 3.11 and nothing else to a trained model: a virtual environment, the installation, and a small GPT trained with
# basis rotation in a 4-stage pipeline without flushes. Arguments are passed on to pretrain_gpt.py (--help lists them).
#
# SIGTERM and Ctrl-C stop the training after a checkpoint; the same with --name NAME --resume goes on from the last one.
#
#   VENV        where the virtual environment is or shall be (default: .venv in the checkout)
#   PYTHON      the interpreter it is made with (default: python3.11, else python3)
#   TORCH_SPEC  which torch is installed if there is none (default: torch==2.13.0)
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
checkout="$(dirname "$here")"
venv="${VENV:-$checkout/.venv}"
python="$venv/bin/python"

say() { printf '== %s\n' "$*"; }
stop() { printf 'quickstart.sh: error: %s\n' "$*" >&2; exit 2; }
# True once the environment has what is trained with, and ds_basisrot from this very checkout. -I: neither the current folder
# nor PYTHONPATH may pass for something installed.
installed() {
    "$python" -I - "$checkout" <<'CHECK'
import sys
from importlib.util import find_spec
from pathlib import Path

package = find_spec("ds_basisrot")
complete = package is not None and all(find_spec(name) for name in ("torch", "deepspeed", "matplotlib", "rich"))
sys.exit(not (complete and Path(package.origin).is_relative_to(Path(sys.argv[1]).resolve())))
CHECK
}

for argument in "$@"; do
    if [ "$argument" = --help ] || [ "$argument" = -h ]; then # before anything is installed
        sed -n '2,/^set /{/^#/p}' "${BASH_SOURCE[0]}" | cut -c 3-
        if [ -x "$python" ] && installed; then exec "$python" "$here/pretrain_gpt.py" --help; fi
        exit 0
    fi
done

if ! "$python" -m pip --version >/dev/null 2>&1; then
    base="${PYTHON:-$(command -v python3.11 || command -v python3 || true)}"
    [ -n "$base" ] || stop "no python3.11 and no python3 on PATH; name one with PYTHON=..."
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || stop "$base is not Python 3.10 or newer; name another with PYTHON=..."
    say "making the virtual environment $venv"
    "$base" -m venv "$venv" || stop "$base cannot make a virtual environment (on Debian and Ubuntu, install python3-venv)"
fi
if ! installed; then
    if ! "$python" -I -c 'import torch' >/dev/null 2>&1; then # first and alone, so that TORCH_SPEC decides which one
        say "installing ${TORCH_SPEC:-torch==2.13.0}"
        "$python" -m pip install --quiet --disable-pip-version-check "${TORCH_SPEC:-torch==2.13.0}"
    fi
    say "installing ds_basisrot from $checkout"
    "$python" -m pip install --quiet --disable-pip-version-check -e "$checkout[deepspeed]"
fi

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" MPLBACKEND=Agg
accelerators="$("$python" -c 'import torch; print(torch.accelerator.device_count() if torch.accelerator.is_available() else 0)')"
if [ "$accelerators" -lt 4 ]; then # the four stages are four processes, each on a device of its own or all on the CPU
    export DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}"
fi
port="$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"
say "training"
"$python" -m deepspeed.launcher.runner --log_level error --num_gpus 4 --master_addr 127.0.0.1 --master_port "$port" \
    "$here/pretrain_gpt.py" --ds-config "$here/ds_config/basis_rotation.json" --name "quickstart-$(date +%Y%m%d-%H%M%S)" "$@" &
runner=$!
# That launcher passes no signal on. What it starts does, to the four processes, which save and end.
pass_on() {
    stopped=$1
    "$python" - "$runner" <<'PASS_ON' || true
import sys
import time

import psutil

runner = psutil.Process(int(sys.argv[1]))
while not runner.children() and runner.status() != psutil.STATUS_ZOMBIE:  # it has not started anything yet
    time.sleep(0.1)
for child in runner.children():
    child.terminate()
PASS_ON
}
stopped=""
trap 'pass_on 143' TERM
trap 'pass_on 130' INT
status=0
while kill -0 "$runner" 2>/dev/null; do
    if wait "$runner"; then status=0; else status=$?; fi # also returns when a signal was passed on
done
exit "${stopped:-$status}"
