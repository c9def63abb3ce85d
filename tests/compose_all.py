"""Compose every option of every config group with the installed package. Run by .ci/run on the wheel."""

from __future__ import annotations

import os
import subprocess
import sys

from mtaccum.config import config_dir, group_options, run_command
from mtaccum.config.run import prepare
from mtaccum.config.schema import RunConfig


def overrides() -> list[list[str]]:
    """One command line for each option of each group, tasks one by one and all together."""
    groups = sorted(path.name for path in config_dir().iterdir() if path.is_dir())
    tasks = group_options("tasks")
    lines = [[f"+tasks=[{name}]"] for name in tasks] + [[f"+tasks=[{','.join(tasks)}]"]]
    for group in groups:
        if group == "experiment":
            for option in group_options(group):
                own_tasks = "/tasks" in (config_dir() / group / f"{option}.yaml").read_text()
                lines.append([f"+experiment={option}", *([] if own_tasks else ["+tasks=[seg]"])])
        elif group != "tasks":
            lines += [["+tasks=[seg,cls]", f"{group}={option}"] for option in group_options(group)]
    return lines


def check(config: RunConfig) -> int:
    """Build and check everything, train nothing."""
    prepare(config)
    return 0


def main() -> None:
    """Exit with an error if any line fails."""
    # as under torchrun with one process, so that the options for several ranks are built too
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    print(f"configs from {config_dir()}")
    lines = overrides()
    failed = [line for line in lines if run_command("train", check, line) != 0]
    for line in failed:
        print("failed:", *line)
    command = [sys.executable, "-m", "mtaccum.train", "+tasks=[seg]", "--cfg", "job"]
    failed += (
        [["--cfg"]] if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode else []
    )
    print(f"{len(lines) - len(failed)} of {len(lines)} command lines composed and built")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
