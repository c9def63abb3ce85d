"""The configuration's closed sections, typed and checked all at once.

Open parts (task arguments, trunk, optimizer, data sets, loggers) stay dicts here and are checked where
they are built. Pydantic reports every wrong entry of a config in one go.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    model_validator,
)

from mtaccum.engine import StepOptions
from mtaccum.engine.options import plain
from mtaccum.errors import ConfigError, unknown_name

# A null in the YAML, where an empty dict would keep Hydra from adding names to it.
_Named = Annotated[dict[str, dict[str, Any]], BeforeValidator(lambda named: named or {})]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


WrittenPath = Annotated[dict[Literal["path"], list[str | int]], Field(min_length=1, max_length=1)]
"""A field inside of another, as a config writes it: ``{path: [1, seg]}``."""


class DataConfig(_Section):
    """Data sets, and how they are loaded."""

    inputs: str | int | WrittenPath | list[str | int | WrittenPath]
    train: dict[str, Any]
    val: dict[str, Any]
    collate_fn: Any
    workers: int = Field(ge=0)
    eval_batch_size: int = Field(ge=1)
    shuffle: bool


ENGINE_KEYS = tuple(option.name for option in fields(StepOptions) if option.name != "comm_hook")
"""The keys of the section ``engine``: the options of a step, but for what belongs to ``parallel``."""


def _step_options(values: Any) -> StepOptions:
    """The section ``engine``; an error names every wrong entry."""
    if isinstance(values, StepOptions):
        return values
    if not isinstance(values, Mapping):
        raise ValueError(f"engine must be a section with the keys {', '.join(ENGINE_KEYS)}, got {values!r}.")
    problems = [unknown_name("key in engine:", key, ENGINE_KEYS) for key in values if key not in ENGINE_KEYS]
    for option in fields(StepOptions):
        if option.name in values:
            try:
                option.metadata["checked"](f"engine.{option.name}", values[option.name])
            except ConfigError as error:
                problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))
    return StepOptions(**values)


def _plain_options(options: StepOptions) -> dict[str, Any]:
    return {key: plain(getattr(options, key)) for key in ENGINE_KEYS}


class OptimizerConfig(BaseModel):
    """An optimizer's ``_target_`` with its arguments, and parameter groups by node."""

    model_config = ConfigDict(extra="allow", frozen=True)

    target: str = Field(alias="_target_")
    lr: float = Field(ge=0, allow_inf_nan=False)
    decay_norms_and_biases: bool
    groups: _Named

    @property
    def arguments(self) -> dict[str, Any]:
        """What the optimizer's class gets besides the parameters."""
        return {"lr": self.lr, **(self.model_extra or {})}


class LrScheduleConfig(_Section):
    """The course of the learning rate."""

    name: Literal["constant", "cosine"]
    warmup_steps: int = Field(ge=0)
    final_fraction: float | None = Field(None, ge=0, le=1)
    scale: Literal["none", "sqrt", "linear"]
    base_batch_size: int | None = Field(ge=1)

    @model_validator(mode="after")
    def _nothing_is_without_effect(self) -> Self:
        if self.scale != "none" and self.base_batch_size is None:
            raise ValueError(
                f"scale={self.scale} needs base_batch_size, the batch size that the learning rate is for"
            )
        if self.scale == "none" and self.base_batch_size is not None:
            raise ValueError("base_batch_size has no effect with scale=none; choose sqrt or linear")
        if (self.final_fraction is None) == (self.name == "cosine"):
            raise ValueError("final_fraction belongs to a cosine, and a constant course has none")
        return self


class TrainerConfig(_Section):
    """Length of the training, and what happens meanwhile; intervals in optimizer steps, 0 is never."""

    max_steps: int | None = Field(ge=1)
    epochs: int | None = Field(ge=1)
    log_every: int = Field(ge=0)
    eval_every: int = Field(ge=0)
    checkpoint_every: int = Field(ge=0)
    monitor: str
    mode: Literal["auto", "min", "max"]
    patience: int | None = Field(ge=1)
    ema_decay: float | None = Field(gt=0, lt=1)
    pictures: int = Field(ge=0)

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.max_steps is None) == (self.epochs is None):
            raise ValueError("give either max_steps or epochs, and set the other to null")
        if self.patience is not None and self.eval_every == 0:
            raise ValueError("patience counts evaluations; set eval_every above 0")
        return self


class VerifyConfig(_Section):
    """What a check of exactness runs on."""

    samples: int = Field(ge=1)
    device: str


class ParallelConfig(_Section):
    """How several ranks train together."""

    kind: Literal["auto", "none", "ddp", "fsdp"]
    timeout_s: float = Field(gt=0, allow_inf_nan=False)
    comm_hook: Literal["none", "fp16", "bf16"]


class MemoryConfig(_Section):
    """How much memory a plan may take."""

    budget: Any


class RunConfig(_Section):
    """A whole training. Its defaults stand in ``conf/`` and nowhere else."""

    tasks: dict[str, dict[str, Any]]
    necks: _Named
    trunk: dict[str, Any] | None
    data: DataConfig
    engine: Annotated[StepOptions, PlainValidator(_step_options), PlainSerializer(_plain_options)]
    optimizer: OptimizerConfig
    lr_schedule: LrScheduleConfig
    trainer: TrainerConfig
    loggers: list[dict[str, Any]]
    verify: VerifyConfig
    parallel: ParallelConfig
    plan: Literal["none", "auto"]
    memory: MemoryConfig
    batch_size: int = Field(ge=1)
    accumulate: int | None = Field(ge=1)
    micro_batch_size: int | None = Field(ge=1)
    seed: int = Field(ge=0, lt=2**31)
    device: str
    plugins: list[str]
    resume: str | None
    run_dir: str

    @model_validator(mode="after")
    def _one_k(self) -> Self:
        if self.accumulate is not None and self.micro_batch_size is not None:
            raise ValueError("give accumulate or micro_batch_size, not both: each follows from the other")
        for name, value in (("accumulate", self.accumulate), ("micro_batch_size", self.micro_batch_size)):
            if value is not None and value > self.batch_size:
                raise ValueError(
                    f"{name}={value} is more than the {self.batch_size} samples of a batch (batch_size)"
                )
        return self

    @property
    def step_options(self) -> StepOptions:
        """How steps are run: the section ``engine``, and how gradients travel."""
        return self.engine.changed({"comm_hook": self.parallel.comm_hook})

    @property
    def micro_batches(self) -> int:
        """K: into how many micro-batches a batch is split."""
        if self.micro_batch_size is not None:
            return -(-self.batch_size // self.micro_batch_size)
        return self.accumulate or 1

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """The typed config.

        Raises:
            ConfigError: lists everything that is wrong in it.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            lines = [_explain(dict(e)) for e in error.errors()]
            raise ConfigError("\n".join(lines)) from None


def _explain(error: dict[str, Any]) -> str:
    """One line for one wrong entry: where, what is valid, what was given."""
    place = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        above, _, key = place.rpartition(".")
        return unknown_name(f"key in {above or 'the config'}:", key, known_keys(above))
    message: str = error["msg"].removeprefix("Value error, ")
    if place == "engine":
        return message  # its lines name the keys
    if error["type"] == "value_error":
        return f"{place}: {message}." if place else f"{message}."
    return f"{place}: {message[0].lower()}{message[1:]}, got {error['input']!r}."


def known_keys(path: str) -> list[str]:
    """The keys of a closed section by its dotted path ("" for the whole config); none for an open part."""
    section: Any = RunConfig
    for name in filter(None, path.split(".")):
        field = section.model_fields.get(name)
        section = None if field is None else field.annotation
        if section is StepOptions:
            return list(ENGINE_KEYS)
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            return []
    return [field.alias or name for name, field in section.model_fields.items()]
