#!/usr/bin/env bash
# Sets up a virtual environment where there is none yet, then runs the linter and the tests. Works from any folder, any number of times.
#
#   bash tests/run.sh [--full] [pytest arguments]      --full adds the long matrix
#
#   VENV        the environment to make or reuse (default: .venv-test in this checkout)
#   TORCH_SPEC  the torch to install where the environment has none (default: torch==2.13.0)
set -euo pipefail
[[ -z ${VENV:-} ]] || VENV=$(realpath -m "$VENV")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${VENV:-$PWD/.venv-test}
torch_spec=${TORCH_SPEC:-torch==2.13.0}
export PIP_DISABLE_PIP_VERSION_CHECK=1

find_python() {
    local candidate
    for candidate in python3 python3.11 python3.12 python3.13 python3.10 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "tests/run.sh: no Python 3.10 or newer on the PATH" >&2
    return 2
}

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    base_python=$(find_python)
    echo "tests/run.sh: making $venv"
    "$base_python" -m venv "$venv"
fi
python=$venv/bin/python

# An installation is reused until one of the files that decide it changes, or the checkout moves.
stamp=$venv/.ds_basisrot-installed
wanted="$PWD $(cat setup.py pyproject.toml ds_basisrot_autoload.py | cksum)"
if [[ $(cat "$stamp" 2>/dev/null) != "$wanted" ]]; then
    if ! "$python" -c 'import torch' >/dev/null 2>&1; then
        echo "tests/run.sh: installing $torch_spec"
        "$python" -m pip install --quiet "$torch_spec"
    fi
    echo "tests/run.sh: installing this checkout"
    "$python" -m pip install --quiet --editable ".[test]"
    echo "$wanted" >"$stamp"
fi

export OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu MPLBACKEND=Agg
# No test may start a C++ build. A build would show up in this private folder, and cannot hide in a shared cache.
TORCH_EXTENSIONS_DIR=$(mktemp -d)
export TORCH_EXTENSIONS_DIR
trap 'rm -rf "$TORCH_EXTENSIONS_DIR"' EXIT

status=0
"$python" -m ruff check . || status=$?
"$python" -m pytest "$@" || status=$?
if [[ -n $(ls -A "$TORCH_EXTENSIONS_DIR") ]]; then
    echo "tests/run.sh: a C++ build was started:" "$(ls -A "$TORCH_EXTENSIONS_DIR")" >&2
    status=1
fi
exit "$status"
