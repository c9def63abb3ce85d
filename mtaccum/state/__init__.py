"""State: what a forward reads and changes besides its inputs and parameters. One definition for all.

It is the random streams and the buffers. Whoever repeats a forward, undoes a step, writes a checkpoint or
evaluates in between uses what is here.
"""

from mtaccum.state.buffers import keeping_buffers, not_learning, swapped_buffers, without_trace
from mtaccum.state.random import RandomState, random_state_kept
from mtaccum.state.replay import Replay
from mtaccum.state.snapshot import Snapshot

__all__ = [
    "RandomState",
    "Replay",
    "Snapshot",
    "keeping_buffers",
    "not_learning",
    "random_state_kept",
    "swapped_buffers",
    "without_trace",
]
