"""Forests: all nodes of a model as the search takes them, for each number of micro-batches."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from mtaccum.model import ROOT
from mtaccum.model.tree import Tree
from mtaccum.planning.facts import Heads
from mtaccum.planning.profile import Chain
from mtaccum.planning.search import Branch, Share
from mtaccum.planning.watcher import Profile

_WORTH_A_NAME = 0.003  # a segment that saves less of what a step needs is not recomputed
_MOST_CHUNKS = 64  # of a head's micro-batch: with more of them a step takes long


class Forests:
    """Made of one profiled step, each when it is first asked for.

    Attributes:
        micro_batches: into how many the batch may be split: 1, 2, 4, ... and as many as there are samples.
    """

    def __init__(self, profile: Profile, tree: Tree, samples: int) -> None:
        self._profile, self._tree, self._samples = profile, tree, samples
        self._made: dict[tuple[int, Heads], Branch] = {}
        self.micro_batches = [*(2**n for n in range(samples.bit_length()) if 2**n < samples), samples]

    def of(self, micro_batches: int, heads: Heads) -> Branch:
        """All nodes that run, as one branch, with the heads that may be run in chunks."""
        key = (micro_batches, heads)
        if key not in self._made:
            size = -(-self._samples // micro_batches)
            start, profile = self._profile.prediction.start_bytes, self._profile
            share = Share(
                samples=size / self._samples,
                # from the second micro-batch on all gradients are there
                fixed_bytes=start + profile.gradient_bytes if micro_batches > 1 else 0,
                least_saving_bytes=int(
                    _WORTH_A_NAME * (profile.prediction.peak_bytes - start) / micro_batches
                ),
            )
            numbers = [2**n for n in range(min(size, _MOST_CHUNKS).bit_length())]
            children = self._branches(self._tree, share, 0, dict.fromkeys(heads, numbers))
            self._made[key] = Branch(Chain(ROOT), list(children), share)
        return self._made[key]

    def _branches(
        self, tree: Tree, share: Share, above_bytes: int, chunks: dict[str, list[int]]
    ) -> Iterator[Branch]:
        for node, below in tree.items():
            chain = self._profile.chains[node]
            children = self._branches(below, share, above_bytes + chain.kept_bytes, chunks)
            yield Branch(chain, list(children), share, above_bytes, chunks.get(node, (1,)))

    def leave_out(self, segments: Collection[str]) -> bool:
        """From now on offer these segments no more for recomputing; whether there are any."""
        for chain in self._profile.chains.values():
            chain.candidates = [c for c in chain.candidates if c.name not in segments]
        if segments:
            self._made.clear()
        return bool(segments)
