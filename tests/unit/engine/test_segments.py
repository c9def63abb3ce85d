"""Segments: which modules a name, a pattern or a run of children stands for, and what is refused."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from helpers import Squared
from torch import Tensor, nn

from mtaccum import ConfigError, Engine, MultiTaskModel, Neck
from mtaccum.engine.segments import find_segments


class Stage(nn.Sequential):
    """Three blocks of two layers each: ``0`` to ``2``, with ``0`` and ``1`` in them."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))


class Trunk(nn.Module):
    """(n, 4) to (n, 4)"""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.layer1, self.layer2 = Stage(), Stage()
        self.layer10 = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Tanh()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer10(self.layer2(self.layer1(self.stem(x))))
        for block in self.blocks:
            x = block(x)
        return x


class Loop(nn.Sequential):
    """A Sequential that doesn't run its children one after the other."""

    def forward(self, x: Tensor) -> Tensor:
        for child in self:
            x = x + child(x)
        return x


def model_of() -> MultiTaskModel:
    """trunk -- fpn -- seg and depth; cls on the trunk. depth's head is a layer of its own."""
    tied = nn.Linear(4, 4)
    return MultiTaskModel(
        Trunk(),
        {
            "cls": Squared(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))),
            "seg": Squared(nn.Sequential(tied, nn.Linear(4, 2)), on="fpn"),
            "depth": Squared(nn.Linear(4, 1), on="fpn"),
        },
        inputs="x",
        necks={"fpn": Neck(nn.ModuleDict({"lateral": nn.Linear(4, 4), "tied": tied}), on="trunk")},
    )


@pytest.fixture
def model() -> MultiTaskModel:
    return model_of()


# --- names ------------------------------------------------------------------------------------------------


def test_a_node_is_its_own_module(model: MultiTaskModel) -> None:
    trunk, seg, depth = find_segments(model, ["trunk", "seg", "depth"])
    assert trunk.module is model.trunk
    assert seg.module is model.task("seg").head, "the task itself holds the loss, too"
    assert depth.module is model.task("depth").head
    assert [segment.node for segment in (trunk, seg, depth)] == ["trunk", "seg", "depth"]
    assert [segment.children for segment in (trunk, seg, depth)] == [None, None, None]


@pytest.mark.parametrize(
    ("name", "full", "node"),
    [
        ("trunk.layer1.2.0", "trunk.layer1.2.0", "trunk"),
        ("seg.0", "tasks.seg.head.0", "seg"),
        ("seg", "tasks.seg.head", "seg"),
        ("fpn.lateral", "necks.fpn.module.lateral", "fpn"),
    ],
)
def test_a_module_has_a_name_in_its_node_and_one_in_the_model(
    model: MultiTaskModel, name: str, full: str, node: str
) -> None:
    (segment,) = find_segments(model, [name])
    (same,) = find_segments(model, [full])
    assert segment.module is same.module is model.get_submodule(full)
    assert segment.node == same.node == node
    assert find_segments(model, [name, full]) == [segment], "named twice, it is one segment"


def test_the_order_is_that_of_the_names(model: MultiTaskModel) -> None:
    names = ["depth", "trunk.stem", "seg.1", "trunk.layer2"]
    assert [segment.name for segment in find_segments(model, names)] == names
    assert find_segments(model, []) == find_segments(model, ()) == []


def test_a_module_that_two_nodes_share_is_one_segment(model: MultiTaskModel) -> None:
    (segment,) = find_segments(model, ["seg.0", "fpn.tied"])
    assert segment.module is model.task("seg").head[0]


@pytest.mark.parametrize(
    "name", ["necks.trunk.module", "necks.trunk.module.stem", "tasks.trunk.head", "necks.seg.module"]
)
def test_a_name_that_the_model_does_not_have_is_unknown(model: MultiTaskModel, name: str) -> None:
    with pytest.raises(AttributeError):
        model.get_submodule(name)
    with pytest.raises(ConfigError, match="unknown module"):
        find_segments(model, [name])


# --- patterns ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("trunk.layer?", ["trunk.layer1", "trunk.layer2"]),
        ("trunk.layer*", ["trunk.layer1", "trunk.layer2", "trunk.layer10"]),
        ("trunk.layer1.*", ["trunk.layer1.0", "trunk.layer1.1", "trunk.layer1.2"]),
        ("trunk.*.1", ["trunk.layer1.1", "trunk.layer2.1", "trunk.blocks.1"]),
        ("trunk.*.*.0", [f"trunk.layer{i}.{j}.0" for i in (1, 2) for j in range(3)]),
        ("trunk.blocks.*", ["trunk.blocks.0", "trunk.blocks.1"]),
        ("?eg.*", ["seg.0", "seg.1"]),
        ("*.stem", ["trunk.stem"]),
        ("tasks.*.head.0", ["tasks.cls.head.0", "tasks.seg.head.0"]),
    ],
)
def test_a_pattern_stands_for_letters_of_one_name(
    model: MultiTaskModel, pattern: str, names: list[str]
) -> None:
    assert sorted(segment.name for segment in find_segments(model, [pattern])) == sorted(names)


def test_a_pattern_leaves_out_lists_of_modules(model: MultiTaskModel) -> None:
    # trunk.blocks and fpn have no forward of their own
    names = {segment.name for segment in find_segments(model, ["trunk.*"])}
    assert names == {"trunk.stem", "trunk.layer1", "trunk.layer2", "trunk.layer10"}
    assert {segment.name for segment in find_segments(model, ["*"])} == {"trunk", "cls", "seg", "depth"}


def test_case_matters(model: MultiTaskModel) -> None:
    with pytest.raises(ConfigError, match=r"'trunk\.Layer1'.*Did you mean 'trunk\.layer1'"):
        find_segments(model, ["trunk.Layer1"])


def test_overlapping_patterns_are_joined(model: MultiTaskModel) -> None:
    segments = find_segments(model, ["trunk.layer*", "trunk.layer1", "*.layer?"])
    assert len(segments) == len({id(segment.module) for segment in segments}) == 3


def test_nested_segments_are_both_taken(model: MultiTaskModel) -> None:
    segments = find_segments(model, ["trunk", "trunk.layer1", "trunk.layer1.0", "trunk.layer1[0:2]"])
    assert len(segments) == 4


# --- runs of children -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("brackets", "run"),
    [
        ("[0:3]", (0, 3)),
        ("[1:2]", (1, 2)),
        ("[:2]", (0, 2)),
        ("[1:]", (1, 3)),
        ("[:]", (0, 3)),
        ("[-2:]", (1, 3)),
        ("[:-1]", (0, 2)),
        ("[-3:-1]", (0, 2)),
        ("[0:-2]", (0, 1)),
        ("[0]", (0, 1)),
        ("[2]", (2, 3)),
        ("[-1]", (2, 3)),
        ("[-3]", (0, 1)),
    ],
)
def test_brackets_are_those_of_a_python_list(
    model: MultiTaskModel, brackets: str, run: tuple[int, int]
) -> None:
    (segment,) = find_segments(model, [f"trunk.layer1{brackets}"])
    assert segment.children == run
    assert segment.module is model.trunk.layer1
    assert segment.name == f"trunk.layer1[{run[0]}:{run[1]}]"


def test_brackets_follow_patterns_and_nodes(model: MultiTaskModel) -> None:
    segments = find_segments(model, ["trunk.layer?[0:2]", "cls[1:]", "tasks.seg.head[0]"])
    assert [(segment.name, segment.children) for segment in segments] == [
        ("trunk.layer1[0:2]", (0, 2)),
        ("trunk.layer2[0:2]", (0, 2)),
        ("cls[1:3]", (1, 3)),
        ("tasks.seg.head[0:1]", (0, 1)),
    ]


@pytest.mark.parametrize("brackets", ["[3]", "[-4]", "[0:4]", "[2:1]", "[1:1]", "[-4:2]", "[3:]", "[:0]"])
def test_children_that_there_are_not_are_refused(model: MultiTaskModel, brackets: str) -> None:
    with pytest.raises(ConfigError, match=r"'trunk\.layer1' has 3 children, numbered from 0"):
        find_segments(model, [f"trunk.layer1{brackets}"])


@pytest.mark.parametrize("brackets", ["[]", "[a]", "[0:1:2]", "[1.5]", "[0", "0]", "[0][1]", "[ 0 ]"])
def test_brackets_that_say_nothing_are_refused(model: MultiTaskModel, brackets: str) -> None:
    # as a set of letters [0:1:2] would be layer10
    with pytest.raises(ConfigError, match="recompute"):
        find_segments(model, [f"trunk.layer1{brackets}"])


def test_empty_brackets_are_told_how_to_write_it(model: MultiTaskModel) -> None:
    with pytest.raises(ConfigError, match=r"'trunk\.layer1\[\]' has empty brackets.*trunk\.layer3\[0:3\]"):
        find_segments(model, ["trunk.layer1[]"])


def test_runs_that_overlap_are_refused_by_name(model: MultiTaskModel) -> None:
    for runs in (["[0:2]", "[1:3]"], ["[1:3]", "[0:2]"], ["[0:3]", "[1]"], ["[:]", "[0]"], ["[0]", "[0:2]"]):
        with pytest.raises(ConfigError, match=r"'trunk\.layer1\[.*\]' and 'trunk\.layer1\[.*\]' overlap"):
            find_segments(model, [f"trunk.layer1{run}" for run in runs])


def test_runs_that_touch_and_the_same_run_twice_are_fine(model: MultiTaskModel) -> None:
    segments = find_segments(
        model, ["trunk.layer1[0:1]", "trunk.layer1[1:3]", "trunk.layer1[:1]", "trunk.layer2[0:2]"]
    )
    assert [segment.children for segment in segments] == [(0, 1), (1, 3), (0, 2)]


def test_children_that_stand_twice_in_a_sequential_are_counted_twice() -> None:
    # as PyTorch numbers them: Sequential(linear, act, other, act) has four children
    act = nn.Tanh()
    trunk = nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 4), act)
    model = MultiTaskModel(trunk, {"a": Squared(nn.Linear(4, 1))}, inputs="x")
    (segment,) = find_segments(model, ["trunk[2:4]"])
    assert segment.children == (2, 4)
    assert trunk[-1] is find_segments(model, ["trunk.3"])[0].module


# --- what can't be run by itself --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["trunk.stem[0:1]", "depth[0]", "trunk[0:2]", "trunk.blocks[0:1]", "fpn[0]"])
def test_only_a_sequential_has_runs(model: MultiTaskModel, name: str) -> None:
    with pytest.raises(ConfigError, match=r"only the children of a torch\.nn\.Sequential"):
        find_segments(model, [name])


def test_a_sequential_with_a_forward_of_its_own_has_none_either() -> None:
    model = MultiTaskModel(Loop(nn.Linear(4, 4), nn.Tanh()), {"a": Squared(nn.Linear(4, 1))}, inputs="x")
    with pytest.raises(ConfigError, match="'trunk' is a Loop; only the children"):
        find_segments(model, ["trunk[0:1]"])
    assert len(find_segments(model, ["trunk", "trunk.0"])) == 2


def test_nor_has_one_that_was_given_a_forward_of_its_own() -> None:
    trunk = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    trunk.forward = lambda x: trunk[1](trunk[0](x)) + x
    model = MultiTaskModel(trunk, {"a": Squared(nn.Linear(4, 1))}, inputs="x")
    with pytest.raises(ConfigError, match="only the children"):
        find_segments(model, ["trunk[0:1]"])
    assert len(find_segments(model, ["trunk", "trunk.0"])) == 2


@pytest.mark.parametrize(
    ("name", "kind"), [("trunk.blocks", "ModuleList"), ("fpn", "ModuleDict"), ("trunk.b*", "ModuleList")]
)
def test_a_list_of_modules_is_refused_with_what_to_name(model: MultiTaskModel, name: str, kind: str) -> None:
    found = "trunk.blocks" if name == "trunk.b*" else name
    with pytest.raises(ConfigError, match=rf"'{found}' is a {kind}, which has no forward.*'{found}\.\*'"):
        find_segments(model, [name])


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_script_module_is_refused_by_name() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    model = MultiTaskModel(nn.Sequential(scripted), {"a": Squared(nn.Linear(4, 1))}, inputs="x")
    with pytest.raises(ConfigError, match=r"'trunk\.0' is a ScriptModule, whose forward can't be replaced"):
        find_segments(model, ["trunk.0"])
    assert len(find_segments(model, ["trunk", "trunk[0:1]"])) == 2, "what holds it runs it whole"


@pytest.mark.parametrize("given", ["trunk", True, 1, [1], [nn.Linear(1, 1)], [None]], ids=repr)
def test_what_is_no_list_of_names_is_refused(model: MultiTaskModel, given: Any) -> None:
    # True is what split_backward takes
    with pytest.raises(ConfigError, match="recompute must be a list of names"):
        Engine(model, recompute=given)


def test_any_iterable_of_names_will_do_or_is_refused(model: MultiTaskModel) -> None:
    # a generator must not be used up by looking at it, and then recompute nothing
    for given in (("trunk",), {"trunk": 1}.keys(), {"trunk"}):
        assert len(find_segments(model, given)) == 1  # type: ignore[arg-type]
    with suppress(ConfigError):
        assert len(find_segments(model, (name for name in ["trunk"]))) == 1  # type: ignore[arg-type]


# --- unknown names list what there is ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "trunc",
            r"module in recompute: 'trunc'\. Did you mean 'trunk'\? Known: cls, depth, fpn, seg, trunk\.",
        ),
        (
            "trunk.layr1",
            r"Did you mean 'trunk\.layer1'\? Known: trunk\.blocks, trunk\.layer1, trunk\.layer10,",
        ),
        (
            "trunk.layer1.7",
            r"'trunk\.layer1\.7'.*Known: trunk\.layer1\.0, trunk\.layer1\.1, trunk\.layer1\.2\.",
        ),
        ("trunk.layer1.0.weight", r"Known: trunk\.layer1\.0\.0, trunk\.layer1\.0\.1\."),
        ("seg.9", r"Known: seg\.0, seg\.1\."),
        ("tasks.seg.head.9", r"Known: tasks\.seg\.head\.0, tasks\.seg\.head\.1\."),
        ("trunk.stem.weight", r"unknown module in recompute: 'trunk\.stem\.weight'\. Known: none\."),
        ("trunk.layer9*", r"Known: trunk\.blocks, trunk\.layer1"),
        ("x.*", r"Known: cls, depth, fpn, seg, trunk\."),
        ("trunk.layr1[0:2]", r"'trunk\.layr1\[0:2\]'.*Known: trunk\.blocks, trunk\.layer1"),
        ("", r"unknown module in recompute: ''.*Known: cls"),
    ],
)
def test_an_unknown_name_lists_what_there_is_below_what_exists(
    model: MultiTaskModel, name: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        find_segments(model, [name])
    with pytest.raises(ConfigError, match=message):
        Engine(model, recompute=["trunk", name])
