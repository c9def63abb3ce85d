"""Warnings point at the user's line."""

from __future__ import annotations

from pathlib import Path

import pytest

import mtaccum
from mtaccum.errors import warn


def test_a_package_whose_name_begins_like_ours_is_the_users() -> None:
    beside = str(Path(mtaccum.__file__).parent) + "_of_mine/loop.py"
    code = compile("warn('look')", beside, "exec")
    with pytest.warns(UserWarning, match="look") as caught:
        exec(code, {"warn": warn})
    assert caught[0].filename == beside
