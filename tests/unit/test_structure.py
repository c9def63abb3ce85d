"""Taking nests of tensors apart and putting them together again."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mtaccum import FeatureError, register_structure
from mtaccum.structure import describe, detach, map_tensors, tensors_of


@dataclass
class Plain:
    first: Tensor
    stride: int = 4
    rest: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class FrozenSlots:
    first: Tensor
    name: str = "c4"


class Named(NamedTuple):
    first: Tensor
    level: int


class Opaque:
    """An object of its own kind, as a graph library's batch is."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside


class Slotted:
    __slots__ = ("inside",)

    def __init__(self, inside: Any) -> None:
        self.inside = inside


class Box:
    def __init__(self, content: Tensor, label: str) -> None:
        self.content = content
        self.label = label


class SmallBox(Box):
    pass


NESTS = {
    "tensor": lambda x: x,
    "tuple": lambda x: (x, 1, None),
    "list": lambda x: [x, "text", [x]],
    "dict": lambda x: {"a": x, "b": {"c": 2.5}},
    "named tuple": lambda x: Named(x, 3),
    "dataclass": lambda x: Plain(x, rest=[x, (x,)]),
    "frozen dataclass with slots": lambda x: FrozenSlots(x),
    "ordered dict": lambda x: collections.OrderedDict(z=x, a=x),
    "default dict": lambda x: collections.defaultdict(list, a=x),
    "user dict": lambda x: collections.UserDict(a=x, b=1),
    "all of them": lambda x: {"a": [(x, Named(x, 1)), Plain(x)], "b": None, "c": FrozenSlots(x)},
}


def the_same_nest(one: Any, other: Any) -> bool:
    """Equal in types, keys, order and values, written without the code under test."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, collections.abc.Mapping):
        return list(one) == list(other) and all(the_same_nest(one[k], other[k]) for k in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(the_same_nest, one, other))
    if isinstance(one, Plain | FrozenSlots):
        return all(the_same_nest(getattr(one, f), getattr(other, f)) for f in one.__dataclass_fields__)
    return bool(one == other)


@pytest.mark.parametrize("kind", NESTS)
def test_map_rebuilds_each_container_with_its_type_order_and_plain_values(kind: str) -> None:
    x = torch.arange(3.0)
    nest = NESTS[kind](x)

    mapped = map_tensors(nest, lambda tensor: tensor + 1)

    assert the_same_nest(mapped, NESTS[kind](x + 1))
    assert the_same_nest(nest, NESTS[kind](torch.arange(3.0))), "the original was changed"


@pytest.mark.parametrize("kind", NESTS)
def test_tensors_are_found_in_the_order_in_which_map_visits_them(kind: str) -> None:
    nest = NESTS[kind](torch.zeros(2))
    visited: list[Tensor] = []
    map_tensors(nest, lambda tensor: visited.append(tensor) or tensor)

    found = tensors_of(nest)

    assert len(found) >= 1
    assert [id(tensor) for tensor in found] == [id(tensor) for tensor in visited]


def test_a_default_dict_keeps_its_factory() -> None:
    mapped = map_tensors(collections.defaultdict(list, a=torch.zeros(1)), Tensor.detach)
    assert mapped["new"] == []


def test_a_read_only_mapping_becomes_a_dict() -> None:
    mapped = map_tensors(MappingProxyType({"a": torch.zeros(1)}), lambda tensor: tensor + 1)
    assert mapped == {"a": torch.ones(1)}


def test_results_with_named_fields_of_torch_are_taken_apart() -> None:
    result = torch.tensor([[1.0, 3.0], [2.0, 0.0]]).max(dim=1)
    mapped = map_tensors(result, lambda tensor: tensor + 1)
    assert type(mapped) is type(result)
    assert mapped.values.tolist() == [4.0, 3.0]
    assert mapped.indices.tolist() == [2, 1]


def test_a_dict_that_is_a_dataclass_too_is_made_anew_from_its_fields() -> None:
    # as Hugging Face's ModelOutput: fields that are None aren't among the keys
    @dataclass
    class Output(collections.OrderedDict):
        logits: Tensor | None = None
        hidden: tuple[Tensor, ...] | None = None

        def __post_init__(self) -> None:
            for name in ("logits", "hidden"):
                if getattr(self, name) is not None:
                    self[name] = getattr(self, name)

    x = torch.zeros(2)
    mapped = map_tensors(Output(hidden=(x, x)), lambda tensor: tensor + 1)

    assert isinstance(mapped, Output)
    assert mapped.logits is None
    assert list(mapped) == ["hidden"]
    assert torch.equal(mapped["hidden"][1], x + 1)
    assert mapped.hidden[0] is mapped["hidden"][0]


def test_detach_drops_the_graph_and_shares_the_storage() -> None:
    x = torch.ones(3, requires_grad=True) * 2
    detached = detach({"a": (x, 1)})
    assert not detached["a"][0].requires_grad
    assert detached["a"][0].data_ptr() == x.data_ptr()


@pytest.mark.parametrize(
    "make",
    [
        Opaque,
        Slotted,
        lambda x: Opaque([1, {"deep": x}]),
        lambda x: {x},
        lambda x: collections.deque([x]),
        lambda x: Opaque(Opaque(x)),
        lambda x: Opaque([Opaque({"keys": Opaque((x, 1))})]),
    ],
    ids=["attribute", "slot", "nest in an attribute", "set", "deque", "object in an object", "as in a cache"],
)
def test_an_object_that_hides_tensors_is_refused_by_its_type(make: Any) -> None:
    hidden = make(torch.zeros(2))
    for nest in (hidden, {"in": [hidden]}):
        for function in (tensors_of, detach):
            with pytest.raises(FeatureError, match=type(hidden).__qualname__) as caught:
                function(nest)
            assert "register_structure" in str(caught.value)
            assert isinstance(caught.value, TypeError)


def test_where_it_is_no_matter_hidden_tensors_pass_through() -> None:
    hidden = Opaque(torch.zeros(2))
    assert tensors_of([hidden], strict=False) == []
    assert map_tensors([hidden], Tensor.detach, strict=False)[0] is hidden


@pytest.mark.parametrize(
    "value", [3, 2.5, "text", None, b"bytes", range(3), np.zeros(2), nn.Linear(1, 1), int, Opaque([1])]
)
def test_plain_values_pass_through_as_the_same_object(value: Any) -> None:
    assert map_tensors([value], Tensor.detach)[0] is value
    assert tensors_of([value]) == []


def test_a_registered_type_and_its_subclasses_are_taken_apart() -> None:
    def repack(box: Box, parts: Any) -> Box:
        return type(box)(parts[0], box.label)

    register_structure(Box, lambda box: [box.content], repack)

    mapped = map_tensors((SmallBox(torch.zeros(1), "red"),), lambda tensor: tensor + 1)[0]

    assert type(mapped) is SmallBox
    assert (mapped.content.item(), mapped.label) == (1.0, "red")
    assert len(tensors_of({"a": mapped})) == 1


def test_description_names_types_keys_and_shapes() -> None:
    nest = {"maps": [torch.zeros(2, 3), 7], "pooled": Named(torch.zeros(5), 1), "none": None}
    text = describe(nest)
    assert text == "{maps: list(Tensor(2, 3), int), pooled: Named(Tensor(5), int), none: NoneType}"
