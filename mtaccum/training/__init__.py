"""Training: the loop, evaluation, checkpoints, logging."""

from mtaccum.training.checkpoint import (
    BEST,
    LAST,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
    write_text,
)
from mtaccum.training.evaluation import evaluate
from mtaccum.training.loggers import JsonLinesLogger, Logger, TensorBoardLogger
from mtaccum.training.lr import batch_factor, make_lr_scheduler
from mtaccum.training.pictures import draw_pictures
from mtaccum.training.settings import Outcome, TrainerSettings
from mtaccum.training.trainer import Trainer

__all__ = [
    "BEST",
    "LAST",
    "JsonLinesLogger",
    "Logger",
    "Outcome",
    "TensorBoardLogger",
    "Trainer",
    "TrainerSettings",
    "batch_factor",
    "draw_pictures",
    "evaluate",
    "find_checkpoint",
    "load_checkpoint",
    "make_lr_scheduler",
    "save_checkpoint",
    "write_text",
]
