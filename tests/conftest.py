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
    parser.addoption(
        "--long", action="store_true", help="tests marked long too, which run where files are named anyway"
    )


def pytest_configure(config: pytest.Config) -> None:
    skips.register(config)
    if config.args_source is pytest.Config.ArgsSource.ARGS:
        config.option.long = True  # before processes are started, which get these options


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.option.long:
        long = [item for item in items if item.get_closest_marker("long") is not None]
        items[:] = [item for item in items if item not in long]
        config.hook.pytest_deselected(items=long)


@pytest.fixture(autouse=True)
def _leave_the_registry_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which files share a process is chance, and a task that one registers must not be another's."""
    monkeypatch.setattr(registry, "_classes", dict(registry._classes))
