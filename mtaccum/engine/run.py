"""The run of a window: all its forwards and backwards, which make the gradient of a step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from mtaccum.batch import to_device
from mtaccum.engine.binding import Binding
from mtaccum.engine.checks import check_coupling
from mtaccum.engine.label_counts import LabelCounts
from mtaccum.engine.levers import Levers
from mtaccum.engine.nonfinite import NonfiniteSearch
from mtaccum.engine.notices import Notices
from mtaccum.engine.options import StepOptions
from mtaccum.engine.outside import Outside
from mtaccum.engine.precision import Precision, fresh_casts
from mtaccum.engine.result import LossLog, StepResult
from mtaccum.engine.schedules import SCHEDULES, Backward
from mtaccum.engine.window_counts import WindowCounts, check_labels, check_window
from mtaccum.errors import ConfigError
from mtaccum.model.paths import ROOT
from mtaccum.model.tree import MultiTaskModel
from mtaccum.parallel import Ranks
from mtaccum.state import Snapshot, keeping_buffers


class WindowRun:
    """Runs windows forwards and backwards, one graph at a time. Arguments as in ``Engine``."""

    def __init__(
        self,
        model: MultiTaskModel,
        options: StepOptions,
        ranks: Ranks,
        precision: Precision,
        backward: Backward,
    ) -> None:
        self.model, self.options, self.ranks = model, options, ranks
        self.precision, self.backward = precision, backward
        self._levers = Levers(model, options)
        self._notices = Notices(model, options, ranks)
        self.outside = Outside(model)

    def count_labels(self, window: Sequence[Any]) -> LabelCounts:
        """The counts of a window as a step needs them, chunks included."""
        return LabelCounts.of(self.model.tasks_by_name(), window, self.options.chunked)

    def gradient(
        self, window: Sequence[Any], labels: LabelCounts | None, *, onto_others: bool = False
    ) -> StepResult:
        """Compute a window's gradient, and add it to ``.grad``.

        Args:
            labels: None: they are counted here.
            onto_others: whether there are gradients already.
        """
        if torch.is_inference_mode_enabled():
            raise ConfigError("nothing can be learned under torch.inference_mode(); leave it first.")
        check_window(self.model, window)
        check_coupling(self.model, self.options)
        if labels is None:
            labels = self.count_labels(window)
        else:
            check_labels(self.model, labels, len(window), self.options.chunked)
        counts = WindowCounts.agreed(labels, self.model, self.ranks)
        self._notices.before(window, counts, onto_others=onto_others)
        self.outside.begin(name for name, total in labels.totals.items() if total > 0)
        log = LossLog(counts)
        self._run(window, counts, log)
        self._levers.ran(counts)
        if not onto_others:
            self._notices.after(counts)
        return log.result(self.ranks, self.model.device)

    def find_nonfinite(self, window: Sequence[Any], before: Snapshot) -> str | None:
        """Run a window again, task by task, up to the first value that isn't finite, and name it.

        The heads run in the same order and chunks as before, so that they draw the same random numbers, but
        each with a backward of its own.
        """
        counts = WindowCounts.agreed(self.count_labels(window), self.model, self.ranks)
        search = NonfiniteSearch(self.model, counts, self.ranks, window)
        with before.once_more(), search.looking():
            self._run(window, counts, search, searching=True)
        return self.ranks.earliest(search.finding, search.backwards, in_gradient=search.in_gradient)

    def _run(
        self, window: Sequence[Any], counts: WindowCounts, log: LossLog, *, searching: bool = False
    ) -> None:
        """All forwards and backwards of a window."""
        model, device = self.model, self.model.device
        schedule = SCHEDULES["sequential" if searching else self.options.schedule]
        backward = self.precision.scaled(self.backward)
        autocast = partial(self.precision.autocast, device)
        of_micro_batch = partial(
            Binding, model, self.options, self.ranks, counts, log, autocast, not searching
        )
        # parameters that are gathered for a pass would look like others
        searched = self.outside.looking and not searching and not self.ranks.shares_gradients
        outside = self.outside if searched else None
        with (
            self.ranks.window(model, counts.agreement, searching=searching),
            # in backwards too, where a checkpoint of the user's own would run frozen nodes again
            keeping_buffers(model.frozen_modules()),
            self._levers.running(counts),
            fresh_casts(),
        ):
            batches = self.ranks.micro_batches(window)
            for index, (batch, tasks) in enumerate(zip(batches, counts.running, strict=False)):
                tasks = self.options.in_order(tasks)
                self.ranks.before_micro_batch(index, tasks)
                log.micro_batch = index
                if tasks:
                    # moved here and bound to no name: on the device is only the micro-batch that runs
                    binding = of_micro_batch(to_device(batch, device), index, outside=outside)
                    roots, inputs = binding.bound(tasks)
                    del binding
                    schedule(roots, {ROOT: inputs}, backward)
                    del roots, inputs
