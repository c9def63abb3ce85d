"""Plan a training for a memory budget: ``python -m mtaccum.plan '+tasks=[seg,cls]' memory.budget=6GiB``."""

from __future__ import annotations

import sys
from pathlib import Path

from mtaccum.config import RunConfig, plan_config, run_command, save_plan


def plan(config: RunConfig) -> int:
    """Print the plans and the recommended one; the exit code is 0 if one fits, and 1 if none does."""
    report = plan_config(config)
    print(report, flush=True)
    save_plan(report, Path(config.run_dir))
    return 0 if report.recommended is not None else 1


def main() -> None:
    sys.exit(run_command("train", plan, sys.argv[1:]))


if __name__ == "__main__":
    main()
