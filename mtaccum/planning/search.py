"""Search: which segments to recompute so that a step fits, at the least cost.

Each node's forward is a chain of positions (see ``profile``). From left to right, a position is kept or
begins a segment that is recomputed; at each position the choices that are best for some trade of bytes kept
against cost are remembered. Segments have one level only: a recomputed one keeps all of its own while it runs
again. That is dynamic programming over checkpoints, as in Beaumont et al., Optimal Checkpointing for
Heterogeneous Chains, 2019, with modules and runs of modules as the only segments.

What a node may need is what the nodes above it leave; so a tree is solved from its leaves, each of which is
a list of trade-offs: with so many bytes, at such a cost. All bytes here are estimates, good enough to choose
by; what is recommended is predicted as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mtaccum.planning.profile import Chain, Level

_WIDTH = 32  # choices remembered at each position
_STEP = 0.97  # from one trade-off of a node to the next, in bytes
_PRECISION = 1e-3  # of the least memory that a node can do with


class Choice(NamedTuple):
    """A way to run the positions so far, or a whole node with all below it.

    Attributes:
        cost: FLOPs of what runs twice; bytes that it writes count as one each, so that nothing is free.
        kept_bytes: what is left behind for the backward.
        needed_bytes: most bytes alive at once.
        recompute: names of the segments that are recomputed.
        chunks: heads that run in chunks, with the number of these.
    """

    cost: float = 0.0
    kept_bytes: float = 0.0
    needed_bytes: float = 0.0
    recompute: tuple[str, ...] = ()
    chunks: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Share:
    """How many samples run at once, and what is alive besides.

    Attributes:
        samples: those of a micro-batch over those of the profile.
        fixed_bytes: alive throughout and not growing with the samples, where that is more than profiled.
        least_saving_bytes: segments that save less are not worth a name.
    """

    samples: float = 1.0
    fixed_bytes: int = 0
    least_saving_bytes: int = 1


class _Step(NamedTuple):
    """From a position to a later one: what it needs beyond what was kept before it, keeps, and costs."""

    stop: int
    needed_bytes: float
    kept_bytes: float
    cost: float = 0.0
    segment: tuple[str, ...] = ()


class Branch:
    """A node of the tree with all below it, for some share of the samples.

    Args:
        chain: the node's.
        children: branches of the nodes on it that ran.
        above_bytes: what the nodes above it kept in the profile.
        chunks: in how many chunks a head may run; the first number is tried first.
    """

    def __init__(
        self,
        chain: Chain,
        children: Sequence[Branch],
        share: Share,
        above_bytes: int = 0,
        chunks: Iterable[int] = (1,),
    ) -> None:
        self._chain, self._children = chain, children
        self._tables = {number: _steps(chain, share, above_bytes, number) for number in chunks}
        self._tradeoffs: list[Choice] | None = None
        self._least: Choice | None = None

    def best(self, available_bytes: float) -> Choice | None:
        """The cheapest way that needs no more than that; None if there is none."""
        found: Choice | None = None
        for number, steps in self._tables.items():
            choice = self._best(steps, available_bytes)
            if choice is not None and (found is None or choice.cost < found.cost):
                own = ((self._chain.node, number),) if number > 1 else ()
                found = choice._replace(chunks=(*choice.chunks, *own))
        return found

    def cheapest(self) -> Choice:
        """The way that memory doesn't restrict."""
        choice = self.best(math.inf)
        assert choice is not None
        return choice

    def least(self) -> Choice:
        """A way that needs the least memory, whatever it costs."""
        if self._least is None:
            self._least = self.cheapest()
            low = 0.0
            while self._least.needed_bytes - low > _PRECISION * self._least.needed_bytes:
                middle = (low + self._least.needed_bytes) / 2
                if (choice := self.best(middle)) is None:
                    low = middle
                else:
                    self._least = choice
        return self._least

    def tradeoffs(self) -> list[Choice]:
        """The best ways for less and less memory, from the cheapest to the least."""
        if self._tradeoffs is None:
            least, choice = self.least(), self.cheapest()
            self._tradeoffs = [choice]
            while choice.needed_bytes * _STEP > least.needed_bytes:
                found = self.best(choice.needed_bytes * _STEP)
                assert found is not None
                self._tradeoffs.append(choice := found)
            self._tradeoffs.append(least)
        return self._tradeoffs

    def _best(self, steps: Sequence[Sequence[_Step]], available_bytes: float) -> Choice | None:
        reached: list[list[Choice]] = [[] for _ in range(len(steps) + 1)]
        reached[0] = [Choice()]
        for position, leaving in enumerate(steps):
            for cost, kept, needed, segments, _ in _frontier(reached[position]):
                for stop, step_needs, step_keeps, step_costs, segment in leaving:
                    now = kept + step_needs
                    if now <= available_bytes:
                        after = Choice(
                            cost + step_costs,
                            kept + step_keeps,
                            now if now > needed else needed,
                            segments + segment if segment else segments,
                        )
                        reached[stop].append(after)
        best: Choice | None = None
        for choice in _frontier(reached[-1]):
            below = self._cheapest_below(available_bytes - choice.kept_bytes)
            if below is None or (best is not None and choice.cost + below.cost >= best.cost):
                continue
            needed = max(choice.needed_bytes, choice.kept_bytes + below.needed_bytes)
            if needed <= available_bytes:
                best = Choice(
                    choice.cost + below.cost,
                    choice.kept_bytes,
                    needed,
                    choice.recompute + below.recompute,
                    below.chunks,
                )
        return best

    def _cheapest_below(self, available_bytes: float) -> Choice | None:
        """All children, which run one after the other, each within what is available."""
        total = Choice()
        for child in self._children:
            fitting = [c for c in child.tradeoffs() if c.needed_bytes <= available_bytes]
            if not fitting:
                return None
            choice = min(fitting, key=lambda c: (c.cost, sum(number for _, number in c.chunks)))
            total = Choice(
                total.cost + choice.cost,
                0.0,
                max(total.needed_bytes, choice.needed_bytes),
                total.recompute + choice.recompute,
                total.chunks + choice.chunks,
            )
        return total


def _frontier(choices: list[Choice]) -> list[Choice]:
    """Those that no other beats in both cost and bytes kept; thinned out to a bearable number."""
    best: list[Choice] = []
    for choice in sorted(choices):
        if not best or choice.kept_bytes < best[-1].kept_bytes:
            best.append(choice)
    if len(best) <= _WIDTH:
        return best
    return [best[round(i * (len(best) - 1) / (_WIDTH - 1))] for i in range(_WIDTH)]


def _steps(chain: Chain, share: Share, above_bytes: int, chunks: int) -> list[list[_Step]]:
    """The steps that leave each position: on to the next one with all kept, or over a recomputed segment."""
    kept, samples = chain.kept_before(), share.samples / chunks

    def level(at: Level, position: int) -> float:
        own = at.growing - chain.start_bytes - kept[position]
        others = chain.start_bytes - above_bytes
        return own * samples + others * share.samples + max(at.fixed, share.fixed_bytes)

    forward = [level(at, i) for i, at in enumerate(chain.forward)]
    backward = [level(at, i) if at.growing else 0.0 for i, at in enumerate(chain.backward)]
    steps = [
        [_Step(i + 1, max(forward[i], backward[i]), (kept[i + 1] - kept[i]) * samples)]
        for i in range(len(chain))
    ]
    for name, start, stop in chain.candidates:
        handed_on, held = _handed_on(chain, start, stop), _held(chain, start, stop)
        if (kept[stop] - kept[start] - handed_on - held) * samples < share.least_saving_bytes:
            continue
        again = chain.incoming_bytes + handed_on  # gradients that are there when it runs again
        needed = max(
            (kept[i] - kept[start]) * samples + max(forward[i] + again * samples, backward[i])
            for i in range(start, stop)
        )
        cost = sum(chain.flops[start:stop]) + sum(chain.moved_bytes[start:stop])
        steps[start].append(_Step(stop, needed, (handed_on + held) * samples, cost, (name,)))
    return steps


def _handed_on(chain: Chain, start: int, stop: int) -> int:
    """Bytes made in a segment that are needed after it."""
    return sum(m.nbytes for m in chain.made if start <= m.at < stop and m.kept and m.used_from(stop))


def _held(chain: Chain, start: int, stop: int) -> int:
    """Bytes made before a segment that are kept for its second run, and for nothing else."""
    return sum(m.nbytes for m in chain.made if m.at < start and not m.kept and m.used_in(start, stop))
