"""What a run has left in its folder: to go on from, but with the same training only, or to use its model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from mtaccum.config.checks import CONFIG, SUMMARY, import_plugins
from mtaccum.config.objects import build_model
from mtaccum.config.schema import RunConfig
from mtaccum.errors import ConfigError, first_line, unknown_name
from mtaccum.model import MultiTaskModel
from mtaccum.training import BEST, LAST, Trainer, find_checkpoint, load_checkpoint


def load(run: str | Path, state: str = "best") -> MultiTaskModel:
    """The model that a run trained, in evaluation mode on the CPU.

        model = mtaccum.load("outputs/2026-01-31/12-00-00")
        predictions = model({"image": images})

    Args:
        run: the run's folder.
        state: ``best`` (by ``trainer.monitor``; the last one if none was evaluated) or ``last``.

    Raises:
        ConfigError: no run there, or its plugins can't be imported.
    """
    folder = Path(run)
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"no run in {str(folder)!r}: there is no {CONFIG}.")
    if state not in ("best", "last"):
        raise ConfigError(unknown_name("state", state, ["best", "last"]))
    values: Any = OmegaConf.to_container(OmegaConf.load(folder / CONFIG), resolve=True)
    config = RunConfig.read(values)
    import_plugins(config.plugins)
    model, _ = build_model(config)
    names = (BEST, LAST) if state == "best" else (LAST,)
    checkpoint = load_checkpoint(find_checkpoint(folder, names))
    weights = checkpoint["model"]
    if (average := checkpoint["average"]) is not None:
        inside = "module."  # AveragedModel's name for the model it follows
        weights = {k.removeprefix(inside): v for k, v in average.items() if k.startswith(inside)}
    model.load_state_dict(weights)
    return model.eval()


def resume(trainer: Trainer, state: dict[str, Any], config: RunConfig) -> None:
    """Put a trainer where a checkpoint was; the training must be the same one, but for its length."""
    path = find_checkpoint(str(config.resume))
    ranks_before = len(state["random"] if "random" in state else state["rng"])
    _check_same_training(config, path.parent / CONFIG, (ranks_before, trainer.ranks.world_size))
    try:
        trainer.load_state_dict(state)
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"the checkpoint {path} doesn't fit this config; resume with the tasks, model and optimizer "
            f"it was made with. {first_line(error)}"
        ) from error
    if path.parent.resolve() != Path(config.run_dir).resolve():
        trainer.best = None  # the best state so far lies elsewhere; this folder finds its own
    total = trainer.settings.total_steps
    finished = (path.parent / SUMMARY).exists() and trainer.steps == total
    if trainer.steps > total or finished:
        raise ConfigError(
            f"the checkpoint {path} has {trainer.steps} steps already, and the training ends at {total}. "
            f"Raise trainer.max_steps to go on."
        )


_LASTING = {"tasks", "necks", "trunk", "data", "optimizer", "lr_schedule", "batch_size", "seed"}
_FREE = {"data.workers", "data.eval_batch_size"}  # how fast it is, not what is trained


def _flat(values: Any, above: str = "") -> dict[str, Any]:
    """Nested dicts as one, by dotted keys."""
    if not isinstance(values, Mapping) or not values:
        return {above: values}
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{above}.{key}" if above else str(key))
    return flat


def _check_same_training(config: RunConfig, saved: Path, ranks: tuple[int, int]) -> None:
    """Refuse settings that a resumed training would ignore, or that would change which samples are left, on
    as many ranks as there were and are."""
    if not saved.is_file():
        return
    before, now = (
        _flat(OmegaConf.to_container(OmegaConf.load(saved))),
        _flat(config.model_dump(by_alias=True)),
    )
    samples_per_step = before.get("batch_size", 0) * ranks[0], now["batch_size"] * ranks[1]
    if samples_per_step[0] == samples_per_step[1]:
        before["batch_size"] = now["batch_size"]  # the same batches, on fewer or more ranks
    elif ranks[0] != ranks[1] and config.trainer.epochs is not None:
        raise ConfigError(
            f"a step on {ranks[1]} ranks has {samples_per_step[1]} samples, and had {samples_per_step[0]} on "
            f"{ranks[0]}, so epochs don't tell how many steps are left. Give trainer.max_steps and "
            f"trainer.epochs=null, or a batch_size (per rank) with which a step has as many as before."
        )
    changed = [
        f"{key}: {now.get(key)!r} (was {before.get(key)!r})"
        for key in sorted({*before, *now})
        if key.split(".")[0] in _LASTING and key not in _FREE and before.get(key) != now.get(key)
    ]
    if changed:
        raise ConfigError(
            f"resume goes on with the same training, but these settings differ from those in {saved}: "
            f"{'; '.join(changed)}. Set them as they were, or start a new training."
        )
