"""PyTorch's internals: all of them are there, in one file, and one that is gone is explained."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from mtaccum import torch_internals

PACKAGE = Path(torch_internals.__file__).parent
# in other files they would be overlooked; ``_buffers`` may be an attribute of a class of ours
INTERNAL = re.compile(
    r"torch\._(?!foreach|_)\w+|torch\.nn\.modules\.batchnorm|_python_dispatch|flop_counter"
    r"|(?<!self)\._(version|cdata|buffers|parameters|modules|call_impl|sequence_nr|get_backend)\b"
)


@pytest.mark.parametrize("name", torch_internals._PLACES)
def test_each_is_in_this_version(name: str) -> None:
    assert getattr(torch_internals, name) is not None


def test_one_that_is_gone_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    place = ("torch._C", "_gone", "nothing can be learned")
    monkeypatch.setitem(torch_internals._PLACES, "gone", place)
    with pytest.raises(ImportError) as error:
        from mtaccum.torch_internals import gone  # noqa: F401
    said = str(error.value)
    assert f"PyTorch {torch.__version__} has no torch._C._gone" in said
    assert "without it nothing can be learned" in said
    assert torch_internals.VERSIONS in said
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        torch_internals.nonsense  # noqa: B018


def test_no_other_file_reaches_into_pytorch() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "torch_internals.py"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if INTERNAL.search(line) and not line.lstrip().startswith(("#", '"'))
    ]
    assert not found, "\n".join(found)
