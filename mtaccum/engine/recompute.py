"""Recompute: segments of a model that keep no graph, and run once more for their backward.

Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016; here with PyTorch's non-reentrant checkpoint
and a replay, so that dropout and buffers are as if the segment ran once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mtaccum.engine.lever import Lever
from mtaccum.engine.options import StepOptions
from mtaccum.engine.segments import Segment, find_segments
from mtaccum.engine.window_counts import WindowCounts
from mtaccum.errors import InplaceError, MtaccumError, TaskError, warn
from mtaccum.model.tree import MultiTaskModel
from mtaccum.state import Replay
from mtaccum.structure import map_tensors, tensors_of
from mtaccum.torch_internals import CALL, call_of, children_of, version_of

Forward = Callable[..., Any]


def recomputed(
    function: Forward, module: nn.Module | None, name: str, runs: SegmentRuns | None = None
) -> Forward:
    """``function``, to be run once more for the backward instead of keeping its graph.

    Args:
        module: what the function runs, whose buffers are replayed; None if that isn't known.
        name: for error messages.
        runs: is told that it ran, and on what.

    Raises:
        InplaceError: (when run) it writes into its inputs, so that it can't run again.
    """
    told = SegmentRuns() if runs is None else runs

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            told.ran.add(name)
            return function(*args, **kwargs)
        nest = (args, kwargs)
        tensors = tensors_of(nest, strict=False)
        entry = told.begins(name, tensors)
        # Tensors travel as arguments, which a checkpoint around this one frees; what holds them is kept. One
        # that stands in several places travels once: attention asks whether its query is its key.
        shell = map_tensors(nest, lambda _: _PLACE, strict=False)
        unique = list({id(tensor): tensor for tensor in tensors}.values())
        places = [next(i for i, u in enumerate(unique) if u is tensor) for tensor in tensors]

        def once(*unique: Tensor) -> Any:
            following = iter(places)
            args, kwargs = map_tensors(shell, lambda _: unique[next(following)], strict=False)
            with told.explaining(name):
                return function(*args, **kwargs)

        replay = Replay()
        # Not stopped early, at the last tensor that is to be kept: RReLU fills in its tensor after that.
        output = checkpoint(
            once,
            *unique,
            use_reentrant=False,
            preserve_rng_state=False,
            early_stop=False,
            context_fn=lambda: (replay.first(module), _Again(replay, told)),
        )
        told.ends(entry)
        return output

    return run


_PLACE = torch.empty(0)  # stands where a tensor stood


class SegmentRuns:
    """Which segments ran, and on what, in the node that is running."""

    def __init__(self) -> None:
        self.ran: set[str] = set()  # names of all that have
        self._runs: list[_Run] = []
        self._repeats = 0

    def begins(self, name: str, tensors: Sequence[Tensor]) -> _Run:
        """A segment begins to run, for the first time or, in a backward, once more."""
        self.ran.add(name)
        run = _Run(name, [(tensor, version_of(tensor)) for tensor in tensors])
        if not self._repeats:
            self._runs.append(run)
        return run

    def ends(self, run: _Run) -> None:
        """Raise if a segment has written into its inputs."""
        run.ended = True
        if run.wrote:
            raise InplaceError(_message(run.name, "writes in place into its inputs"))

    def node_ends(self) -> None:
        """Raise if the inputs of a segment were written into after it ran; let go of them otherwise."""
        if not self._repeats:
            runs, self._runs = self._runs, []
            for run in runs:
                if run.ended and run.wrote:
                    raise InplaceError(_message(run.name, "has inputs that were written into after it ran"))

    @contextmanager
    def explaining(self, name: str) -> Iterator[None]:
        """Say of an error in a second run that the first one went well."""
        try:
            yield
        except MtaccumError:
            raise
        except Exception as error:
            if not self._repeats or isinstance(error, torch.OutOfMemoryError):
                raise
            raise TaskError(
                f"{name!r} failed when it ran again, and had not at first: {error}. Its forward must do the "
                f"same each time it is given the same; a cache that it fills does not (use_cache=False)."
            ) from error

    def clear(self) -> None:
        """Let go of everything."""
        self._runs, self._repeats = [], 0

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Around a second run."""
        self._repeats += 1
        try:
            yield
        finally:
            self._repeats -= 1


@dataclass
class _Run:
    """A run of a segment: its inputs, and how often they had been written into before."""

    name: str
    inputs: list[tuple[Tensor, int]]
    ended: bool = False

    @property
    def wrote(self) -> bool:
        return any(version_of(tensor) != version for tensor, version in self.inputs)


def _message(name: str, what: str) -> str:
    return (
        f"{name!r} {what}, so it can't be run again. Recompute a larger segment, or take the operation out "
        f"of place: nn.ReLU() instead of nn.ReLU(inplace=True), x = x + y instead of x += y."
    )


class _Again(AbstractContextManager[None]):
    """Around the second run; a class, since several backwards through one graph enter it several times."""

    def __init__(self, replay: Replay, runs: SegmentRuns) -> None:
        self._replay, self._runs = replay, runs
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(self._runs.repeating())
        self._stack.enter_context(self._replay.repeat())

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


class Recompute(Lever):
    """The segments of a model that are recomputed, while windows run."""

    def __init__(self, model: MultiTaskModel, options: StepOptions) -> None:
        self._model = model
        self._segments = find_segments(model, options.recompute)
        # all nodes, since several may share a segment
        self._nodes = [model.node(name) for name in model.own_modules()] if self._segments else []
        self._runs = SegmentRuns()
        self._warned: set[str] = set()

    @contextmanager
    def running(self, counts: WindowCounts) -> Iterator[None]:
        """Let the segments be recomputed wherever they run inside; afterwards they are as they were."""
        of_sequentials: dict[int, list[Segment]] = {}
        with ExitStack() as stack:
            stack.callback(self._runs.clear)
            for node in self._nodes:
                hook = node.register_forward_hook(lambda *_: self._runs.node_ends())
                stack.callback(hook.remove)
            for segment in self._segments:
                if segment.children is not None:
                    of_sequentials.setdefault(id(segment.module), []).append(segment)
            for segments in of_sequentials.values():
                stack.enter_context(replaced(segments[0].module, "forward", self._sequence(segments)))
            for segment in self._segments:
                if segment.children is None:
                    call = recomputed(call_of(segment.module), segment.module, segment.name, self._runs)
                    stack.enter_context(replaced(segment.module, CALL, call))
            yield

    def ran(self, counts: WindowCounts) -> None:
        """Warn once of segments that did not run although their nodes did: naming them has no effect."""
        if not self._segments:
            return
        passes = counts.passes(self._model)
        unused = {s.name for s in self._segments if passes.get(s.node)} - self._runs.ran - self._warned
        if unused:
            self._warned |= unused
            warn(
                f"recompute: {', '.join(sorted(unused))} did not run as a module of its own, so recomputing "
                f"it has no effect. Name what its parent calls ('{min(unused)}.*', perhaps), or the parent."
            )

    def _sequence(self, segments: Sequence[Segment]) -> Forward:
        """The forward of a Sequential of which some runs of children are recomputed."""
        steps: list[Forward] = []
        position = 0
        children = children_of(segments[0].module)
        for segment in sorted(segments, key=lambda s: s.children or (0, 0)):
            assert segment.children is not None
            start, stop = segment.children
            run = nn.Sequential(*children[start:stop])
            steps += [*children[position:start], recomputed(run, run, segment.name, self._runs)]
            position = stop
        steps += children[position:]

        def forward(features: Any) -> Any:
            for step in steps:
                features = step(features)
            return features

        return forward


@contextmanager
def replaced(module: nn.Module, attribute: str, value: Any) -> Iterator[None]:
    """Let a module have another attribute of its own; afterwards it has the one that it had."""
    absent = object()
    own = vars(module).get(attribute, absent)
    try:
        setattr(module, attribute, value)
        yield
    finally:
        if own is absent:
            delattr(module, attribute)
        else:
            setattr(module, attribute, own)
