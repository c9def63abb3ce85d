"""A trained model from a run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from mtaccum.config.checks import CONFIG, import_plugins
from mtaccum.config.objects import build_model
from mtaccum.config.schema import RunConfig
from mtaccum.errors import ConfigError, unknown_name
from mtaccum.model import MultiTaskModel
from mtaccum.training import BEST, LAST, find_checkpoint, load_checkpoint


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
