"""Pictures during a training: in TensorBoard files, of the evaluated model, and without an effect on it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_equal_states
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from mtaccum import Classification, Engine, MultiTaskModel, Regression, Segmentation, TaskError
from mtaccum.data import MicroBatchSampler
from mtaccum.training import (
    JsonLinesLogger,
    Logger,
    TensorBoardLogger,
    Trainer,
    TrainerSettings,
    draw_pictures,
    load_checkpoint,
)

SAMPLES = 12


def samples() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    images = [torch.rand(3, 8, 8, generator=generator) for _ in range(SAMPLES)]
    return [
        {"image": x, "seg": (3 * x[0]).long(), "depth": x[1:2], "cls": (x.mean() > 0.5).long()}
        for x in images
    ]


class Undrawable(Segmentation):
    def draw(self, prediction: Any, batch: Any) -> tuple[Tensor, Tensor]:
        return prediction[:, 99], batch["seg"]


def make(
    folder: Path,
    loggers: list[Logger],
    seg: type[Segmentation] = Segmentation,
    shuffle: bool = False,
    **settings: Any,
) -> Trainer:
    torch.manual_seed(0)
    tasks = {
        "seg": seg(3, head=nn.Conv2d(4, 3, 1)),
        "cls": Classification(2, head=nn.Sequential(nn.Flatten(), nn.Linear(256, 2))),
        "depth": Regression(dense=True, head=nn.Conv2d(4, 1, 1)),
    }
    trunk = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(0.5))
    model = MultiTaskModel(trunk, tasks, inputs="image")
    sampler, data = MicroBatchSampler(SAMPLES, 4), samples()
    generator = torch.Generator().manual_seed(1)
    return Trainer(
        Engine(model, torch.optim.SGD(model.parameters(), lr=0.5)),
        DataLoader(data, batch_sampler=sampler),  # type: ignore[arg-type]
        sampler,
        DataLoader(data, batch_size=5, shuffle=shuffle, generator=generator),  # type: ignore[arg-type]
        TrainerSettings(**{"total_steps": 4, "eval_every": 2, "pictures": 3, **settings}),
        folder,
        loggers,
    )


def fit(trainer: Trainer) -> Trainer:
    try:
        trainer.fit()
    finally:
        for logger in trainer.loggers:
            logger.close()
    return trainer


def images_in(folder: Path, part: str = "val/") -> dict[str, dict[int, np.ndarray[Any, Any]]]:
    """The pictures of a run by tag and step, (3, height, width), decoded from its event files."""
    events = EventAccumulator(str(folder), size_guidance={"images": 0}).Reload()
    return {
        tag: {
            event.step: np.asarray(Image.open(io.BytesIO(event.encoded_image_string))).transpose(2, 0, 1)
            for event in events.Images(tag)
        }
        for tag in events.Tags()["images"]
        if tag.startswith(part)
    }


def test_each_evaluation_shows_the_evaluated_model_on_the_first_samples(tmp_path: Path) -> None:
    trainer = fit(make(tmp_path, [TensorBoardLogger(tmp_path), JsonLinesLogger(tmp_path)], ema_decay=0.9))

    images = images_in(tmp_path)
    assert {tag: list(steps) for tag, steps in images.items()} == {"val/seg": [2, 4], "val/depth": [2, 4]}
    first = [default_collate(samples()[:3])]
    averaged, current = (draw_pictures(model, first, 3) for model in (trainer.evaluated_model, trainer.model))
    for name in ("seg", "depth"):
        assert np.array_equal(images[f"val/{name}"][4], averaged[name].numpy())
    assert not torch.equal(averaged["depth"], current["depth"])
    assert not np.array_equal(images["val/depth"][2], images["val/depth"][4])


def test_inputs_and_labels_are_the_same_at_each_evaluation_also_of_a_loader_that_shuffles(
    tmp_path: Path,
) -> None:
    fit(make(tmp_path, [TensorBoardLogger(tmp_path)], shuffle=True))
    before, after = (images_in(tmp_path)["val/depth"][step] for step in (2, 4))
    width = (before.shape[2] - 8) // 3
    assert np.array_equal(before[:, :, :width], after[:, :, :width])
    assert np.array_equal(before[:, :, -width:], after[:, :, -width:])
    assert not np.array_equal(before, after)


def test_pictures_change_nothing_about_the_training(tmp_path: Path) -> None:
    states = {}
    for pictures in (0, 3):
        folder = tmp_path / str(pictures)
        folder.mkdir()
        trainer = make(folder, [TensorBoardLogger(folder)], shuffle=True, pictures=pictures)
        fit(trainer)
        states[pictures] = load_checkpoint(folder / "last.pt")
        states[pictures]["loader"] = trainer.validation.generator.get_state()

    assert images_in(tmp_path / "0") == {}
    assert len(images_in(tmp_path / "3")) == 2
    assert_equal_states(states[0]["model"], states[3]["model"])
    assert torch.equal(states[0]["random"][0]["torch"], states[3]["random"][0]["torch"])
    assert torch.equal(states[0]["loader"], states[3]["loader"])
    assert states[0]["progress"] == states[3]["progress"]


@pytest.mark.parametrize(("eval_every", "steps"), [(3, 3), (0, 4)])
def test_a_task_that_cannot_be_drawn_does_not_cost_the_training(
    tmp_path: Path, eval_every: int, steps: int
) -> None:
    trainer = make(tmp_path, [TensorBoardLogger(tmp_path)], Undrawable, eval_every=eval_every)
    with pytest.raises(TaskError, match="drawing task 'seg' failed .*trainer.pictures=0.*IndexError"):
        fit(trainer)

    state = load_checkpoint(tmp_path / "last.pt")
    assert state["progress"]["steps"] == state["progress"]["evaluated_steps"] == steps
    assert_equal_states(state["model"], trainer.model.state_dict())
    goes_on = make(tmp_path, [TensorBoardLogger(tmp_path)], Undrawable, pictures=0)
    goes_on.load_state_dict(state)
    assert fit(goes_on).steps == 4


def test_loggers_that_take_no_pictures_cost_no_drawing(tmp_path: Path) -> None:
    assert fit(make(tmp_path, [JsonLinesLogger(tmp_path)], Undrawable)).steps == 4


def test_tensorboard_pictures_are_written_as_they_are_and_hidden_by_a_rewind(tmp_path: Path) -> None:
    picture = torch.randint(256, (3, 5, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    logger = TensorBoardLogger(tmp_path)
    for step in (1, 2, 3):
        logger.log_pictures(step, {"val/a": picture, "val/b": 255 - picture})
    logger.close()
    images = images_in(tmp_path)
    assert np.array_equal(images["val/a"][3], picture.numpy())
    assert np.array_equal(images["val/b"][3], 255 - picture.numpy())

    again = TensorBoardLogger(tmp_path)
    again.rewind(1)
    again.log_pictures(5, {"val/a": picture})
    again.close()
    assert list(images_in(tmp_path)["val/a"]) == [1, 5]


def test_the_memory_of_the_measured_step_is_drawn_once(tmp_path: Path) -> None:
    trainer = fit(make(tmp_path, [TensorBoardLogger(tmp_path)]))
    drawn = images_in(tmp_path, "memory/")
    assert list(drawn) == ["memory/step"]
    assert list(drawn["memory/step"]) == [2]  # the first step whose optimizer has its state
    colours = {tuple(pixel) for pixel in drawn["memory/step"][2].reshape(3, -1).T.tolist()}
    assert (0x00, 0x72, 0xB2) in colours  # of activations
    assert trainer.peak is not None
    assert sum(trainer.peak.by_kind.values()) == trainer.peak.peak_bytes
    assert trainer.peak.by_kind["parameters"] == sum(
        t.nbytes for t in (*trainer.model.parameters(), *trainer.model.buffers())
    )
