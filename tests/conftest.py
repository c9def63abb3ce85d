"""What all tests share.

Makes ``tests/helpers.py`` importable, since with importlib mode pytest puts no folder onto the path. And one
thread for each test process: the tensors are tiny, and threads of several processes would only wait for
each other.
"""

import sys
from pathlib import Path

import pytest
import torch

from mtaccum.tasks import registry

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)

import skips  # noqa: E402  (from the folder that was just put onto the path)


def pytest_addoption(parser: pytest.Parser) -> None:
    skips.add_option(parser)
    parser.addoption(
        "--all-combinations", action="store_true", help="all cases of the contract, not only a sample of them"
    )


def pytest_configure(config: pytest.Config) -> None:
    skips.register(config)


@pytest.fixture(autouse=True)
def _leave_the_registry_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which files share a process is chance, and a task that one registers must not be another's."""
    monkeypatch.setattr(registry, "_classes", dict(registry._classes))
