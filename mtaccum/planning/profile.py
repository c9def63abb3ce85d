"""Profile: where in each node's forward memory is made, how long it is needed, and what that costs.

One predicted step of the ``split`` schedule is watched op by op. What comes of it is a ``Chain`` for each
node: its forward cut into positions, from each boundary of a module to the next. From these the planner can
tell what a recomputed segment would save, without running it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from mtaccum.torch_internals import children_of


@dataclass
class Level:
    """The highest number of bytes alive at a position: those that grow with the micro-batch, and others."""

    growing: int = 0
    fixed: int = 0

    def rise(self, growing: int, fixed: int) -> None:
        """Take the higher one of two moments."""
        if growing + fixed > self.growing + self.fixed:
            self.growing, self.fixed = growing, fixed


@dataclass
class Made:
    """A storage that a forward made.

    Attributes:
        at: the position where it was made.
        nbytes: its size.
        uses: positions that used it, in order.
        kept: whether it outlives the forward, since a backward needs it or it is among the features.
        is_feature: whether it is among the node's features.
    """

    at: int
    nbytes: int
    uses: list[int] = field(default_factory=list)
    kept: bool = False
    is_feature: bool = False

    def used_from(self, position: int) -> bool:
        """Whether anything from a position on, or after the forward, still uses it."""
        return self.is_feature or (bool(self.uses) and self.uses[-1] >= position)

    def used_in(self, start: int, stop: int) -> bool:
        """Whether a position from ``start`` up to ``stop`` uses it."""
        return any(start <= use < stop for use in self.uses)


class Candidate(NamedTuple):
    """What can be recomputed as a whole: a module or a run of a Sequential's children, which fills the
    positions from ``start`` up to ``stop``."""

    name: str
    start: int
    stop: int


@dataclass
class Chain:
    """A node's forward as positions.

    Attributes:
        forward, backward: the highest levels at each position, all else that is alive included.
        flops: of the forward at each position.
        moved_bytes: written by the forward at each position.
        made: what the forward made.
        writes: storages written into after they were made, each with the position of that.
        candidates: what can be recomputed.
        draws: whether it draws random numbers.
        changes: whether it changes a state with a fraction, as spectral norm does.
        start_bytes: alive as it began, of those that grow with the micro-batch.
        incoming_bytes: by how much more was alive as its backward began than as its forward ended.
    """

    node: str
    forward: list[Level] = field(default_factory=list)
    backward: list[Level] = field(default_factory=list)
    flops: list[int] = field(default_factory=list)
    moved_bytes: list[int] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)
    writes: list[tuple[Made, int]] = field(default_factory=list)
    candidates: list[Candidate] = field(default_factory=list)
    draws: bool = False
    changes: bool = False
    start_bytes: int = 0
    incoming_bytes: int = 0

    @property
    def total_flops(self) -> int:
        """Of one forward."""
        return sum(self.flops)

    def __len__(self) -> int:
        return len(self.forward)

    @property
    def kept_bytes(self) -> int:
        """What the forward leaves behind."""
        return sum(made.nbytes for made in self.made if made.kept)

    def add_position(self) -> int:
        """A new position at the end; returns its index."""
        self.forward.append(Level())
        self.backward.append(Level())
        self.flops.append(0)
        self.moved_bytes.append(0)
        return len(self) - 1

    def kept_before(self) -> list[int]:
        """For each position, and for the end, the kept bytes that were made before it."""
        sums = [0] * (len(self) + 1)
        for made in self.made:
            if made.kept:
                sums[made.at + 1] += made.nbytes
        for index in range(len(self)):
            sums[index + 1] += sums[index]
        return sums

    def may_run_again(self, candidate: Candidate) -> bool:
        """Whether the inputs of a candidate are as they were when it runs again."""
        start, stop = candidate.start, candidate.stop
        return not any(
            made.at < start and (start <= at < stop or (at >= stop and made.used_in(start, stop)))
            for made, at in self.writes
        )


Calls = Mapping[int, list[tuple[str, int, int]]]


def find_candidates(chain: Chain, module: nn.Module, calls: Calls) -> Iterator[Candidate]:
    """What can be recomputed in a node: modules that ran once, and runs of the children of Sequentials.

    Args:
        calls: for each module, by its id, the node and the positions of each of its runs.
    """

    def span(part: nn.Module) -> tuple[int, int] | None:
        found = calls.get(id(part), [])
        return found[0][1:] if len(found) == 1 and found[0][0] == chain.node else None

    for name, part in module.named_modules():
        place = span(part)
        if place is None or isinstance(part, torch.jit.ScriptModule):
            continue
        full = f"{chain.node}.{name}" if name else chain.node
        yield Candidate(full, *place)
        if isinstance(part, nn.Sequential) and type(part).forward is nn.Sequential.forward:
            spans = [span(child) for child in children_of(part)]
            for first in range(len(spans)):
                for last in range(first + 1, len(spans) + (first > 0)):
                    run = spans[first:last]
                    if len(run) > 1 and all(s is not None for s in run):
                        yield Candidate(f"{full}[{first}:{last}]", run[0][0], run[-1][1])  # type: ignore[index]
