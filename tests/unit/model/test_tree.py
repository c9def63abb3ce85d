"""MultiTaskModel: paths, inputs, predictions, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import Squared, awkward_batch, awkward_model
from torch import Tensor, nn

from mtaccum import BatchError, ConfigError, MultiTaskModel, Neck, Regression, Task, TaskError


class Tagged(nn.Module):
    """Says what it was given."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.calls = 0

    def forward(self, features: Any) -> Any:
        self.calls += 1
        return (self.name, features)


def task(name: str = "head", **settings: Any) -> Task:
    return Squared(Tagged(name), **settings)


def model(tasks: dict[str, Task], necks: dict[str, Neck] | None = None, **settings: Any) -> MultiTaskModel:
    settings = {"trunk": Tagged("trunk"), "inputs": "x", **settings}
    return MultiTaskModel(settings.pop("trunk"), tasks, necks=necks, **settings)


# --- paths ------------------------------------------------------------------------------------------------


def test_paths_lead_from_the_trunk_to_each_node() -> None:
    tree = model(
        {"seg": task(on=("trunk", "fpn")), "cls": task(on="deep"), "raw": task()},
        {"deep": Neck(Tagged("deep"), on="fpn"), "fpn": Neck(Tagged("fpn"))},
    )
    assert tree.paths["trunk"] == ("trunk",)
    assert tree.paths["seg"] == ("trunk", "fpn", "seg")
    assert tree.paths["cls"] == ("trunk", "fpn", "deep", "cls")
    assert tree.paths["raw"] == ("trunk", "raw")
    assert tree.tree(["cls", "raw", "seg"]) == {"trunk": {"fpn": {"deep": {"cls": {}}, "seg": {}}, "raw": {}}}


def test_a_node_gets_the_features_it_is_on_in_the_order_it_names_them() -> None:
    tree = model({"seg": task("seg", on=("fpn", "trunk"))}, {"fpn": Neck(Tagged("fpn"))})
    trunk = ("trunk", 5)
    assert tree({"x": 5}) == {"seg": ("seg", (("fpn", trunk), trunk))}


def test_without_a_trunk_each_head_gets_the_inputs() -> None:
    tree = model({"a": task("a"), "b": task("b", on="neck")}, {"neck": Neck(Tagged("neck"))}, trunk=None)
    assert tree({"x": 5}) == {"a": ("a", 5), "b": ("b", ("neck", 5))}
    assert tree.paths == {"inputs": (), "a": ("a",), "neck": ("neck",), "b": ("neck", "b")}


def test_a_head_may_be_on_the_inputs_beside_the_trunk() -> None:
    tree = model({"both": task("both", on=("inputs", "trunk")), "raw": task("raw", on="inputs")})
    assert tree({"x": 5}) == {"both": ("both", (5, ("trunk", 5))), "raw": ("raw", 5)}


# --- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("necks", "circle"),
    [
        ({"a": Neck(Tagged("a"), on="b"), "b": Neck(Tagged("b"), on="a")}, "a <- b <- a"),
        ({"a": Neck(Tagged("a"), on="a")}, "a <- a"),
        ({"a": Neck(Tagged("a"), on=("trunk", "b")), "b": Neck(Tagged("b"), on="a")}, "a <- b <- a"),
    ],
)
def test_a_circle_is_drawn(necks: dict[str, Neck], circle: str) -> None:
    with pytest.raises(ConfigError, match=circle):
        model({"t": task(on="a")}, necks)


def test_nodes_that_are_not_on_one_path_are_named() -> None:
    necks = {"left": Neck(Tagged("l")), "right": Neck(Tagged("r"))}
    with pytest.raises(
        ConfigError, match=r"'t' is on 'left' and 'right'.*one path.*'right' doesn't lead to 'left'"
    ):
        model({"t": task(on=("left", "right"))}, necks)


def test_a_head_on_a_head_is_refused_with_the_advice_to_use_a_neck_b6() -> None:
    with pytest.raises(ConfigError, match=r"'b' is on the task 'a'.*Neck"):
        model({"a": task(), "b": task(on="a")})
    with pytest.raises(ConfigError, match=r"'n' is on the task 'a'.*Neck"):
        model({"a": task()}, {"n": Neck(Tagged("n"), on="a")})


@pytest.mark.parametrize("on", ["fnp", "fpm"])
def test_an_unknown_node_names_the_nearest_and_all(on: str) -> None:
    with pytest.raises(ConfigError, match=rf"'t' is on, '{on}'\. Did you mean 'fpn'\?.*fpn, inputs, trunk"):
        model({"t": task(on=on)}, {"fpn": Neck(Tagged("f"))})


def test_no_node_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="'t' is on no node"):
        model({"t": task(on=())})


@pytest.mark.parametrize("name", ["a.b", "", "trunk", "inputs", "keys", "items", "training", 3, "a/b"])
def test_names_that_can_not_be_are_refused(name: Any) -> None:
    # "a/b": results name the parts of a loss "task/part"
    with pytest.raises(ConfigError, match="can't be called"):
        model({name: task()})


def test_a_name_taken_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="two nodes are called 'a'"):
        model({"a": task()}, {"a": Neck(Tagged("a"))})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tasks": {}}, "at least one task"),
        ({"tasks": {"a": nn.Linear(1, 1)}}, r"task 'a' is a Linear; it must be a mtaccum\.Task"),
        ({"tasks": {"a": task()}, "necks": {"n": nn.Linear(1, 1)}}, r"neck 'n' is a Linear; wrap it: Neck"),
        ({"tasks": {"a": task()}, "trunk": lambda x: x}, "trunk is a function"),
    ],
)
def test_parts_of_a_wrong_type_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model(**arguments)


def test_an_unknown_task_names_the_nearest() -> None:
    tree = model({"seg": task(), "depth": task()})
    for ask in (lambda: tree({"x": 1}, tasks=["sge"]), lambda: tree.task("sge")):
        with pytest.raises(ConfigError, match=r"unknown task 'sge'\. Did you mean 'seg'\?"):
            ask()


# --- inputs -----------------------------------------------------------------------------------------------


@dataclass
class Scene:
    image: int


class ByName(nn.Module):
    def forward(self, *, input_ids: int, mask: int) -> tuple[int, int]:
        return (input_ids, mask)


@pytest.mark.parametrize(
    ("inputs", "batch"),
    [
        ("x", {"x": 5}),
        (1, (4, 5)),
        (0, [5, 4]),
        ("image", Scene(5)),
        (lambda batch: batch["a"] + 1, {"a": 4}),
    ],
    ids=["key", "index", "index of a list", "attribute", "function"],
)
def test_inputs_of_every_kind(inputs: Any, batch: Any) -> None:
    assert model({"a": task("a")}, inputs=inputs)(batch) == {"a": ("a", ("trunk", 5))}


@pytest.mark.parametrize("trunk", [True, False])
def test_several_keys_are_keyword_arguments(trunk: bool) -> None:
    class Named(Task):
        def forward(self, features: Any, batch: Any) -> Any:
            return super().forward(features, batch)

    tree = MultiTaskModel(
        ByName() if trunk else None,
        {"a": Named(nn.Identity() if trunk else ByName(), None)},
        inputs=["input_ids", "mask"],
    )
    assert tree({"mask": 2, "input_ids": 1, "labels": 3}) == {"a": (1, 2)}


def test_a_missing_input_is_named() -> None:
    with pytest.raises(BatchError, match="no entry 'x'"):
        model({"a": task()})({"y": 1})


# --- predictions ------------------------------------------------------------------------------------------


def test_predictions_of_chosen_tasks_run_only_what_leads_to_them() -> None:
    necks = {"used": Neck(Tagged("used")), "idle": Neck(Tagged("idle"))}
    tree = model({"a": task("a", on="used"), "b": task("b", on="idle"), "c": task("c")}, necks)

    predictions = tree({"x": 1}, tasks=["c", "a"])

    assert set(predictions) == {"a", "c"}
    assert tree.trunk.calls == 1
    assert tree.necks["used"].module.calls == 1
    assert tree.necks["idle"].module.calls == 0
    assert tree.task("b").head.calls == 0


def test_by_default_all_enabled_tasks_are_predicted_and_others_can_be_asked_for() -> None:
    tree = model(
        {"on": task(), "off": task(mode="off"), "zero": task(weight=0), "frozen": task(mode="frozen")}
    )
    assert set(tree({"x": 1})) == {"on", "frozen"}
    assert set(tree({"x": 1}, tasks=["off"])) == {"off"}
    assert tree({"x": 1}, tasks=[]) == {}


def test_a_batch_with_the_inputs_only_is_enough_to_predict() -> None:
    tree = awkward_model().eval()
    predictions = tree({"image": awkward_batch(2)["image"]})
    assert set(predictions) == set(tree.tasks)
    assert tuple(predictions["seg"].shape) == (2, 3, 8, 8)


def test_a_head_that_does_not_fit_names_itself_and_the_features() -> None:
    tree = model({"seg": Squared(nn.Conv2d(64, 3, 1))}, trunk=nn.Conv2d(3, 16, 1))
    with pytest.raises(TaskError) as caught:
        tree({"x": torch.zeros(2, 3, 8, 8)})
    message = str(caught.value)
    assert "task 'seg' (head Conv2d on 'trunk')" in message
    assert "Tensor(2, 16, 8, 8)" in message
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("node", ["trunk", "neck"])
def test_a_trunk_or_neck_that_fails_names_itself(node: str) -> None:
    bad, good = nn.Linear(7, 1), nn.Linear(3, 3)
    tree = model(
        {"a": task(on="n")},
        {"n": Neck(bad if node == "neck" else good)},
        trunk=bad if node == "trunk" else good,
    )
    with pytest.raises(
        TaskError, match=r"trunk \(Linear on 'inputs'\)|neck 'n' \(Linear on 'trunk'\)"
    ) as caught:
        tree({"x": torch.zeros(2, 3)})
    assert str(caught.value).startswith(node)


class Raises(nn.Module):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def forward(self, features: Any) -> Tensor:
        raise self.error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("inside"),
        TypeError("inside"),
        KeyError("inside"),
        AttributeError("inside"),
        ValueError("inside"),  # BatchNorm with one sample, cross_entropy with another batch size
        AssertionError("inside"),  # einops, timm
        ZeroDivisionError("inside"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_a_head_raises_comes_with_its_name(error: Exception) -> None:
    with pytest.raises(TaskError, match="task 'a'.*inside") as caught:
        model({"a": Squared(Raises(error))})({"x": 1})
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), KeyboardInterrupt()])
def test_running_out_of_memory_and_interrupts_keep_their_type(error: BaseException) -> None:
    with pytest.raises(type(error)):
        model({"a": Squared(Raises(error))})({"x": 1})


# --- the user's modules -----------------------------------------------------------------------------------


def test_nodes_are_the_users_own_modules_and_their_state_is_as_it_was() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
            self.neck = nn.Linear(4, 4)
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.neck(self.backbone(x)))

    net = Net()
    before = {name: value.clone() for name, value in net.state_dict().items()}

    tree = MultiTaskModel(
        net.backbone, {"t": Squared(net.head, on="neck")}, inputs="x", necks={"neck": Neck(net.neck)}
    )

    assert tree.trunk is net.backbone
    assert tree.task("t").head is net.head
    after = net.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert {id(p) for p in tree.parameters()} == {id(p) for p in net.parameters()}
    x = torch.rand(5, 3)
    net.eval()
    assert torch.equal(tree({"x": x})["t"], net(x))


def test_the_model_comes_back_from_its_state_dict() -> None:
    one, other = awkward_model(0).eval(), awkward_model(1).eval()
    batch = awkward_batch(2)
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(batch)["seg"], other(batch)["seg"])


def test_a_neck_that_feeds_no_task_is_pointed_out() -> None:
    with pytest.warns(UserWarning, match="'unused' feeds no task"):
        MultiTaskModel(
            nn.Linear(3, 4),
            {"a": Regression(head=nn.Linear(4, 1), target="y")},
            inputs="x",
            necks={"unused": Neck(nn.Linear(4, 4))},
        )
