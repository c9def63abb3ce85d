"""What is public is what it was: names with signatures, config keys, what the README mentions.

``tests/public.py`` says what that is, and how a change is accepted; for files and exit codes see
``e2e/test_public_commands.py``.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import public_config
import public_names
import public_readme
import pytest
from public import difference

import mtaccum


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    return public_names.collect()


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return public_config.collect()


def test_names_and_signatures(names: dict[str, Any]) -> None:
    changed = difference("names", names)
    assert not changed, changed


def test_config_keys_and_options(config: dict[str, Any]) -> None:
    changed = difference("config", config)
    assert not changed, changed


def test_names_in_the_readme(names: dict[str, Any], config: dict[str, Any]) -> None:
    changed = difference("readme", public_readme.collect(names, config))
    assert not changed, changed


# --- that the comparison sees a change ---------------------------------------------------------------------


def test_a_change_is_shown_with_the_way_to_accept_it(names: dict[str, Any]) -> None:
    changed = copy.deepcopy(names)
    changed["mtaccum"]["renamed"] = changed["mtaccum"].pop("windows")

    said = difference("names", changed)

    assert re.search(r'^- +"windows": ', said, re.MULTILINE)
    assert re.search(r'^\+ +"renamed": ', said, re.MULTILINE)
    assert "python tests/public.py --write" in said
    assert "deprecation" in said


def test_long_signatures_are_in_lines() -> None:
    def long(
        first: dict[str, list[int]], /, second: str = "a", *, third: Callable[[int], int] = abs, **rest: Any
    ) -> dict[str, list[int]]:
        raise NotImplementedError

    assert public_names.signature(long) == [
        "(",
        "first: dict[str, list[int]]",
        "/",
        "second: str = 'a'",
        "*",
        "third: Callable[[int], int] = abs",
        "**rest: Any",
        ") -> dict[str, list[int]]",
    ]


def test_what_of_a_class_is_public() -> None:
    class Own(mtaccum.Task):
        """A task.

        Attributes:
            near, far: numbers.
            more: which lines
                go on.
        """

        __module__ = "mtaccum.own"
        limit, table = 3, {}

        def __init__(self, head: int, *, each=len) -> None:
            """Not called."""

        @property
        def near(self) -> float:
            return 0.5

        @classmethod
        def of(cls, x: int) -> Own:
            raise NotImplementedError

        def _hidden(self) -> None:
            """Not public."""

    Own.__init__.__module__ = Own.__module__
    found = public_names.describe(Own)

    assert found["bases"] == ["Task"]
    assert found["constructor"] == "(head: int, *, each=len) -> None"
    assert found["attributes"] == ["far", "more"]
    inherited = public_names.describe(mtaccum.Task)["members"]
    own = {"limit": "= 3", "near": "property -> float", "of": "classmethod (cls, x: int) -> Own"}
    assert found["members"] == {**inherited, **own, "table": "dict"}


WRONG = {
    "mtaccum.nothing": "`mtaccum.nothing(x)`",
    "mtaccum.memory.nothing": "```python\nimport mtaccum.memory as m\nmtaccum.memory.nothing\n```\n",
    "mtaccum.parallel.nothing": "```python\nfrom mtaccum.parallel import joined, nothing\n```\n",
    "mtaccum.Engine(grouping=)": "`Engine(model, grouping=[])`",
    "mtaccum.Task.nothing": "`Task.nothing`",
    "mtaccum.nowhere": "`python -m mtaccum.nowhere '+tasks=[seg]'`",
    "engine.fly": "`engine.fly`",
    "trainer.most_steps=3": "`trainer.most_steps=3`",
    "engine=spilt": "`engine=spilt`",
    "engine.precision=fp8": "`engine.precision=fp8 batch_size=2`",
    "recompile": "`recompile`",
    ".log_evry": "`.log_evry`",
}


@pytest.mark.parametrize("name", WRONG)
def test_what_the_readme_mentions_has_to_exist(
    name: str, names: dict[str, Any], config: dict[str, Any]
) -> None:
    with pytest.raises(AssertionError, match=f"doesn't exist: {re.escape(name)}\\. Words"):
        public_readme.collect(names, config, WRONG[name])


def test_what_exists_may_be_mentioned(names: dict[str, Any], config: dict[str, Any]) -> None:
    text = "`loss / K` `f.data` `torch.compile` `engine.step(window)` `engine=split seed=1` `recompute`"
    text += " `plan.json` `optimizer.momentum` `Engine(model, offload=True)` `mtaccum.errors` `hydra.run.dir`"
    found = public_readme.collect(names, config, text)
    assert found == ["mtaccum.Engine(offload=)", "mtaccum.errors"]
