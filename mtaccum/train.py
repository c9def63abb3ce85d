"""Train the tasks of a configuration: ``python -m mtaccum.train '+tasks=[seg,cls]'``."""

from __future__ import annotations

import sys
from pathlib import Path

from mtaccum.config import (
    INTERRUPTED,
    RunConfig,
    plan_config,
    planned,
    prepare,
    resume_command,
    run_command,
    save_plan,
)


def train(config: RunConfig) -> int:
    """One training; the exit code is 0, or 130 if it was interrupted."""
    report = None
    if config.plan == "auto":
        report = plan_config(config)
        config = planned(config, report)
    run = prepare(config)
    if report is not None:
        print(f"{report}\n", flush=True)
        save_plan(report, Path(config.run_dir))
    print(run.describe(), flush=True)
    if config.resume is not None:
        print(f"going on from step {run.trainer.steps} of {config.resume}", flush=True)
    go_on = resume_command("train", sys.argv[1:], config.run_dir)
    try:
        interrupted = run.execute().interrupted
    except KeyboardInterrupt:
        interrupted = True
    if interrupted:
        steps = run.trainer.saved_steps
        if steps is None:
            print("interrupted before the first state was saved", flush=True)
        else:
            print(f"interrupted; the state after step {steps} is saved. Go on with:\n  {go_on}", flush=True)
    return INTERRUPTED if interrupted else 0


def main() -> None:
    sys.exit(run_command("train", train, sys.argv[1:], trains=True))


if __name__ == "__main__":
    main()
