"""What an engine refuses to work with, said before anything runs."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Collection, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mtaccum.engine.window import WindowPlan
from mtaccum.errors import BatchError, ConfigError, OptimizerError, listed, unknown_name
from mtaccum.model.tree import MultiTaskModel
from mtaccum.parallel.ddp import wrapper_of
from mtaccum.parallel.fsdp import is_sharded
from mtaccum.parallel.ranks import ALONE, Ranks, current_ranks, several

PARALLEL = ("none", "ddp", "fsdp")


def check_choice(what: str, given: Any, known: Collection[str]) -> None:
    """Refuse a name that isn't one of the known ones."""
    if given not in known:
        raise ConfigError(unknown_name(what, given, known))


def check_positive(what: str, value: Any, *, whole: bool = False) -> None:
    """Refuse what is neither None nor a finite number above 0."""
    if value is None and not whole:
        return
    number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        kind = "whole number of at least 1" if whole else "finite number above 0"
        raise ConfigError(f"{what} must be a {kind}, got {value!r}.")


def check_nothing_for_step(**given: Any) -> None:
    """Refuse arguments that only ``step`` heeds, where there is no optimizer to step."""
    for name, value in given.items():
        if value is not None:
            raise ConfigError(f"{name} belongs to step(), but this engine has no optimizer.")


def check_model(model: Any) -> None:
    """Refuse anything but a MultiTaskModel free of parallel wrappers.

    A wrapper would reduce gradients in every backward, of which a step has several.
    """
    if (wrapper := wrapper_of(model)) is not None:
        raise ConfigError(
            f"the model is wrapped by {wrapper}, which reduces gradients in each backward, while a step here "
            f"has several. Give the bare modules to MultiTaskModel: started by torchrun, the engine reduces "
            f"gradients once per step."
        )
    if not isinstance(model, MultiTaskModel):
        raise ConfigError(
            f"the engine needs a MultiTaskModel, got {type(model).__name__}: "
            f"MultiTaskModel(trunk, tasks, inputs=...), not wrapped or compiled (compile=True does that by "
            f"node). For a loop without tasks use split_backward."
        )
    if "forward" in vars(model):
        warnings.warn(
            "the model's forward was replaced (by Accelerate with mixed precision, perhaps), but the engine "
            "runs its nodes and doesn't call it. Choose precision= here instead, or enter the autocast "
            "around the engine.",
            stacklevel=3,
        )


def check_optimizer(model: MultiTaskModel, optimizer: Optimizer) -> None:
    """Refuse an optimizer that lacks a trainable parameter or needs a closure."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise OptimizerError(
            f"{type(optimizer).__name__}.step needs a closure, which would run the model several times in a "
            f"step. Use an optimizer that steps from gradients."
        )
    accelerated = getattr(optimizer, "gradient_state", None)
    if accelerated is not None and getattr(accelerated, "num_steps", 1) > 1:
        raise OptimizerError(
            f"Accelerate steps this optimizer every {accelerated.num_steps} backwards only, and divides "
            f"losses by that. A window is accumulated already: set gradient_accumulation_steps=1, and give "
            f"larger windows."
        )
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    tasks = model.tasks_by_name()
    idle = tuple(f"tasks.{n}." for n, task in tasks.items() if not task.enabled or task.mode == "frozen")
    # a parameter shared with an idle task has a name in each of the places where it is used
    learning = {
        id(parameter): name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad and not name.startswith(idle)
    }
    if missing := [name for key, name in learning.items() if key not in held]:
        raise OptimizerError(
            f"the optimizer doesn't hold {len(missing)} trainable parameters: "
            f"{listed(missing)}. Build it from model.parameters(), or set "
            f"requires_grad_(False) on what shall not be trained."
        )


def check_hooks(model: MultiTaskModel) -> None:
    """Refuse parameters with a hook that wants the whole gradient, which here comes in several parts."""
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise OptimizerError(
                f"{name} has a post-accumulate-grad hook (an optimizer step in the backward, say). It would "
                f"run for each task and micro-batch. Use on_gradients, or step the optimizer as usual."
            )


def check_offload(model: MultiTaskModel, offload: Any) -> None:
    """Refuse to move saved tensors off a device that they can't leave."""
    if not isinstance(offload, bool):
        raise ConfigError(f"offload must be True or False, got {offload!r}.")
    if offload and model.device.type != "cuda":
        raise ConfigError(
            f"offload keeps the saved activations of a CUDA device in the host's memory, but the model is on "
            f"{model.device}. Recompute parts instead: recompute=[...]."
        )


def check_precision(model: MultiTaskModel, precision: str, scaler: Any) -> None:
    """Refuse to cast what autocast leaves alone, and to scale what PyTorch can't unscale."""
    types = {parameter.dtype for parameter in model.parameters()}
    if precision != "fp32" and types == {torch.float64}:
        raise ConfigError(
            f"precision={precision!r} has no effect: autocast leaves parameters in float64 alone. Use "
            f"model.float(), or precision='fp32'."
        )
    half = [n for n, p in model.named_parameters() if p.requires_grad and p.dtype == torch.float16]
    if scaler is not None and half:
        raise ConfigError(
            f"{listed(half)}: parameters in float16 can't be trained with a scaler. Keep them in float32 "
            f"(model.float()); precision='fp16' casts where that is safe."
        )


def unreached_parameters(model: MultiTaskModel, plan: WindowPlan) -> list[str]:
    """Trainable parameters without a gradient after a window, in nodes that were to learn from it."""
    tasks = {name: model.task(name).mode for name, total in plan.totals.items() if total > 0}
    learning = [
        model.prefix(node)
        for node in model.own_modules()
        if any(
            mode == "train" or (mode == "detached" if node == name else mode == "frozen")
            for name, mode in tasks.items()
            if node in model.paths[name]
        )
    ]
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.grad is None and name.startswith(tuple(learning))
    ]


def check_parallel(model: MultiTaskModel, parallel: str | None) -> Ranks:
    """The ranks that an engine trains with; refuse a way that there isn't."""
    if parallel is not None:
        check_choice("parallel", parallel, PARALLEL)
    if parallel == "fsdp" and current_ranks().size > 1 and not is_sharded(model):
        raise ConfigError(
            "parallel='fsdp' needs a model that is spread over the ranks: call mtaccum.parallel.shard(model) "
            "before its optimizer is made."
        )
    if parallel not in (None, "fsdp") and is_sharded(model):
        raise ConfigError(f"the model is spread over the ranks, so parallel={parallel!r} can't train it.")
    return ALONE if parallel == "none" else current_ranks()


def check_alike(model: MultiTaskModel, ranks: Ranks) -> None:
    """Refuse models that differ between ranks: gradients would be added to those of other parameters."""
    if ranks.size == 1:
        return
    own = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]
    own += [(name, tuple(b.shape), str(b.dtype), False) for name, b in model.named_buffers()]
    for rank, theirs in enumerate(ranks.gather(own)):
        if theirs != own:
            mine, other = next(pair for pair in zip_longest(own, theirs) if pair[0] != pair[1])
            raise ConfigError(
                f"all ranks must train the same model, but rank {ranks.rank} has {_entry(mine)} where rank "
                f"{rank} has {_entry(other)}."
            )


def _entry(entry: tuple[str, tuple[int, ...], str, bool] | None) -> str:
    if entry is None:
        return "nothing"
    name, shape, dtype, learns = entry
    return f"{name} {shape} of {dtype}, {'trainable' if learns else 'not trainable'}"


def check_joined(ranks: Ranks, parallel: str | None) -> None:
    """Refuse to train alone what was made before there were other ranks."""
    if parallel != "none" and ranks.size == 1 and several():
        raise ConfigError(
            "the engine was made before the ranks were joined, and would train this one by itself. Make it "
            "inside of mtaccum.parallel.joined(), or with parallel='none'."
        )


def check_sharded(model: MultiTaskModel, **given: Any) -> None:
    """Refuse what doesn't go with parameters that are spread over the ranks."""
    for name, value in given.items():
        if value and is_sharded(model):
            raise ConfigError(f"{name} doesn't go with parallel=fsdp; use parallel=ddp, or leave it away.")


def check_comm_hook(model: MultiTaskModel, comm_hook: str, ranks: Ranks) -> None:
    """Refuse what PyTorch's communication hooks can't do on the CPU."""
    if comm_hook == "bf16" and ranks.size > 1 and model.device.type != "cuda":
        raise ConfigError(
            f"comm_hook=bf16 works on CUDA only, and the model is on {model.device}. Use comm_hook=fp16, or "
            f"none."
        )


def check_synchronised(model: MultiTaskModel, batchnorm: str, ranks: Ranks) -> None:
    """Refuse to synchronise BatchNorm over ranks on the CPU, where PyTorch can't."""
    if batchnorm == "sync" and ranks.size > 1 and model.device.type != "cuda":
        raise ConfigError(
            f"batchnorm=sync works on CUDA only, and the model is on {model.device}. Use batchnorm=keep: "
            f"running statistics are averaged over the ranks before they are used."
        )


def check_plan(model: MultiTaskModel, plan: Any, micro_batches: int, chunks: Collection[str]) -> None:
    """Refuse counts that are of another window, of other tasks, or without those of the chunks."""
    if not isinstance(plan, WindowPlan):
        raise ConfigError(f"plan must be a WindowPlan, as Engine.plan gives, got {type(plan).__name__}.")
    tasks = model.enabled_tasks()
    lengths = {len(counts) for counts in plan.counts.values()}
    wanted = set(tasks), {*tasks} & {*chunks}, {micro_batches} if tasks else set()
    if (set(plan.counts), set(plan.parts), lengths) != wanted:
        raise ConfigError(
            f"the plan is of {_described(plan.micro_batches, plan.counts, plan.parts)}, but the step of "
            f"{_described(micro_batches, tasks, chunks)}. Make it by this engine's plan(window), after tasks "
            f"are switched on or off."
        )


def _described(micro_batches: int, tasks: Collection[str], chunks: Collection[str]) -> str:
    cut = f", of which {listed(sorted(chunks))} in chunks" if chunks else ""
    return f"{micro_batches} micro-batches and the tasks {listed(sorted(tasks))}{cut}"


def check_window(model: MultiTaskModel, window: Sequence[Any]) -> None:
    """Refuse a batch given in place of a window of batches."""
    if not isinstance(window, list):
        raise BatchError(
            f"a window is a list of micro-batches, got {type(window).__name__}. For a single batch: [batch]; "
            f"to cut one: split_batch(batch, K)."
        )
    if model.reads_fields and any(isinstance(batch, Tensor) for batch in window):
        raise BatchError(
            "a window is a list of micro-batches, but this list holds tensors: it looks like a batch. Wrap "
            "it: [batch]."
        )
