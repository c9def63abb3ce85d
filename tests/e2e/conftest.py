"""What the tests of commands share."""

from collections.abc import Iterator

import pytest
from commands import Forked


@pytest.fixture(scope="session")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forked]:
    """Runs commands in forked processes; the first one that is asked for starts it."""
    forked = Forked(tmp_path_factory.mktemp("forked"))
    yield forked
    forked.close()
