"""Names for task classes."""

from __future__ import annotations

from typing import Any

import pytest

from mtaccum import Classification, ConfigError, Regression, Segmentation, Task, register_task
from mtaccum.tasks import registry, task_class, task_types


class Entry:
    """What importlib.metadata gives for an installed package's entry point."""

    def __init__(self, name: str, loads: Any) -> None:
        self.name = name
        self.value = f"package:{name}"
        self._loads = loads

    def load(self) -> Any:
        if isinstance(self._loads, Exception):
            raise self._loads
        return self._loads


def announce(monkeypatch: pytest.MonkeyPatch, *entries: Entry) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda group: entries if group == "mtaccum.tasks" else ())


def test_the_built_in_tasks_have_their_names() -> None:
    assert task_class("segmentation") is Segmentation
    assert task_class("classification") is Classification
    assert task_class("regression") is Regression


def test_an_own_class_is_known_under_its_name_and_comes_back_unchanged() -> None:
    @register_task("edges")
    class Edges(Task):
        pass

    assert isinstance(Edges, type)
    assert task_class("edges") is Edges
    assert "edges" in task_types()


def test_an_unknown_name_gives_the_nearest_and_all() -> None:
    with pytest.raises(ConfigError) as caught:
        task_class("segmentatoin")
    message = str(caught.value)
    assert "'segmentatoin'" in message
    assert "Did you mean 'segmentation'?" in message
    assert "classification, regression, segmentation" in message
    assert "register_task" in message


def test_a_name_that_is_taken_names_both_classes() -> None:
    with pytest.raises(ConfigError, match=r"'segmentation' is taken by mtaccum.*Segmentation.*Mine"):

        @register_task("segmentation")
        class Mine(Task):
            pass

    assert task_class("segmentation") is Segmentation


def test_a_module_that_is_loaded_again_may_register_again() -> None:
    def define() -> type[Task]:
        @register_task("again")
        class Again(Task):
            pass

        return Again

    define()
    second = define()
    assert task_class("again") is second


@pytest.mark.parametrize("thing", [object, lambda: None, 3])
def test_only_task_classes_can_be_registered(thing: Any) -> None:
    with pytest.raises(ConfigError, match=r"subclass of mtaccum\.Task"):
        register_task("thing")(thing)


def test_entry_points_are_loaded_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Installed(Task):
        pass

    announce(monkeypatch, Entry("installed", Installed), Entry("broken", ImportError("no such module")))

    assert {"installed", "broken"} <= set(task_types())
    assert task_class("installed") is Installed


def test_an_entry_point_that_can_not_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    announce(monkeypatch, Entry("broken", ImportError("no module named gone")))
    with pytest.raises(ConfigError, match="'broken'.*'package:broken'.*no module named gone"):
        task_class("broken")


def test_an_entry_point_must_lead_to_a_task_class(monkeypatch: pytest.MonkeyPatch) -> None:
    announce(monkeypatch, Entry("wrong", dict))
    with pytest.raises(ConfigError, match="wrong"):
        task_class("wrong")
