"""The command line: Hydra's composition, with errors in a few lines for people.

Hydra's own ``main`` gives overrides, ``--config-dir``, ``--multirun``, ``--cfg`` and ``--help``. Around it
stand two things: ``tasks=[...]`` and ``+tasks=[...]`` mean the same, and an error is explained, not traced.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hydra
import yaml  # OmegaConf's own parser
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mtaccum.config import ranks
from mtaccum.config.schema import RunConfig, known_keys
from mtaccum.errors import ConfigError, MtaccumError, unknown_name
from mtaccum.parallel import launched
from mtaccum.planning.plan import quoted

INTERRUPTED = 130  # what shells report for a process ended by Ctrl-C
_EXPLAINED = (MtaccumError, HydraException, OmegaConfBaseException, yaml.YAMLError, OSError)
_OPEN = re.compile(r"^(tasks|necks|trunk|optimizer|data\.train|data\.val)\.[^=]+=")
_TASKS = re.compile(r"^\+{0,2}tasks=(.*)$", re.DOTALL)


def config_dir() -> Path:
    """The folder with the configs that ship: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def run_command(
    config_name: str, function: Callable[[RunConfig], int], arguments: Sequence[str], *, trains: bool = False
) -> int:
    """Compose ``config_name`` with the overrides in ``arguments``, and call ``function`` with the result.

    Args:
        function: gets the typed config and returns an exit code.
        arguments: as typed by a user, for Hydra.
        trains: whether it may run on several ranks.

    Returns:
        The exit code; 2 after an error that was explained on standard error.
    """
    try:
        ranks.check_launch(arguments, trains=trains)
    except ConfigError as error:
        return ranks.leave(_report(error, arguments))
    with ranks.one_voice():
        code = _run(config_name, function, ranks.without_folder(arguments))
    return ranks.leave(code)


def _run(config_name: str, function: Callable[[RunConfig], int], arguments: Sequence[str]) -> int:
    codes: list[int] = []

    def job(values: DictConfig) -> None:
        logging.getLogger("mtaccum").propagate = False  # the display says it; Hydra's log would say it again
        folder = Path(str(values.run_dir))
        if launched() and folder != Path.cwd():
            _remove_if_empty(folder)  # torchrun may end this process at any time; the run makes it again
        try:
            with ranks.on_ranks(RunConfig.read(_plain(values))) as config:
                codes.append(function(config))
        except _EXPLAINED as error:
            if full_error:
                raise
            raise SystemExit(_report(error, arguments)) from error  # past Hydra, which would trace it
        except Exception as error:
            if full_error or not launched():
                raise
            raise SystemExit(ranks.report_unexplained(error)) from error
        finally:
            logging.getLogger("mtaccum").propagate = True
            if ranks.first():
                _remove_if_empty(folder)

    before, argv = os.environ.get("HYDRA_FULL_ERROR"), sys.argv
    full_error = before not in (None, "", "0")
    try:
        sys.argv = [f"mtaccum.{config_name}", *_normalized(arguments)]
        os.environ["HYDRA_FULL_ERROR"] = "1"  # raise, so that the error can be explained here
        hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=config_name)(job)()
    except _EXPLAINED as error:
        if full_error:
            raise
        return _report(error, arguments)
    except SystemExit as end:  # also Hydra's own, after --help say
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        if ranks.first():
            print("interrupted", file=sys.stderr)
        return INTERRUPTED
    finally:
        sys.argv = argv
        os.environ.pop("HYDRA_FULL_ERROR", None)
        if before is not None:
            os.environ["HYDRA_FULL_ERROR"] = before
    return max(codes, default=0)


def _report(error: Exception, arguments: Sequence[str]) -> int:
    ranks.let_others_speak()
    print(f"{ranks.rank_name()}error: {_explain(error, arguments)}", file=sys.stderr)
    return 2


def resume_command(config_name: str, arguments: Sequence[str], folder: str) -> str:
    """The command line that goes on with an interrupted run, to be pasted into a shell."""
    arguments = list(arguments)
    for position, path in _config_dirs(arguments):
        arguments[position] = arguments[position].replace(str(path), str(path.resolve()))
    kept = [a for a in arguments if not a.lstrip("+").startswith(("resume=", "hydra.run.dir="))]
    return shlex.join(
        [
            *(*ranks.launcher(), "-m", f"mtaccum.{config_name}", *kept),
            *(f"resume={quoted(folder)}", f"hydra.run.dir={quoted(folder)}"),
        ]
    )


def _plain(values: DictConfig) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(values, resolve=True, throw_on_missing=True)
    sections = {str(key): value for key, value in plain.items()}
    for section in ("tasks", "necks"):
        for node in (sections.get(section) or {}).values():
            if isinstance(node, dict) and True in node:  # YAML 1.1 reads an unquoted `on:` as true
                node["on"] = node.pop(True)
    return sections


def _normalized(arguments: Sequence[str]) -> list[str]:
    """Hydra wants a ``+`` before what the config doesn't hold yet; people write it or not.

    So ``tasks=[...]`` is ``+tasks=[...]``, and an entry of an open part is set or added; whether it is valid
    is for the class to say that gets it.
    """
    for _, folder in _config_dirs(arguments):
        if not folder.is_dir():
            raise ConfigError(f"--config-dir: there is no folder {str(folder)!r} (from {Path.cwd()}).")
    result = []
    for argument in arguments:
        if _OPEN.match(argument):
            argument = f"++{argument}"
        if match := _TASKS.match(argument):
            if match[1].lstrip().startswith("{"):
                argument = f"++tasks={match[1]}"
            else:
                _check_task_names(match[1], arguments)
                argument = f"+tasks={match[1]}"
        result.append(argument)
    return result


def _config_dirs(arguments: Sequence[str]) -> list[tuple[int, Path]]:
    """The user's config folders, with the position of the argument that names them."""
    found = []
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in ("--config-dir", "-cd"):
            position = index if equals else index + 1
            found.append((position, Path(value if equals else [*arguments, ""][position])))
    return found


def _check_task_names(value: str, arguments: Sequence[str]) -> None:
    """Hydra can only say that a file couldn't be loaded; we know what there is."""
    sweep = "], [" in value.replace("],[", "], [")  # several lists, for --multirun
    names = re.findall(r"[^\[\],'\"\s]+", value)
    known = group_options("tasks", arguments)
    for name in names:
        if name not in known:
            raise ConfigError(
                unknown_name("task", name, known, "Add one of your own: '+tasks.edges={type: edges}'.")
            )
    if not sweep and (twice := {name for name in names if names.count(name) > 1}):
        raise ConfigError(f"the task {min(twice)!r} is named twice; two tasks can't have one name.")
    if not names:
        raise ConfigError(_no_task(known))


def _no_task(known: Sequence[str]) -> str:
    return f"no task was chosen. There are: {', '.join(known)}. For example: '+tasks=[seg,cls]'."


def group_options(group: str, arguments: Sequence[str] = ()) -> list[str]:
    """Names of a config group's options, those in the user's ``--config-dir`` included."""
    folders = [config_dir(), *(folder for _, folder in _config_dirs(arguments))]
    return sorted({path.stem for folder in folders for path in (folder / group).glob("[!_]*.yaml")})


def _explain(error: Exception, arguments: Sequence[str]) -> str:
    """An error in a few lines: what is wrong, what is valid."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.partition("/")
        if option and (known := group_options(group, arguments)):
            return unknown_name(f"option of {group}:", option, known)
    text = str(error)
    if key := re.search(r"Could not override '([^']+)'", text):
        inside = re.search(r"Key '([^']+)' is not in struct\s+full_key: (\S+)", text)
        return _explain_key(inside[2] if inside else key[1])
    if isinstance(error, ConfigError) and text.startswith("no task was chosen"):
        return _no_task(group_options("tasks", arguments))
    lines = [line for line in text.splitlines() if line.strip() and "full_key" not in line]
    return "\n".join([*lines[:6], *(["..."] if len(lines) > 6 else [])])


def _explain_key(key: str) -> str:
    """A key that the composed config doesn't have: the ones it could have in that place."""
    above, _, last = key.rpartition(".")
    place = f"key in {above}:" if above else "key"
    if known := known_keys(above):
        return unknown_name(place, last, known)
    return (
        f"unknown {place} {last!r}. To add it, write +{key}=..., or replace the whole: '~{above}' "
        f"'+{above}={{...}}'."
    )


def _remove_if_empty(folder: Path) -> None:
    """Hydra makes the run's folder before anything was checked; leave none behind after an error."""
    made = [folder]
    if folder.parent.parent.name in ("outputs", "multirun"):  # Hydra's folders by day
        made += [folder.parent, folder.parent.parent]
    for path in made:
        try:
            path.rmdir()
        except OSError:  # not empty, or never made
            return
