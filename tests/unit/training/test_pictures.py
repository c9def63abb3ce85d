"""Pictures of dense tasks: what is where, which samples they show, and that drawing changes nothing."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from helpers import RandomState, assert_equal_states
from torch import Tensor, nn

from mtaccum import Classification, MultiTaskModel, Regression, Segmentation, Task, TaskError
from mtaccum.training import draw_pictures
from mtaccum.training.pictures import GAP, LARGE, SMALL, Pictures

BLACK, WHITE, GREY, ORANGE = "000000", "ffffff", "808080", "e69f00"
LOWEST, HIGHEST = "440154", "fde725"
STEP = SMALL + GAP  # from one picture of a grid to the next, where they are square and small


class Bright(nn.Module):
    """Logits of two classes: whether a pixel's mean is above a half."""

    def forward(self, image: Tensor) -> Tensor:
        value = image.mean(dim=1, keepdim=True) - 0.5
        return torch.cat([-value, value], dim=1)


class Mean(nn.Module):
    def forward(self, image: Tensor) -> Tensor:
        return image.mean(dim=1, keepdim=True)


def seg(**settings: Any) -> Segmentation:
    return Segmentation(num_classes=2, head=Bright(), **settings)


def depth(**settings: Any) -> Regression:
    return Regression(dense=True, head=Mean(), **settings)


def model_of(inputs: Any = "image", trunk: nn.Module | None = None, **tasks: Task) -> MultiTaskModel:
    return MultiTaskModel(trunk or nn.Identity(), tasks, inputs=inputs)


def batch_of(samples: int = 1, channels: int = 1, height: int = 2, width: int = 2) -> dict[str, Tensor]:
    """Noise with labels. Sample i has the label i % 2 everywhere."""
    image = torch.rand(samples, channels, height, width, generator=torch.Generator().manual_seed(0))
    labels = (torch.arange(samples) % 2).reshape(-1, 1, 1).expand(-1, height, width)
    return {"image": image, "seg": labels, "depth": image.clone()}


def colour(picture: Tensor, y: float, x: float) -> str:
    return bytes(picture[:, int(y), int(x)].tolist()).hex()


def pixels(picture: Tensor, row: int, column: int, height: int = 2, width: int = 2) -> list[str]:
    """Colours of one small square picture of a grid: the middle of each pixel, enlarged as it is."""
    ys = [row * STEP + (i + 0.5) * SMALL / height for i in range(height)]
    xs = [column * STEP + (i + 0.5) * SMALL / width for i in range(width)]
    return [colour(picture, y, x) for y in ys for x in xs]


# --- what is where ----------------------------------------------------------------------------------------


def test_a_row_shows_input_prediction_and_label_with_white_gaps() -> None:
    image = torch.tensor([[[[0.0, 0.2], [0.6, 1.0]]], [[[1.0, 0.0], [0.0, 0.0]]]])
    batch = {"image": image, "seg": torch.tensor([[[0, 1], [255, 1]], [[1, 1], [1, 1]]])}
    (name, picture), *others = draw_pictures(model_of(seg=seg()), [batch], 2).items()

    assert (name, others) == ("seg", [])
    assert picture.dtype == torch.uint8
    assert picture.shape == (3, 2 * SMALL + GAP, 3 * SMALL + 2 * GAP)
    assert pixels(picture, 0, 0) == [BLACK, "333333", "999999", WHITE]
    assert pixels(picture, 0, 1) == [BLACK, BLACK, ORANGE, ORANGE]
    assert pixels(picture, 0, 2) == [BLACK, ORANGE, GREY, ORANGE]
    assert pixels(picture, 1, 0) == [WHITE, BLACK, BLACK, BLACK]
    assert pixels(picture, 1, 1) == [ORANGE, BLACK, BLACK, BLACK]
    assert pixels(picture, 1, 2) == [ORANGE] * 4
    assert (picture[:, SMALL:STEP] == 255).all()
    assert (picture[:, :, SMALL:STEP] == 255).all()
    assert (picture[:, :, 2 * SMALL + GAP : 2 * STEP] == 255).all()
    # enlarged by nearest neighbours: a pixel is a square of one colour up to its edge
    assert colour(picture, SMALL / 2 - 1, SMALL / 2 - 1) == BLACK
    assert colour(picture, SMALL / 2, SMALL / 2) == WHITE


def test_each_input_goes_from_its_least_to_its_largest_value_in_all_channels_together() -> None:
    image = torch.tensor([[[[-4.0]], [[0.0]], [[4.0]]], [[[10.0]], [[20.0]], [[10.0]]]])
    batch = {"image": image, "seg": torch.zeros(2, 1, 1, dtype=torch.long)}
    picture = draw_pictures(model_of(seg=seg()), [batch], 2)["seg"]
    assert pixels(picture, 0, 0, 1, 1) == ["0080ff"]
    assert pixels(picture, 1, 0, 1, 1) == ["00ff00"]


@pytest.mark.parametrize("value", [0.0, 7.0, float("nan"), float("inf")])
def test_an_input_of_one_value_or_none_is_no_error(value: float) -> None:
    batch = {"image": torch.full((1, 3, 2, 2), value), "seg": torch.zeros(1, 2, 2, dtype=torch.long)}
    picture = draw_pictures(model_of(seg=seg()), [batch], 1)["seg"]
    assert pixels(picture, 0, 2) == [BLACK] * 4


def test_an_infinite_value_of_an_input_leaves_the_others_their_scale() -> None:
    image = torch.tensor([[[[float("inf"), 0.0], [1.0, float("nan")]]]])
    batch = {"image": image, "seg": torch.zeros(1, 2, 2, dtype=torch.long)}
    picture = draw_pictures(model_of(seg=seg()), [batch], 1)["seg"]
    assert pixels(picture, 0, 0) == [WHITE, BLACK, WHITE, BLACK]


def test_inputs_of_whole_numbers_are_drawn() -> None:
    batch = {"image": torch.tensor([[[[0, 255]]]], dtype=torch.uint8), "depth": torch.zeros(1, 1, 1, 2)}
    model = model_of(trunk=_Float(), depth=depth())
    picture = draw_pictures(model, [batch], 1)["depth"]
    assert colour(picture, 10, 10) == BLACK
    assert colour(picture, 10, SMALL - 10) == WHITE


class _Float(nn.Module):
    def forward(self, image: Tensor) -> Tensor:
        return image.float()


def test_prediction_and_label_take_the_size_of_the_input_by_nearest_neighbours() -> None:
    image = torch.zeros(1, 1, 4, 4)
    image[..., 2:] = 1
    batch = {"image": image, "seg": torch.tensor([[[0, 1]] * 8]).repeat_interleave(4, 2)}
    batch["depth"] = torch.tensor([[[[0.0, float("nan")], [1.0, 1.0]]]])
    tasks = {"seg": _Coarse(2, head=Bright()), "depth": _CoarseDepth(dense=True, head=Mean())}
    drawn = draw_pictures(model_of(**tasks), [batch], 1)
    for picture in drawn.values():
        assert picture.shape == (3, SMALL, 3 * SMALL + 2 * GAP)
    assert pixels(drawn["seg"], 0, 1) == pixels(drawn["seg"], 0, 2) == [BLACK, ORANGE] * 2
    assert pixels(drawn["depth"], 0, 1) == [LOWEST, HIGHEST] * 2
    assert pixels(drawn["depth"], 0, 2) == [LOWEST, GREY, HIGHEST, HIGHEST]


class _Coarse(Segmentation):
    """Predicts at half the resolution of the input."""

    def forward(self, features: Any, batch: Any) -> Tensor:
        return super().forward(features[..., ::2, ::2], batch)


class _CoarseDepth(Regression):
    def forward(self, features: Any, batch: Any) -> Tensor:
        return super().forward(features[..., ::2, ::2], batch)


@pytest.mark.parametrize(
    ("size", "shown"),
    [((32, 32), (128, 128)), ((28, 20), (112, 80)), ((100, 300), (100, 300)), ((1100, 600), (366, 200))],
)
def test_small_pictures_are_enlarged_and_large_ones_reduced_by_whole_factors(
    size: tuple[int, int], shown: tuple[int, int]
) -> None:
    picture = draw_pictures(model_of(seg=seg()), [batch_of(1, 3, *size)], 1)["seg"]
    assert picture.shape == (3, shown[0], 3 * shown[1] + 2 * GAP)
    assert max(shown) <= LARGE


# --- inputs that are no image -----------------------------------------------------------------------------


class _Two(nn.Module):
    def forward(self, image: Tensor, other: Tensor) -> Tensor:
        return image + other


def test_with_several_inputs_the_grid_has_no_column_of_inputs() -> None:
    batch = {"image": torch.tensor([[[[0.0, 1.0]]]]), "other": torch.zeros(1, 1, 1, 2)}
    batch["depth"] = torch.tensor([[[[1.0, 0.0]]]])
    model = model_of(("image", "other"), _Two(), depth=depth())
    picture = draw_pictures(model, [batch], 1)["depth"]
    assert picture.shape == (3, SMALL // 2, 2 * SMALL + GAP)
    xs = [SMALL / 4, SMALL * 3 / 4, STEP + SMALL / 4, STEP + SMALL * 3 / 4]
    assert [colour(picture, 10, x) for x in xs] == [LOWEST, HIGHEST, HIGHEST, LOWEST]


def test_a_single_input_by_name_is_an_image_all_the_same() -> None:
    class Named(nn.Module):
        def forward(self, image: Tensor) -> Tensor:
            return image

    picture = draw_pictures(model_of(("image",), Named(), seg=seg()), [batch_of()], 1)["seg"]
    assert picture.shape == (3, SMALL, 3 * SMALL + 2 * GAP)


@pytest.mark.parametrize("shape", [(2, 5, 4, 4), (2, 3, 4, 4, 4), (2, 16), (4, 3, 4, 4)])
def test_inputs_of_other_shapes_are_left_out(shape: tuple[int, ...]) -> None:
    class Zeros(nn.Module):
        def forward(self, _: Tensor) -> Tensor:
            return torch.zeros(2, 1, 4, 4)

    batch = {"x": torch.rand(shape), "depth": torch.rand(2, 1, 4, 4)}
    model = model_of(lambda b: b["x"], Zeros(), depth=depth())
    picture = draw_pictures(model, [batch], 2 if shape[0] == 2 else 4)["depth"]
    assert picture.shape == (3, 2 * SMALL + GAP, 2 * SMALL + GAP)


# --- which samples and tasks ------------------------------------------------------------------------------


def test_the_first_samples_are_drawn() -> None:
    batch = batch_of(5)
    picture = draw_pictures(model_of(seg=seg()), [batch], 3)["seg"]
    assert picture.shape[1] == 3 * SMALL + 2 * GAP
    assert [pixels(picture, row, 2)[0] for row in range(3)] == [BLACK, ORANGE, BLACK]
    everything = draw_pictures(model_of(seg=seg()), [batch], 99)["seg"]
    assert everything.shape[1] == 5 * SMALL + 4 * GAP
    assert torch.equal(everything[:, : picture.shape[1]], picture)


def test_samples_come_from_several_batches_and_may_differ_in_size() -> None:
    batches = [batch_of(1, 1, 64, 128), batch_of(2, 1, 2, 2), batch_of(9, 1, 300, 200)]
    seen: list[int] = []
    picture = draw_pictures(model_of(trunk=_Seen(seen), seg=seg()), batches, 4)["seg"]
    assert seen == [1, 2, 1], "no more samples are run than drawn"
    assert picture.shape == (3, 64 + 2 * SMALL + 300 + 3 * GAP, 3 * 200 + 2 * GAP)
    below = picture[:, 64 + GAP :]
    assert colour(below, 10, STEP * 2 + 10) == BLACK
    assert colour(below, STEP + 10, STEP * 2 + 10) == ORANGE
    assert (below[:, : 2 * STEP, 3 * SMALL + 2 * GAP :] == 255).all(), "white beside narrower rows"


class _Seen(nn.Module):
    """Notes how many samples it was given."""

    def __init__(self, seen: list[int]) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, image: Tensor) -> Tensor:
        self.seen.append(len(image))
        return image


def test_a_batch_that_cannot_be_cut_is_run_whole() -> None:
    batch = {**batch_of(5), "class_names": torch.zeros(7)}
    picture = draw_pictures(model_of(seg=seg()), [batch], 2)["seg"]
    assert torch.equal(picture, draw_pictures(model_of(seg=seg()), [batch_of(5)], 2)["seg"])


def test_each_enabled_dense_task_has_its_picture() -> None:
    head = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    tasks = {
        "a": seg(),
        "off": seg(mode="off"),
        "cls": Classification(3, head=head),
        "weightless": depth(weight=0.0),
        "frozen": depth(mode="frozen"),
    }
    batch = {**batch_of(2), "cls": torch.zeros(2, dtype=torch.long)}
    drawn = draw_pictures(model_of(**tasks), [batch], 2)
    assert list(drawn) == ["a", "frozen"]
    assert not torch.equal(drawn["a"], drawn["frozen"])


def test_a_task_is_drawn_from_the_batches_that_hold_its_target() -> None:
    first = {"image": torch.rand(1, 1, 2, 2), "seg": torch.ones(1, 2, 2, dtype=torch.long), "depth": None}
    without = {"image": torch.rand(1, 1, 2, 2), "depth": torch.rand(1, 1, 2, 2)}
    # without a target, this task can't even predict
    drawn = draw_pictures(model_of(seg=seg(size_like="seg"), depth=depth()), [first, without], 4)
    assert {name: picture.shape[1] for name, picture in drawn.items()} == {"seg": SMALL, "depth": SMALL}
    assert draw_pictures(model_of(seg=seg()), [without], 4) == {}


def test_samples_without_any_label_are_drawn_with_a_grey_one() -> None:
    batch = {
        **batch_of(2),
        "seg": torch.full((2, 2, 2), 255),
        "depth": torch.full((2, 1, 2, 2), float("nan")),
    }
    for picture in draw_pictures(model_of(seg=seg(), depth=depth()), [batch], 2).values():
        assert pixels(picture, 1, 2) == [GREY] * 4
        assert GREY not in pixels(picture, 1, 1)


def test_a_task_without_labels_can_be_drawn() -> None:
    class Autoencoder(Task):
        def draw(self, prediction: Any, batch: Any) -> tuple[Tensor, Tensor]:
            return prediction.expand(-1, 3, -1, -1), batch["image"].expand(-1, 3, -1, -1)

    image = torch.tensor([[[[0.0, 1.0], [1.0, 0.0]]]])
    model = model_of(auto=Autoencoder(nn.Identity(), target=None))
    picture = draw_pictures(model, [{"image": image}], 1)["auto"]
    assert (
        pixels(picture, 0, 0)
        == pixels(picture, 0, 1)
        == pixels(picture, 0, 2)
        == [BLACK, WHITE, WHITE, BLACK]
    )


# --- drawing changes nothing ------------------------------------------------------------------------------


class Restless(nn.Module):
    """Counts its calls in a buffer, draws random numbers, writes into its input, and notes its mode."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.weight = nn.Parameter(torch.ones(1, 1, 1, 1))
        self.modes: list[tuple[bool, bool]] = []

    def forward(self, image: Tensor) -> Tensor:
        self.calls += 1
        self.modes.append((self.training, torch.is_grad_enabled()))
        torch.rand(3)
        return image.mul_(self.weight).add_(1)


def test_drawing_leaves_model_batch_and_random_numbers_as_they_were() -> None:
    trunk = Restless()
    model = model_of(trunk=trunk, seg=seg(), depth=depth())
    model.tasks["seg"].eval()
    batch = batch_of(2)
    modes, state, random = [m.training for m in model.modules()], _copy(model.state_dict()), RandomState()
    before = _copy(batch)

    first = draw_pictures(model, [batch], 2)
    again = draw_pictures(model, [batch], 2)

    assert trunk.modes == [(False, False)] * 2
    assert [m.training for m in model.modules()] == modes
    assert trunk.weight.requires_grad
    assert trunk.weight.grad is None
    assert_equal_states(model.state_dict(), state)
    assert_equal_states(batch, before)
    assert RandomState() == random
    assert_equal_states(first, again)


def test_a_failure_leaves_the_model_as_it_was_too() -> None:
    model = model_of(trunk=Restless(), own=_Own(RuntimeError("no")))
    state, random = _copy(model.state_dict()), RandomState()
    with pytest.raises(TaskError):
        draw_pictures(model, [batch_of()], 1)
    assert model.training
    assert_equal_states(model.state_dict(), state)
    assert RandomState() == random


def _copy(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.items()}


# --- drawings of a user's own -----------------------------------------------------------------------------


class _Own(Task):
    """Draws what it is told to; raises it if it is an error."""

    def __init__(self, drawn: Any) -> None:
        super().__init__(nn.Identity(), target="seg")
        self.drawn = drawn

    def draw(self, prediction: Any, batch: Any) -> Any:
        if isinstance(self.drawn, Exception):
            raise self.drawn
        return self.drawn


RGB = torch.zeros(1, 3, 2, 2)


@pytest.mark.parametrize(
    ("drawn", "message"),
    [
        (KeyError("nope"), "KeyError: 'nope'"),
        (RuntimeError("sizes differ"), "sizes differ"),
        (RGB, r"returned \(1, 3, 2, 2\) torch.float32. Return two RGB pictures"),
        ((RGB,), r"returned \(1, 3, 2, 2\) torch.float32. Return two"),
        ((RGB, None), r"\(1, 3, 2, 2\) torch.float32 and NoneType. Return two"),
        ((RGB, RGB[:, :1]), r"and \(1, 1, 2, 2\) torch.float32"),
        ((RGB, RGB.repeat(2, 1, 1, 1)), r"and \(2, 3, 2, 2\)"),
        ((RGB, (RGB * 255).byte()), r"torch.uint8. Return two RGB pictures.*floats in \[0, 1\]"),
        (3, "returned int"),
    ],
)
def test_a_drawing_that_fails_or_is_none_names_the_task_and_the_way_out(drawn: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message) as raised:
        draw_pictures(model_of(seg=seg(), own=_Own(drawn)), [batch_of()], 1)
    assert "task 'own'" in str(raised.value)
    assert "trainer.pictures=0" in str(raised.value)


def test_values_beyond_the_limits_and_nan_are_drawn_as_the_nearest_colour() -> None:
    picture = torch.tensor([[-1.0, 2.0], [float("nan"), 1.0]]).expand(1, 3, 2, 2)
    drawn = draw_pictures(model_of(own=_Own((picture, picture))), [batch_of()], 1)["own"]
    assert pixels(drawn, 0, 1) == [BLACK, WHITE, BLACK, WHITE]


def test_a_task_may_choose_not_to_be_drawn() -> None:
    assert draw_pictures(model_of(own=_Own(None)), [batch_of()], 1) == {}


# --- the samples that are kept ----------------------------------------------------------------------------


class Album:
    """A logger that takes pictures."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, dict[str, Tensor]]] = []

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        pass

    def log_pictures(self, step: int, pictures: Mapping[str, Tensor]) -> None:
        self.taken.append((step, dict(pictures)))

    def close(self) -> None:
        pass


def test_the_samples_of_the_first_evaluation_are_drawn_ever_after() -> None:
    album, pictures, model = Album(), Pictures(3), model_of(seg=seg())
    batches = [batch_of(2, 1, 4, 4), batch_of(2), batch_of(2)]

    assert list(map(id, pictures.watch(batches, [album]))) == list(map(id, batches))
    pictures.log(1, model, [album])
    for batch in batches:
        batch["image"].zero_()  # as a loader may that uses its memory again
    assert list(map(id, pictures.watch(batches[::-1], [album]))) == list(map(id, batches[::-1]))
    pictures.log(2, model, [album])

    (one, first), (two, second) = album.taken
    assert (one, two) == (1, 2)
    assert list(first) == ["val/seg"]
    assert first["val/seg"].shape[1] == 3 * SMALL + 2 * GAP
    assert torch.equal(first["val/seg"], second["val/seg"])


def test_kept_samples_do_not_hold_the_batch_they_were_cut_from() -> None:
    album, pictures, batches = Album(), Pictures(2), [batch_of(100)]
    storages = [weakref.ref(tensor.untyped_storage()) for tensor in batches[0].values()]
    list(pictures.watch(batches, [album]))
    del batches
    assert [storage() for storage in storages] == [None] * 3
    pictures.log(1, model_of(seg=seg()), [album])
    assert len(album.taken) == 1, "there were samples to draw"


def test_an_evaluation_that_was_broken_off_leaves_no_samples_twice() -> None:
    album, pictures = Album(), Pictures(3)
    marked = [{**batch_of(1, 1, 4, 4), "image": torch.full((1, 1, 4, 4), float(i))} for i in range(4)]
    next(pictures.watch(marked, [album]))
    list(pictures.watch(marked, [album]))
    pictures.log(1, model_of(seg=seg()), [album])
    ((_, drawn),) = album.taken
    expected = draw_pictures(model_of(seg=seg()), marked[:3], 3)["seg"]
    assert torch.equal(drawn["val/seg"], expected)


def test_nothing_is_kept_or_drawn_where_nobody_takes_pictures() -> None:
    class Blind:
        def log(self, step: int, scalars: Mapping[str, float]) -> None: ...
        def close(self) -> None: ...

    model = model_of(own=_Own(RuntimeError("drawn all the same")))
    for samples, logger in [(4, Blind()), (0, Album())]:
        pictures, batches = Pictures(samples), [batch_of()]
        image = weakref.ref(batches[0]["image"].untyped_storage())
        assert len(list(pictures.watch(batches, [logger]))) == 1
        del batches
        assert image() is None
        pictures.log(1, model, [logger])


def test_without_a_dense_task_no_picture_is_logged() -> None:
    album, pictures = Album(), Pictures(2)
    model = model_of(cls=Classification(3, head=nn.Sequential(nn.Flatten(), nn.Linear(4, 3))))
    list(pictures.watch([{**batch_of(2), "cls": torch.zeros(2)}], [album]))
    pictures.log(1, model, [album])
    assert album.taken == []
