"""What the documentation's site makes from the code: nothing that can be set or imported is left out."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

import mtaccum
from mtaccum.config.schema import ENGINE_KEYS, RunConfig
from mtaccum.engine import StepOptions
from mtaccum.engine import options as step_options
from mtaccum.engine.options import EXAMPLES
from mtaccum.parallel import Ranks

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    """``docs/generate/hooks.py``, with its neighbours importable, as MkDocs loads it."""
    sys.path.insert(0, str(DOCS / "generate"))
    try:
        spec = importlib.util.spec_from_file_location("hooks", DOCS / "generate" / "hooks.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(DOCS / "generate"))
    return module


def closed_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    """The dotted path of each entry of the schema; of sections that are closed, those inside."""
    found = []
    for name, field in section.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        annotation: Any = field.annotation
        if annotation is StepOptions:
            found += [f"{path}.{key}" for key in ENGINE_KEYS]
        elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
            found += closed_keys(annotation, f"{path}.")
        else:
            found.append(path)
    return found


def rows_of(markdown: str) -> dict[str, list[str]]:
    """By option the cells of its first row."""
    rows: dict[str, list[str]] = {}
    for option, rest in re.findall(r"^\| `([^`]+)` \|(.*)\|$", markdown, re.MULTILINE):
        rows.setdefault(option, [cell.strip() for cell in rest.split(" | ")])
    return rows


def test_every_option_of_the_schema_has_a_row_that_says_what_it_means(hooks: ModuleType) -> None:
    rows = rows_of(hooks.fill((DOCS / "commands.md").read_text()))
    chosen_by_group = {"engine.schedule", "lr_schedule.name", "parallel.kind"}
    opened = {"data.train", "data.val", "data.collate_fn", "optimizer._target_", "trunk"}
    for key in closed_keys(RunConfig):
        if key not in chosen_by_group and key not in opened:
            assert key in rows, key
            assert rows[key][-1], f"{key}: conf/ has no comment on it"


def test_every_choice_of_every_group_is_listed(hooks: ModuleType) -> None:
    page = hooks.fill((DOCS / "commands.md").read_text())
    for path in (ROOT / "conf").glob("*/*.yaml"):
        if path.stem != "_defaults":
            assert re.search(rf"`[^`]*\b{path.stem}\b[^`]*`", page), path


def test_defaults_and_valid_values_are_those_of_the_files_and_the_schema(hooks: ModuleType) -> None:
    rows = rows_of(hooks.fill((DOCS / "commands.md").read_text()))
    shipped = yaml.safe_load((ROOT / "conf" / "train.yaml").read_text())
    assert rows["batch_size"][0] == f"`{shipped['batch_size']}`"
    assert rows["trainer.patience"][:2] == ["`null`", "whole number ≥ 1, or null"]
    for value in get_args(RunConfig.model_fields["plan"].annotation):
        assert f"`{value}`" in rows["plan"][1]


def test_what_a_task_takes_is_said_by_its_docstring(hooks: ModuleType) -> None:
    rows = rows_of(hooks.fill((DOCS / "commands.md").read_text()))
    assert rows["tasks.seg.ignore_index"] == ["`255`", "", "label of pixels that don't count."]
    assert "0 switches the task off" in rows["tasks.depth.weight"][-1]


def test_a_name_that_no_generator_has_is_an_error(hooks: ModuleType) -> None:
    with pytest.raises(KeyError, match="misspelt"):
        hooks.fill("<!-- generated: misspelt -->")


def test_what_a_step_option_takes_is_said_by_its_check(hooks: ModuleType) -> None:
    rows = rows_of(hooks.fill((DOCS / "commands.md").read_text()))
    for key in ENGINE_KEYS:
        if key != "schedule":  # a choice of the group
            assert rows[f"engine.{key}"][1], key
    assert rows["engine.precision"][1] == "`fp32`, `bf16`, `fp16`"
    assert rows["engine.offload"][1] == "true or false"
    assert rows["engine.max_grad_norm"][1] == "a finite number above 0, or null"


def test_the_table_of_options_is_what_the_engine_says(hooks: ModuleType) -> None:
    text = hooks.GENERATORS["option-table"]()
    rows = rows_of(text)
    assert set(rows) == set(EXAMPLES)
    # summed, sequential, split; ddp, fsdp
    assert rows["recompute"] == ["works"] * 5
    assert rows["head_groups"] == ["refused", "works", "works", "works", "works"]
    assert rows["chunks"] == ["refused", "refused", "works", "works", "refused"]
    assert "- compile doesn't go with parallel=fsdp" in text


def test_a_further_conflict_is_in_the_table(hooks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_offload(options: StepOptions) -> str | None:
        return "offload | never" if options.offload else None

    monkeypatch.setattr(step_options, "CONFLICTS", [*step_options.CONFLICTS, no_offload])
    text = hooks.GENERATORS["option-table"]()
    assert rows_of(text)["offload"] == ["refused"] * 5
    assert "- offload | never" in text


def test_bars_in_cells_do_not_end_them(hooks: ModuleType) -> None:
    table = hooks.option_table.markdown([["option", "split"], ["---", "---"], ["chunks", "works | or not"]])
    assert table == "| option | split |\n| --- | --- |\n| chunks | works \\| or not |"


def test_the_changelog_is_the_repositorys(hooks: ModuleType) -> None:
    page = hooks.fill((DOCS / "changelog.md").read_text())
    assert page.count("# Changelog") == 1
    assert "`Engine.count_labels(window)`" in page


def test_the_reference_names_all_that_is_public() -> None:
    text = (DOCS / "reference.md").read_text(encoding="utf-8")
    named = {f"mtaccum.{name}" for name in re.findall(r"^::: mtaccum\.([\w.]+)$", text, re.MULTILINE)}
    for name in named:
        where, _, last = name.rpartition(".")
        assert hasattr(importlib.import_module(where), last), name
    faces = json.loads((ROOT / "tests" / "public.json").read_text(encoding="utf-8"))["names"]
    public = {f"{face}.{name}" for face, names in faces.items() for name in names}
    # what is in the first face too stands there alone
    top = {f"{face}.{name}" for face in faces for name in faces["mtaccum"]}
    assert {name for name in public - top if name.count(".") > 1} <= named
    assert {f"mtaccum.{name}" for name in faces["mtaccum"]} - {"mtaccum.__version__"} <= named


def messages() -> str:
    """Each text in the source that isn't a docstring, with … for what is filled in; one a line."""
    found = []
    for path in (ROOT / "mtaccum").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(text.replace("\n", " ") for text in found)


def listed_messages() -> list[str]:
    """The first cells of the tables in the page on troubleshooting."""
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)


def test_messages_in_troubleshooting_are_those_of_the_code() -> None:
    known = messages()
    listed = listed_messages()
    assert len(listed) > 50
    unknown = []
    for message in listed:
        pieces = [re.escape(piece) for piece in message.split("…")]
        if not re.search("[^\n]*?".join(pieces), known):
            unknown.append(message)
    assert not unknown


def test_step_pages_name_files_that_exist() -> None:
    text = (DOCS / "how-a-step-works.md").read_text(encoding="utf-8")
    for name in set(
        re.findall(r"(?<![\w/])((?:engine|state|parallel|observe|conf)/[\w/]+\.(?:py|yaml))\b", text)
    ):
        place = ROOT if name.startswith("conf") else ROOT / "mtaccum"
        assert (place / name).is_file(), name


def test_step_pages_name_every_file_of_the_engine() -> None:
    text = (DOCS / "how-a-step-works.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`(\w+\.py)`", text.partition("## All files of the engine")[2]))
    assert listed == {path.name for path in (ROOT / "mtaccum" / "engine").glob("[!_]*.py")}


STEP_NAMES = (
    "engine.levers.LEVERS",
    "engine.lever.Lever",
    "engine.options.CONFLICTS",
    "engine.options.EXAMPLES",
    "engine.binding.Binding.bound",
    "engine.window_counts.WindowCounts.agreed",
    "engine.window_counts.WindowCounts.scale",
    "engine.cut.Cut.send_back",
    "engine.nonfinite.all_finite",
)


@pytest.mark.parametrize("path", STEP_NAMES)
def test_step_pages_name_what_the_code_has(path: str) -> None:
    package, module, *names = path.split(".")
    assert f"`{'.'.join(names)}`" in (DOCS / "how-a-step-works.md").read_text(encoding="utf-8")
    found: Any = importlib.import_module(f"mtaccum.{package}.{module}")
    for name in names:
        found = getattr(found, name)


def test_step_pages_list_the_methods_where_ranks_meet() -> None:
    text = (DOCS / "how-a-step-works.md").read_text(encoding="utf-8")
    section = text.partition("## 3.")[2].partition("## 4.")[0]
    cells = re.findall(r"^\| (`[^|]*`) \|", section, re.MULTILINE)
    listed = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert len(listed) > 10
    assert all(hasattr(Ranks, name) for name in listed)
    # what a kind may do otherwise, but for what is about a model, its options, or one rank's own look at it
    own = {"conflict", "check", "before_step", "local", "evaluated", "rank", "world_size", "is_rank_zero"}
    public = {name for name in vars(Ranks) if not name.startswith("_")}
    assert listed == public - own - {"kind", "averages", "shares_gradients", "comm_hook"}


def test_ids_of_cases_in_names_of_tests_are_in_the_cases() -> None:
    rows = set(re.findall(r"^\| (\w\d+) \|", (DOCS / "cases.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert {"g1", "n3", "t1", "f10"} <= rows
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    used = set(re.findall(r"def test_\w*?_([gblnisadrctvepf]\d{1,2})(?=_|\()", source))
    assert used <= rows, used - rows


def test_signs_of_markdown_in_comments_stand_for_themselves(hooks: ModuleType) -> None:
    rows = rows_of(hooks.fill((DOCS / "commands.md").read_text()))
    assert r"{\_target\_: my\_package.FPN, on: trunk}" in rows["necks"][-1]
    assert "`python -m mtaccum.plan`" in rows["memory.budget"][-1]


def test_what_is_cited_is_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == mtaccum.__version__
    assert f"## {mtaccum.__version__} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
