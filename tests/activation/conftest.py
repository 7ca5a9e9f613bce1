"""The two kinds of installation, each made once per session."""

import pytest
from environments import Environment, copy_checkout


@pytest.fixture(scope="session")
def checkout(tmp_path_factory):
    """A copy of this checkout, so that building leaves nothing behind in the real one."""
    return copy_checkout(tmp_path_factory.mktemp("source") / "ds_basisrot_checkout")


@pytest.fixture(scope="session")
def installed(tmp_path_factory, checkout):
    """An environment with the project installed. Tests that break it take a copy."""
    environment = Environment.create(tmp_path_factory.mktemp("installed") / "venv")
    environment.install(checkout)
    return environment


@pytest.fixture(scope="session")
def editable(tmp_path_factory, checkout):
    """An environment with the project installed in editable mode."""
    environment = Environment.create(tmp_path_factory.mktemp("editable") / "venv")
    environment.install(checkout, "--editable")
    return environment


@pytest.fixture
def breakable(tmp_path, installed):
    """A copy of `installed` for one test to break."""
    return installed.copy(tmp_path / "venv")
