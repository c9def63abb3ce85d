"""Nests of tensors: taking features and batches apart and putting them together again.

A nest is a tensor, or tuples, lists, dicts, named tuples and dataclasses of nests. Integers, strings,
None and other plain values may stand among the tensors and pass through. PyTorch's own pytree takes a
dataclass that nobody registered for a leaf, and would then cut nothing; hence our own few lines.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, ItemsView, Iterator, Mapping, MutableMapping, Sequence, ValuesView
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtaccum.errors import FeatureError
from mtaccum.torch_internals import is_wrapper

Unpack = Callable[[Any], Sequence[Any]]
Pack = Callable[[Any, Sequence[Any]], Any]

_registered: dict[type, tuple[Unpack, Pack]] = {}
_COLLECTIONS = (set, frozenset, deque, ValuesView, ItemsView)  # that can be looked into, but not put together
_NO_WAY_IN = "mtaccum can't take that type apart"
_SEARCH_DEPTH = 5  # of objects in objects; a cache of keys and values has three


def register_structure(cls: type, unpack: Unpack, pack: Pack) -> None:
    """Teach mtaccum to take apart a container of your own, in features and in batches.

    Args:
        cls: the container's type; subclasses are included.
        unpack: ``unpack(value)`` returns the members in a fixed order.
        pack: ``pack(value, members)`` returns a new container like ``value`` that holds ``members``.
    """
    _registered[cls] = (unpack, pack)


def _pack_dataclass(value: Any, members: Sequence[Any]) -> Any:
    names = [field.name for field in dataclasses.fields(value)]
    if isinstance(value, Mapping):  # Hugging Face's ModelOutput is a dict and a dataclass at once
        return type(value)(**dict(zip(names, members, strict=True)))
    clone = copy.copy(value)
    for name, member in zip(names, members, strict=True):
        object.__setattr__(clone, name, member)  # also for frozen ones
    return clone


def _pack_mapping(value: Any, members: Sequence[Any]) -> Any:
    if not isinstance(value, MutableMapping):
        return dict(zip(value.keys(), members, strict=True))
    clone = copy.copy(value)  # keeps the type, order and extras such as a default factory
    for key, member in zip(list(value.keys()), members, strict=True):
        clone[key] = member
    return clone


def _pack_list(value: Any, members: Sequence[Any]) -> Any:
    clone = copy.copy(value)  # keeps the type and its attributes
    clone[:] = members
    return clone


def _pack_tuple(value: Any, members: Sequence[Any]) -> Any:
    make = getattr(type(value), "_make", type(value))
    return make(members)


def unpacker(value: Any) -> tuple[Unpack, Pack] | None:
    """How to take ``value`` apart and put it together; None if it is a leaf."""
    for cls in type(value).__mro__:
        if cls in _registered:
            return _registered[cls]
    if isinstance(value, Tensor):
        return None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return lambda v: [getattr(v, f.name) for f in dataclasses.fields(v)], _pack_dataclass
    if isinstance(value, Mapping):
        return lambda v: list(v.values()), _pack_mapping  # a TensorDict iterates over its rows
    if isinstance(value, tuple):
        return list, _pack_tuple
    if isinstance(value, list):
        return list, _pack_list
    return None


def hides_tensors(value: Any, kinds: tuple[type, ...] = (Tensor, np.ndarray)) -> bool:
    """Whether a value holds tensors or arrays that aren't among what it can be taken apart into."""
    if isinstance(value, torch.nn.Module | type) or _is_registered(value):
        return False
    handler = unpacker(value)
    if handler is None:
        return _holds(value, kinds, _SEARCH_DEPTH)
    if type(value) in (tuple, list, dict) or not getattr(value, "__dict__", None):
        return False
    known = {id(tensor) for tensor in tensors_of(handler[0](value), strict=False)}
    return any(id(tensor) not in known for tensor in tensors_of(list(vars(value).values()), strict=False))


def _refuse_hidden_tensors(value: Any) -> None:
    """Raise if tensors of a value would silently not be cut."""
    # what an iterator holds can't be known without using it up
    if isinstance(value, Iterator) or hides_tensors(value, (Tensor,)):
        known = unpacker(value) is not None
        raise _hidden(value, f"{'not all of them are its fields or entries' if known else _NO_WAY_IN}")


def _hidden(value: Any, why: str) -> FeatureError:
    cls = f"{type(value).__module__}.{type(value).__qualname__}"
    cache = " A Hugging Face model returns no cache with config.use_cache = False." if "Cache" in cls else ""
    return FeatureError(
        f"features of type {cls} hold tensors, but {why}. Valid are tensors in tuples, lists, dicts, named "
        f"tuples and dataclasses. Return one of these, or register the type: "
        f"mtaccum.register_structure({type(value).__name__}, unpack, pack).{cache}"
    )


def _held_by(value: Any) -> list[Any]:
    """What an object of no known structure holds: its attributes, and the entries of a collection."""
    if isinstance(value, Tensor | torch.nn.Module | type) or unpacker(value) is not None:
        return []
    names = [*getattr(value, "__dict__", {}), *getattr(type(value), "__slots__", ())]
    held = [getattr(value, name, None) for name in names if isinstance(name, str)]
    return held + (list(value) if isinstance(value, _COLLECTIONS) else [])


def _is_registered(value: Any) -> bool:
    return any(cls in _registered for cls in type(value).__mro__)


def _holds(value: Any, kinds: tuple[type, ...], depth: int) -> bool:
    """Whether one of these kinds is in an object's attributes, or in what these hold, and so on."""
    handler = unpacker(value)
    inside = _held_by(value) if handler is None else handler[0](value)
    return any(isinstance(item, kinds) or (depth > 0 and _holds(item, kinds, depth - 1)) for item in inside)


def map_tensors(nest: Any, function: Callable[[Tensor], Any], *, strict: bool = True) -> Any:
    """A nest like ``nest`` with each tensor replaced by ``function(tensor)``.

    Args:
        strict: raise FeatureError on an object that holds tensors where we can't reach them;
            otherwise such an object passes through unchanged.
    """
    if isinstance(nest, Tensor) and type(nest) not in _registered:
        return function(nest)
    if strict:
        _refuse_hidden_tensors(nest)
    handler = unpacker(nest)
    if handler is None:
        return nest
    unpack, pack = handler
    return pack(nest, [map_tensors(member, function, strict=strict) for member in unpack(nest)])


def tensors_of(nest: Any, *, strict: bool = True) -> list[Tensor]:
    """The tensors of a nest, in a fixed order, repeated ones repeated. ``strict`` as in map_tensors."""
    found: list[Tensor] = []
    _collect(nest, found, strict)
    return found


def _collect(value: Any, found: list[Tensor], strict: bool) -> None:
    # Not a closure that calls itself: such a function is a reference cycle, which would keep the tensors
    # it has found alive until the garbage collector happens to run.
    if isinstance(value, Tensor) and type(value) not in _registered:
        found.append(value)
    elif (handler := unpacker(value)) is not None:
        for member in handler[0](value):
            _collect(member, found, strict)
    elif strict:
        _refuse_hidden_tensors(value)


def detach(nest: Any) -> Any:
    """The same nest without its graph; the tensors share their storage with the originals."""
    return map_tensors(nest, Tensor.detach)


def aliased(nest: Any) -> Any:
    """The same values in new containers, so that whoever gets them may rearrange its own; those with a
    gradient under a name of their own, on which it may put hooks."""
    own: dict[int, Tensor] = {}  # one tensor may stand in several places: it stays one

    def alias(tensor: Tensor) -> Tensor:
        plain = tensor.layout is torch.strided and not tensor.is_nested and not is_wrapper(tensor)
        if not plain or not tensor.requires_grad or not torch.is_grad_enabled():
            return tensor
        return own.setdefault(id(tensor), torch.ops.aten.alias(tensor))

    return map_tensors(nest, alias, strict=False)


def describe(nest: Any) -> str:
    """Types and shapes in one line, for error messages: ``{c3: Tensor(8, 64, 16, 16), ...}``."""
    if isinstance(nest, Tensor):
        return f"Tensor{tuple(nest.shape)}".replace(",)", ")")
    if isinstance(nest, Mapping):
        return "{" + ", ".join(f"{key}: {describe(value)}" for key, value in nest.items()) + "}"
    handler = unpacker(nest)
    if handler is None:
        return type(nest).__name__
    return f"{type(nest).__name__}(" + ", ".join(map(describe, handler[0](nest))) + ")"
