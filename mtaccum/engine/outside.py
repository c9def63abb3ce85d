"""Outside: tensors that a loss learns, and that aren't the model's.

A learned weight of a loss that is kept in a closure, say: its gradient comes with the others, but nobody
steps, clears or reduces it, unless an optimizer holds it. So the graphs of a window are searched for such
tensors; not of each one, but of the first with a set of active tasks, and again when parameters were added or
unfrozen. What isn't seen: tensors behind a reentrant checkpoint or a function that hides its graph, those
that a node reaches in some windows only, and any in a model that is sharded.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from mtaccum.errors import OptimizerError
from mtaccum.structure import describe, tensors_of


class Outside:
    """Searches the graphs of a window for tensors outside of a model.

    Attributes:
        looking: whether the window that runs is searched.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._searched: set[frozenset[str]] = set()
        self._found: dict[int, tuple[str, weakref.ref[Tensor]]] = {}
        self.looking = False

    def forget(self) -> None:
        """Search again: parameters may have come or learn by now."""
        self._searched.clear()

    def begin(self, active: Iterable[str]) -> None:
        """A window begins, with labels of these tasks."""
        tasks = frozenset(active)
        self.looking = tasks not in self._searched
        self._searched.add(tasks)
        self._found.clear()

    def look(self, node: str, made: Any, given: Any) -> None:
        """Search the graph of what a node has made, down to what it was given."""
        inputs = tensors_of(given, strict=False)
        known = {id(tensor) for tensor in (*self._model.parameters(), *inputs, *leaves_of(inputs))}
        for leaf in leaves_of(tensors_of(made, strict=False)):
            if id(leaf) not in known:
                self._found[id(leaf)] = node, weakref.ref(leaf)

    def refuse_unheld(self, held: Iterable[Tensor]) -> None:
        """Refuse what was found and isn't held. Tensors that a forward made for itself are gone.

        Raises:
            OptimizerError: names the node that reaches it; what was found has no gradient then.
        """
        if not self._found:
            return
        known = {id(tensor) for tensor in held}
        found = [(node, reference()) for key, (node, reference) in self._found.items() if key not in known]
        alive = [(node, tensor) for node, tensor in found if tensor is not None]
        for _, tensor in alive:
            tensor.grad = None
        if alive:
            node, tensor = alive[0]
            raise OptimizerError(
                f"{node!r} learns a {type(tensor).__name__} outside of the model, {describe(tensor)}, that "
                f"no optimizer holds. Make it a parameter of the task or head, or give it to the optimizer; "
                f"detach() it where it is used if it should not learn."
            )


def leaves_of(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The tensors at which the graphs of others end, and that collect a gradient."""
    nodes = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        following = [below for below, _ in node.next_functions if below is not None and below not in seen]
        seen.update(following)
        nodes.extend(following)
