"""Every command and snippet of the README and of each page of the documentation, executed as a reader would.

A page is run in a folder of its own, its blocks in their order: ``sh`` line by line, ``python`` in one
namespace, and blocks that begin with a file's name (``# my_data.py``) become that file. Output that is shown
stands indented or in ``text`` blocks. Trainings are shortened; what is typed is otherwise what runs.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest
from commands import LIMIT_S, Forked

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
EXECUTED = ("sh", "python", "yaml")
LONG = ("getting-started", "memory")  # they plan and train several times

SHORT = [
    "trainer.max_steps=3",
    "trainer.eval_every=3",
    "data.train.size=96",
    "data.val.size=16",
    "trainer.log_every=1",
]
LONGER = ["trainer.max_steps=4", *SHORT[1:]]  # than the one it resumes

# .ci/run executes these in environments of its own. It trains from the installed wheel, and takes PyTorch
# from the default index, together with torchvision.
ELSEWHERE = {
    "pip install -e . && python -m mtaccum.train '+tasks=[seg,cls]'",
    "pip install -e '.[test]' && pytest",
    "pip install -e '.[docs]'",
    "mkdocs build --strict",
    "pip install torch --index-url https://download.pytorch.org/whl/cpu",
}
# These are for a person: they serve until somebody ends them, install, or judge the whole checkout.
FOR_A_PERSON = ("git ", "pip install ", "mkdocs serve", "ruff ", "mypy", "pytest", "bash .ci/")

_NUMBERS = count()  # of runs whose folders a page doesn't name


class Block(NamedTuple):
    """A fenced block: its language, its text, and its first line in the page, from 1."""

    language: str
    text: str
    line: int

    @property
    def file(self) -> str | None:
        """The file that it is to become, if its first line is a comment with a file's name."""
        found = re.match(r"# ([\w/]+\.(py|yaml))\n", self.text)
        return found[1] if found else None


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(found[1], found[2], text.count("\n", 0, found.start(2)) + 1)
        for found in re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


def inline_commands(page: Path) -> list[str]:
    """Those set in one line, `like this`."""
    return re.findall(r"`(python -m mtaccum\.\w+ [^`]*)`", page.read_text(encoding="utf-8"))


RUN = [page for page in PAGES if blocks_of(page) or inline_commands(page)]


def name_of(page: Path) -> str:
    """A page's name in the tests."""
    return page.stem


def shell(line: str, folder: Path, forked: Forked | None = None) -> None:
    """Run a line; what is Python in forked processes, if it is given who forks them."""
    words = shortened(shlex.split(line), names_folders=forked is not None)
    if words[0] == "tensorboard":
        words = ["python", "-m", "tensorboard.main", "--inspect", *words[1:]]  # reads, doesn't serve
    if words[0] == "python" and words[1].startswith("benchmarks/"):
        words.append("--help")  # test_benchmarks.py runs them
    if forked is not None and (job := forkable(words)) is not None:
        (ended,) = forked.run({**job, "folder": str(folder), "limit_s": LIMIT_S})
        code, said = max(ended.codes), "\n".join([*ended.out, *ended.err])
    else:
        if words[0] == "python":
            words[0] = sys.executable
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        code, said = done.returncode, done.stdout + done.stderr
    assert code == 0, f"{line}\n{said}"


def shortened(words: list[str], *, names_folders: bool) -> list[str]:
    """A training's command, with few steps on few scenes; others as they are."""
    if words[0] not in ("python", "torchrun") or "mtaccum.train" not in words or "--cfg" in words:
        return words
    short = LONGER if any(word.startswith("resume=") for word in words) else SHORT
    if "data=squares" in words:  # which has no options of ours
        short = [word for word in short if not word.startswith("data.")]
    words = [*(word for word in words if not word.startswith("trainer.max_steps=")), *short]
    named = any(word.startswith(("hydra.run.dir=", "resume=", "--multirun")) for word in words)
    # folders of their own, since two may begin in one second
    return (
        words
        if named or not names_folders
        else [*words, f"hydra.run.dir=outputs/2099-01-01/{next(_NUMBERS):02}"]
    )


def forkable(words: list[str]) -> dict[str, object] | None:
    """The job (``forked_ranks.py``) of one of mtaccum's commands or of a script, on ranks by ``torchrun``."""
    ranks = 0
    if words[:2] == ["torchrun", "--nproc-per-node"]:
        ranks, words = int(words[2]), ["python", *words[3:]]
    if words[:2] == ["python", "-m"] and words[2].startswith("mtaccum."):
        return {"command": words[2].removeprefix("mtaccum."), "arguments": words[3:], "ranks": ranks}
    if words[0] == "python" and len(words) == 2 and words[1].endswith(".py"):
        return {"command": words[1], "arguments": [], "ranks": ranks}
    return None


def commands_in(block: Block) -> list[str]:
    """The lines of an ``sh`` block that are run here; a line that ends in a backslash goes on in the next."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [
        line for line in lines if line and line not in ELSEWHERE and not line.startswith(("#", *FOR_A_PERSON))
    ]


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=pytest.mark.long) if p.stem in LONG else p for p in RUN], ids=name_of
)
def test_page_runs_in_the_readers_order(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked: Forked
) -> None:
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    blocks = blocks_of(page)
    if any(line.startswith("pip install -e . &&") for block in blocks for line in block.text.splitlines()):
        # the first command of the README, whose run a later snippet loads
        shell("python -m mtaccum.train '+tasks=[seg,cls]'", tmp_path)
    names: dict[str, object] = {"__name__": page.stem}
    for block in blocks:
        if block.language == "sh":
            for line in commands_in(block):
                shell(line, tmp_path, forked)
        elif block.file is not None:
            (tmp_path / block.file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / block.file).write_text(block.text.partition("\n")[2])  # without its name
        elif block.language == "python":
            # numbered as in the page, so that an error says where it is
            exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), names)
    for line in inline_commands(page):
        shell(line, tmp_path, forked)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_of_a_kind_that_is_executed_or_shown(page: Path) -> None:
    for block in blocks_of(page):
        assert block.language in (*EXECUTED, "text"), f"{page.name}, line {block.line}"
        assert block.language != "yaml" or block.file, f"{page.name}, line {block.line}: no file's name"


def test_pages_that_show_code_are_run() -> None:
    assert {"README", "getting-started", "your-own-model", "memory", "exactness", "ranks", "data"} <= {
        page.stem for page in RUN
    }


def test_what_is_executed_elsewhere_is_in_a_page_and_in_ci() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    for line in ELSEWHERE:
        assert line in pages
    script = (ROOT / ".ci" / "run").read_text()
    for line in ("test command", "python -m mtaccum.train", "mkdocs build --strict"):
        assert line in script


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_pictures_exist(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).is_file(), target


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1300
