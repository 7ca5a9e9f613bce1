"""Options and marks of the whole test suite: tests marked `full` run only with --full."""

import forked_jobs
import pytest


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="also run the tests of the long matrix, marked `full`")


def pytest_configure(config):
    forked_jobs.under_torchrun = config.getoption("--full")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--full"):
        return
    skip = pytest.mark.skip(reason="part of the long matrix; run with --full")
    for item in items:
        if "full" in item.keywords:
            item.add_marker(skip)
