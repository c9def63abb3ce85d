"""Every command and snippet of the README, executed in order in one folder, as a reader would."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
from commands import Forked

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)

# Training is shortened; what is typed is otherwise what runs.
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
    "pip install torch --index-url https://download.pytorch.org/whl/cpu",
}


_NUMBERS = count()  # of runs whose folders the README doesn't name


def test_every_block_is_of_a_kind_that_is_executed() -> None:
    assert {language for language, _ in BLOCKS} == {"sh", "python", "yaml"}
    assert len(BLOCKS) > 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reader")
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
    return folder


def shell(line: str, folder: Path, forked: Forked | None = None) -> None:
    """Run a line; mtaccum's own commands in forked processes, if it is given who forks them."""
    words = shlex.split(line)
    if words[0] in ("python", "torchrun") and "mtaccum.train" in words and "--cfg" not in words:
        resumes = any(word.startswith("resume=") for word in words)
        kept = [word for word in words if not word.startswith("trainer.max_steps=")]
        short = LONGER if resumes else SHORT
        if "--config-dir" in words:
            short = [word for word in short if not word.startswith("data.")]
        words = [*kept, *short]
        if forked is not None and not any(
            w.startswith(("hydra.run.dir=", "resume=", "--multirun")) for w in words
        ):
            # of their own, since two may begin in one second
            words.append(f"hydra.run.dir=outputs/2099-01-01/{next(_NUMBERS):02}")
    if words[0] == "tensorboard":
        words = [sys.executable, "-m", "tensorboard.main", "--inspect", *words[1:]]  # reads, doesn't serve
    if words[0] == "python" and words[1].startswith("benchmarks/"):
        words.append("--help")  # test_benchmarks.py runs them
    if words[0] == "torchrun":
        words = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    if forked is not None and words[:2] == ["python", "-m"] and words[2].startswith("mtaccum."):
        done = forked.command(folder, words[2].removeprefix("mtaccum."), *words[3:])
    else:
        if words[0] == "python":
            words[0] = sys.executable
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


def test_snippets_and_commands_run_in_the_readers_order(
    folder: Path, monkeypatch: pytest.MonkeyPatch, forked: Forked
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    # the first command of the README, whose run a later snippet loads
    shell("python -m mtaccum.train '+tasks=[seg,cls]'", folder)
    names: dict[str, object] = {"__name__": "readme"}
    for language, text in BLOCKS:
        if language in ("python", "yaml"):
            if file := re.match(r"# ([\w/]+\.(py|yaml))\n", text):
                (folder / file[1]).parent.mkdir(parents=True, exist_ok=True)
                (folder / file[1]).write_text(text)
            else:
                assert language == "python"
                exec(compile(text, "README.md", "exec"), names)
        else:
            for line in filter(None, text.splitlines()):
                if line not in ELSEWHERE:
                    shell(line, folder, forked)


def test_commands_in_the_text_run(folder: Path, forked: Forked) -> None:
    """Those set in one line, `like this`."""
    commands = re.findall(r"`(python -m mtaccum\.\w+ [^`]*)`", README)
    assert commands
    for line in commands:
        shell(line, folder, forked)


def test_what_is_executed_elsewhere_is_in_the_readme_and_in_ci() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    for line in ELSEWHERE:
        assert line in README
    assert "test command" in script
    assert "python -m mtaccum.train" in script


def test_links_and_pictures_exist() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / target).is_file(), target
