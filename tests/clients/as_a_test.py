"""Runs a user's script as it is, without a C++ build at its start and without an interpreter's end: as_a_test.py SCRIPT ARGUMENTS..."""

import os
import runpy
import sys

import deepspeed

if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    # An interpreter that ends while a thread of gloo lets go of the last message's tensors aborts: the thread needs it for that.
    os._exit(0)
