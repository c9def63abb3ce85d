"""Configuration: typed sections, objects built from them, and the command line."""

from mtaccum.config.command import INTERRUPTED, config_dir, group_options, resume_command, run_command
from mtaccum.config.plan import plan_config, planned, save_plan
from mtaccum.config.run import Run, prepare
from mtaccum.config.saved import load
from mtaccum.config.schema import RunConfig
from mtaccum.config.verify import verify_exactness

__all__ = [
    "INTERRUPTED",
    "Run",
    "RunConfig",
    "config_dir",
    "group_options",
    "load",
    "plan_config",
    "planned",
    "prepare",
    "resume_command",
    "run_command",
    "save_plan",
    "verify_exactness",
]
