"""What a user can do wrong, as exceptions; each says what was given, what is valid, and the way out."""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

_INSIDE = (str(Path(__file__).parent) + os.sep, contextlib.__file__)


class MtaccumError(ValueError):
    """Base of every error that mtaccum raises on purpose."""


class ConfigError(MtaccumError):
    """A setting, argument or name that is not valid."""


class OptimizerError(ConfigError):
    """An optimizer that doesn't hold what is trained, or that an engine can't drive."""


class FeatureError(MtaccumError, TypeError):
    """Features or a batch of a type that can't be taken apart into tensors."""


class BatchError(MtaccumError):
    """A batch that can't be split, or that lacks an entry."""


class LabelError(MtaccumError):
    """A label outside the values that its task can learn from."""


class TaskError(MtaccumError, RuntimeError):
    """A head or a loss that failed; names the task and what it was given. The cause is chained."""


class InplaceError(TaskError):
    """A head or neck that writes into features which others read too."""


class NonfiniteError(MtaccumError, FloatingPointError):
    """A loss or gradient that is NaN or infinite; nothing was changed by its step."""


class PredictionError(MtaccumError):
    """A model whose memory can't be predicted, only measured; names what stands in the way."""


class MeasureError(MtaccumError, NotImplementedError):
    """A step whose memory can't be measured; names what stands in the way."""


class BudgetError(MtaccumError):
    """No plan fits a memory budget; says how little memory can do."""


class InexactWarning(UserWarning):
    """Training goes on, but its gradient is not the one of the joint loss over the whole batch."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line that called mtaccum, however deep inside the reason was noticed."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type where it has none."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def unknown_name(kind: str, given: object, known: Iterable[object], hint: str = "") -> str:
    """The message for a name that doesn't exist: the nearest one, then all there are."""
    names = sorted(str(name) for name in known)
    others = [name for name in names if name != str(given)]
    nearest = difflib.get_close_matches(str(given), others, n=1)
    guess = f" Did you mean {nearest[0]!r}?" if nearest else ""
    listing = ", ".join(names) if names else "none"
    return f"unknown {kind} {given!r}.{guess} Known: {listing}." + (f" {hint}" if hint else "")


def listed(names: Sequence[str], shown: int = 5) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
