"""The layout: imports point one way, only the configuration knows Hydra, and importing does nothing else."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mtaccum"

# From the bottom up: each part may import itself and those before it. The commands come last; the face,
# mtaccum/__init__.py, may import them all, and nobody inside imports the face.
COMMANDS = ("train", "verify", "plan")
PARTS = (
    "errors",
    "torch_internals",
    "structure",
    "values",
    "batch",
    "model",
    "observe",
    "state",
    "tasks",
    "data",
    "parallel",
    "engine",
    "exactness",
    "memory",
    "planning",
    "training",
    "config",
    *COMMANDS,
)
ONLY_CONFIG = {"hydra", "omegaconf"}
OF_EXTRAS = {"matplotlib"}  # imported in functions only, which say or do without where it is missing
DISTRIBUTIONS = {"hydra": "hydra-core", "yaml": "pyyaml"}  # where the names of import and package differ


class Import(NamedTuple):
    """One import statement: in which part, where, and the modules that it may load."""

    part: str
    place: str
    modules: tuple[str, ...]


def part_of(path: Path) -> str:
    """``engine`` for mtaccum/engine/cut.py, ``batch`` for mtaccum/batch.py, ``__init__`` for the face."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports() -> Iterator[Import]:
    """All imports of the package, those inside of functions included, those for type checkers alone not."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        unread = {
            id(node)
            for block in ast.walk(tree)
            if isinstance(block, ast.If) and ast.unparse(block.test).endswith("TYPE_CHECKING")
            for statement in block.body
            for node in ast.walk(statement)
        }
        for node in ast.walk(tree):
            if id(node) in unread:
                continue
            place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                yield Import(part_of(path), place, tuple(alias.name for alias in node.names))
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{place}: relative; write it from mtaccum on"
                assert node.module is not None
                # `from mtaccum import batch` loads mtaccum.batch, and the face
                names = tuple(f"{node.module}.{alias.name}" for alias in node.names)
                yield Import(part_of(path), place, (node.module, *names))


IMPORTS = list(imports())


def test_every_module_has_its_place_in_the_order() -> None:
    assert {part_of(path) for path in PACKAGE.rglob("*.py")} == {"__init__", *PARTS}
    assert len(IMPORTS) > 100


def test_imports_point_one_way() -> None:
    wrong = []
    for part, place, modules in IMPORTS:
        if part == "__init__":
            continue
        for module in modules:
            package, _, rest = module.partition(".")
            if package != "mtaccum":
                continue
            given = rest.partition(".")[0]
            if given not in PARTS:
                wrong.append(f"{place}: {part} imports {module}, the face")
            elif PARTS.index(given) > PARTS.index(part):
                wrong.append(f"{place}: {part} imports {module}, which is above it")
    assert not wrong, "\n".join(wrong)


def test_only_config_and_the_commands_know_hydra_and_omegaconf() -> None:
    knowing = {
        part for part, _, modules in IMPORTS for module in modules if module.partition(".")[0] in ONLY_CONFIG
    }
    assert "config" in knowing, "the reading of imports finds nothing"
    assert knowing <= {"config", *COMMANDS}


def test_every_package_that_is_imported_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {re.split(r"[^\w.-]", line)[0].lower() for line in project["dependencies"]}
    imported = {module.partition(".")[0] for _, _, modules in IMPORTS for module in modules}
    foreign = imported - sys.stdlib_module_names - {"mtaccum"} - OF_EXTRAS
    assert {DISTRIBUTIONS.get(name, name) for name in foreign} <= declared
    extras = project["optional-dependencies"]
    assert {re.split(r"[^\w.-]", line)[0].lower() for line in extras["plot"]} == OF_EXTRAS
    # tensorboard alone is imported through torch.utils.tensorboard
    assert declared - {DISTRIBUTIONS.get(name, name) for name in foreign} == {"tensorboard"}


# --- in a fresh interpreter -------------------------------------------------------------------------------

STATE = """
import importlib, logging, os, pkgutil, random, signal, sys, threading, warnings
import numpy as np, torch
import {foreign}

def state():
    return {{
        "torch's random numbers": torch.get_rng_state().tolist(),
        "NumPy's random numbers": str(np.random.get_state()),
        "Python's random numbers": random.getstate(),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "search path": list(sys.path),
        "signal handlers": {{n: signal.getsignal(n) for n in signal.valid_signals()}},
        "warning filters": list(warnings.filters),
        "log handlers": list(logging.getLogger().handlers),
        "threads": threading.active_count(),
        "hooks": (sys.excepthook, sys.displayhook, list(sys.meta_path)),
        "torch's settings": (
            torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            len(torch.nn.modules.module._global_forward_pre_hooks),
        ),
    }}

before = state()
import mtaccum
for module in pkgutil.walk_packages(mtaccum.__path__, "mtaccum."):
    importlib.import_module(module.name)
after = state()
changed = [name for name in before if before[name] != after[name]]
assert not changed, changed
assert "mtaccum.train" in sys.modules and "mtaccum.training.trainer" in sys.modules
"""


def python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-B", "-c", code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_importing_any_module_has_no_side_effect(tmp_path: Path) -> None:
    # other packages first: what they do on import is theirs
    modules = {
        module
        for part, _, names in IMPORTS
        for module in names[:1]
        if module.partition(".")[0] not in {*sys.stdlib_module_names, "mtaccum"}
    }
    done = python(STATE.format(foreign=", ".join(sorted(modules))), tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


def test_the_face_loads_only_what_a_loop_of_ones_own_needs(tmp_path: Path) -> None:
    heavy = {*ONLY_CONFIG, "pydantic", "rich", "tensorboard", "torchmetrics"}
    code = f"import sys, mtaccum; mtaccum.Engine; print(sorted({heavy} & sys.modules.keys()))"
    done = python(code, tmp_path)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
