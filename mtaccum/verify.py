"""Check a configuration before it is trained: ``python -m mtaccum.verify '+tasks=[seg,cls]'``."""

from __future__ import annotations

import sys

from mtaccum.config import RunConfig, run_command, verify_exactness


def verify(config: RunConfig) -> int:
    """Print what was found; the exit code is 0 if the contract holds, and 1 if not."""
    report = verify_exactness(config)
    print(report, flush=True)
    return 0 if report.exact else 1


def main() -> None:
    sys.exit(run_command("train", verify, sys.argv[1:]))


if __name__ == "__main__":
    main()
