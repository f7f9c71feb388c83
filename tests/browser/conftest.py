"""One JupyterLab for all tests in a browser."""

import pytest
from lab import jupyterlab


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """(base address, token, folder that it serves) of a running JupyterLab."""
    folder, home = tmp_path_factory.mktemp("lab"), tmp_path_factory.mktemp("home")
    with jupyterlab(folder, home) as (base, token):
        yield base, token, folder
