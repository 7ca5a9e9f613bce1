"""Activation adds less than 20 ms to `import torch`."""

from statistics import median

import pytest

BUDGET_MS = 20

# PyTorch looks for entry points whether we are installed or not; what is ours is to load and call the one it finds.
ENTRY_POINT_MS = """
import time, torch
start = time.perf_counter()
import ds_basisrot_autoload
ds_basisrot_autoload.activate()
print(1e3 * (time.perf_counter() - start))
"""
IMPORT_TORCH_MS = """
import time
start = time.process_time()  # other work on this machine disturbs it less than wall time
import torch
print(1e3 * (time.process_time() - start))
"""


def test_the_entry_point_is_cheap(installed):
    times_ms = [float(installed.run("-c", ENTRY_POINT_MS, TORCH_DEVICE_BACKEND_AUTOLOAD="0").stdout) for _ in range(3)]
    assert median(times_ms) < BUDGET_MS, times_ms


@pytest.mark.full
def test_import_torch_as_a_whole_is_not_slowed_down(installed):
    # One import takes about a second, give or take 40 ms for no reason of ours. What disturbs it only adds, so the fastest of many are
    # compared; the fastest of 12 is certain to about 10 ms, and more are added while the answer is no.
    on_ms, off_ms = [], []
    for _ in range(30):
        on_ms.append(float(installed.run("-c", IMPORT_TORCH_MS).stdout))
        off_ms.append(float(installed.run("-c", IMPORT_TORCH_MS, DS_BASISROT_AUTOLOAD="0").stdout))
        if len(on_ms) >= 12 and min(on_ms) - min(off_ms) < BUDGET_MS:
            return
    raise AssertionError(f"ms of import torch: on {sorted(on_ms)}, off {sorted(off_ms)}")
