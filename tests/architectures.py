"""Awkward architectures in one place: what people's trunks hand on, heads do, and loaders give.

Each is a function in ``ARCHITECTURES`` that builds a small model, with its batches beside it. Models are in
float64 and made of a few numbers; what an architecture is awkward in is all that is in it.
"""

from __future__ import annotations

import random
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from helpers import Pooled, Pyramid, awkward_batch, awkward_model
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from mtaccum import MultiTaskModel, Neck, Task

Batch = Callable[[int, int], Any]  # samples, seed


@dataclass(frozen=True)
class Architecture:
    """A model and its batches.

    Attributes:
        build: makes the model, float64; always the same one after the same seed.
        batch: makes a micro-batch of so many samples from a seed.
        sizes: samples of three micro-batches. A window of one is the first.
        segments: what to recompute, beside the whole trunk.
        counts: labels of a window by task; None: each task counts samples.
        trunk: whether there is one.
        chunks: the heads that can take a micro-batch in chunks and do the same: that draw nothing, keep no
            state, and get features of which each tensor has an entry for each sample; None: all.
    """

    build: Callable[[], MultiTaskModel]
    batch: Batch
    sizes: tuple[int, int, int] = (4, 2, 3)
    segments: tuple[str, ...] = ()
    counts: Callable[[list[Any]], dict[str, float]] | None = None
    trunk: bool = True
    chunks: tuple[str, ...] | None = None

    def model(self) -> MultiTaskModel:
        """The model, the same at each call."""
        torch.manual_seed(0)
        return self.build().double()

    def window(self, micro_batches: int) -> list[Any]:
        """One to three micro-batches, the same at each call."""
        return [self.batch(size, seed) for seed, size in enumerate(self.sizes[:micro_batches])]

    def labels(self, micro_batches: int) -> dict[str, float]:
        """How many labels a window of so many micro-batches holds of each enabled task."""
        if self.counts is not None:
            return self.counts(self.window(micro_batches))
        return {name: sum(self.sizes[:micro_batches]) for name in self.model().enabled_tasks()}

    def recomputes(self) -> list[tuple[str, ...]]:
        """What may be recomputed: nothing, the whole trunk, segments."""
        return [(), *([("trunk",)] if self.trunk else []), *([self.segments] if self.segments else [])]


ARCHITECTURES: dict[str, Architecture] = {}
"""All of them, by name."""


def vectors(samples: int, seed: int) -> dict[str, Tensor]:
    """``x``: (samples, 3) and ``y``: (samples, 1)."""
    numbers = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(samples, 3, generator=numbers, dtype=torch.float64),
        "y": torch.randn(samples, 1, generator=numbers, dtype=torch.float64),
    }


def images(samples: int, seed: int) -> dict[str, Tensor]:
    """``x``: (samples, 2, 6, 6)."""
    numbers = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(samples, 2, 6, 6, generator=numbers, dtype=torch.float64)}


def sequences(samples: int, seed: int) -> dict[str, Tensor]:
    """``x``: (samples, 5, 3)."""
    numbers = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(samples, 5, 3, generator=numbers, dtype=torch.float64)}


def tokens(samples: int, seed: int) -> dict[str, Tensor]:
    """``x``: integers (samples, 5) below 7."""
    return {"x": torch.randint(0, 7, (samples, 5), generator=torch.Generator().manual_seed(seed))}


def architecture(
    batch: Batch = vectors, **settings: Any
) -> Callable[[Callable[[], MultiTaskModel]], Callable[[], MultiTaskModel]]:
    """Put what a function builds into ``ARCHITECTURES`` under the function's name."""

    def register(build: Callable[[], MultiTaskModel]) -> Callable[[], MultiTaskModel]:
        ARCHITECTURES[build.__name__] = Architecture(build, batch, **settings)
        return build

    return register


# --- what they are made of --------------------------------------------------------------------------------


class Made(nn.Module):
    """A module from a function of itself and what it is given, and its children, parameters and buffers."""

    def __init__(self, run: Callable[..., Any], **own: nn.Module | Tensor) -> None:
        super().__init__()
        self.run = run
        for name, value in own.items():
            if isinstance(value, nn.Module | nn.Parameter):
                setattr(self, name, value)
            else:
                self.register_buffer(name, value)

    def forward(self, *given: Any, **named: Any) -> Any:
        return self.run(self, *given, **named)


def wavy(prediction: Tensor, _batch: Any = None) -> Tensor:
    """A mean with no symmetry: sums of squares behind a normalisation, say, would be constant."""
    values = torch.view_as_real(prediction) if prediction.is_complex() else prediction
    return (values.sin() + values.square()).mean()


class Scored(Task):
    """A task whose loss is a function of the prediction and the batch."""

    def __init__(
        self,
        head: nn.Module,
        loss: Callable[[Any, Any], Any] = wavy,
        target: str | int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(head, target, **settings)
        self.score = loss

    def loss(self, prediction: Any, batch: Any) -> Any:
        return self.score(prediction, batch)


def line(inputs: int = 4, outputs: int = 2) -> nn.Linear:
    return nn.Linear(inputs, outputs)


def on(take: Callable[[Any], Tensor], inputs: int = 4, outputs: int = 2) -> Made:
    """A head that runs a layer on what it takes out of the features."""
    return Made(lambda self, features: self.layer(take(features)), layer=line(inputs, outputs))


def trunk(make: Callable[[Tensor], Any]) -> Made:
    """A trunk from (batch, 3) to a nest made of values of (batch, 4)."""
    return Made(lambda self, x: make(self.layer(x).tanh()), layer=line(3, 4))


def two_heads(shared: nn.Module | None, a: nn.Module, b: nn.Module, **settings: Any) -> MultiTaskModel:
    """A model with the tasks a and b."""
    return MultiTaskModel(shared, {"a": Scored(a), "b": Scored(b, weight=0.5)}, **{"inputs": "x", **settings})


# --- containers of features -------------------------------------------------------------------------------


@architecture(segments=("trunk.layer", "a"))
def features_in_a_tuple() -> MultiTaskModel:
    return two_heads(trunk(lambda f: (f, 3, None, f * 2)), on(lambda f: f[0] * f[1]), on(lambda f: f[3]))


@architecture(segments=("trunk.layer", "b.layer"))
def features_in_a_list() -> MultiTaskModel:
    return two_heads(
        trunk(lambda f: [f, [f.exp(), 2], None]), on(lambda f: f[0]), on(lambda f: f[1][0] * f[1][1])
    )


class Levels(list[Tensor]):
    """A list that knows one thing more."""

    stride: int


@architecture()
def features_in_a_list_with_an_attribute() -> MultiTaskModel:
    def make(f: Tensor) -> Levels:
        levels = Levels([f, f.exp()])
        levels.stride = 2
        return levels

    return two_heads(trunk(make), on(lambda f: f[0] * f.stride), on(lambda f: f[1] / f.stride))


@architecture(segments=("a", "b"))
def features_in_a_dict() -> MultiTaskModel:
    return two_heads(
        trunk(lambda f: {"f": f, "n": 2, "none": None, "deep": {"g": f.sin()}}),
        on(lambda f: f["f"] * f["n"]),
        on(lambda f: f["deep"]["g"] + (0 if f["none"] is None else 1)),
    )


@architecture()
def features_in_dicts_of_other_kinds() -> MultiTaskModel:
    def make(f: Tensor) -> Any:
        lists: defaultdict[str, list[Tensor]] = defaultdict(list)
        lists["f"].append(f)
        return OrderedDict(lists=lists, fixed=MappingProxyType({"g": f * 2}), user=UserDict(h=f.exp()))

    return two_heads(
        trunk(make),
        on(lambda f: f["lists"]["f"][0] + f["fixed"]["g"]),
        on(lambda f: f["user"]["h"] * (1 + len(f["lists"]["new"]))),
    )


@architecture(segments=("trunk.layer",))
def features_in_a_dataclass() -> MultiTaskModel:
    return two_heads(
        trunk(lambda f: Pyramid(f, f[:, :2], stride=3)),
        on(lambda f: f.fine * f.stride),
        on(lambda f: f.coarse, 2),
    )


@dataclass(frozen=True, slots=True)
class Frozen:
    """Can't be written into, and has no ``__dict__``."""

    x: Tensor
    number: int = 1
    rest: tuple[Any, ...] = ()
    made: Tensor | None = field(default=None, init=False)


@architecture()
def features_in_a_frozen_dataclass_with_slots() -> MultiTaskModel:
    return two_heads(
        trunk(lambda f: Frozen(f, rest=(None, f.cos()))), on(lambda f: f.x), on(lambda f: f.rest[1])
    )


@architecture(segments=("b",))
def features_in_a_named_tuple() -> MultiTaskModel:
    return two_heads(
        trunk(lambda f: Pooled(f, 7)), on(lambda f: f.vector), on(lambda f: f.vector.exp() / f.level)
    )


@dataclass
class ModelOutput(OrderedDict[str, Any]):
    """A dict and a dataclass at once, as models of Hugging Face return; the dict lacks what is None."""

    last: Tensor | None = None
    pooled: Tensor | None = None

    def __post_init__(self) -> None:
        for name, value in (("last", self.last), ("pooled", self.pooled)):
            if value is not None:
                self[name] = value


@architecture()
def features_in_a_dict_that_is_a_dataclass() -> MultiTaskModel:
    return two_heads(
        trunk(lambda f: ModelOutput(last=f, pooled=f.sigmoid())),
        on(lambda f: f["last"] + f.last),
        on(lambda f: f.pooled),
    )


@architecture(segments=("trunk.layer",))
def features_in_the_named_result_of_an_operation() -> MultiTaskModel:
    # the indices are integers
    return two_heads(
        trunk(lambda f: f.sort(dim=1)), on(lambda f: f.values), on(lambda f: f.values * f.indices)
    )


@architecture(segments=("trunk.layer",), chunks=())
def as_many_features_as_there_are_samples() -> MultiTaskModel:
    return two_heads(
        trunk(lambda f: [row for row in f]),  # noqa: C416 (a list of rows, not of the tensor's values)
        on(torch.stack),
        on(lambda f: f[0].unsqueeze(0)),
    )


# --- which features, and whose ----------------------------------------------------------------------------


class Scales(nn.Module):
    """(batch, 2, 6, 6) to maps at three scales; the coarsest by a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mid, self.top = (nn.Conv2d(n, 3, 3, padding=1) for n in (2, 3, 3))

    def forward(self, x: Tensor) -> list[Tensor]:
        fine = self.stem(x).tanh()
        mid = self.mid(F.avg_pool2d(fine, 2)).tanh()
        return [fine, mid, self.top(F.max_pool2d(mid, 3))]


def up(take: Callable[[Any], Tensor]) -> Made:
    """A head on a map."""
    return Made(lambda self, f: self.layer(take(f)), layer=nn.Conv2d(3, 2, 1))


@architecture(images, segments=("trunk.stem", "trunk.mid", "b"))
def scales_of_which_a_head_uses_some() -> MultiTaskModel:
    return two_heads(Scales(), up(lambda f: f[0]), up(lambda f: F.interpolate(f[2], size=3) + f[1]))


@architecture(images, segments=("trunk.stem", "trunk.top"))
def a_scale_that_no_head_uses() -> MultiTaskModel:
    # its layer gets no gradient, which is None
    return two_heads(Scales(), up(lambda f: f[0]), up(lambda f: f[1]))


@architecture(images, chunks=("b",))
def features_that_no_head_uses_at_all() -> MultiTaskModel:
    return two_heads(
        Scales(),
        Made(lambda self, f: self.p * f[0].shape[0], p=nn.Parameter(torch.ones(2))),
        Made(lambda self, f: self.p.exp(), p=nn.Parameter(torch.ones(2))),
    )


@architecture(segments=("one", "three", "deepest"))
def necks_on_necks() -> MultiTaskModel:
    def neck(above: str | tuple[str, ...], inputs: int) -> Neck:
        def run(self: Any, f: Any) -> dict[str, Tensor]:
            f = [f] if isinstance(f, Tensor | dict) else f
            x = torch.cat([part["x"] if isinstance(part, dict) else part for part in f], dim=1)
            return {"x": self.layer(x).tanh()}

        return Neck(Made(run, layer=line(inputs, 4)), on=above)

    def head() -> Made:
        return on(lambda f: f["x"])

    return MultiTaskModel(
        trunk(lambda f: f),
        {
            "deepest": Scored(head(), on="three"),
            "trunk only": Scored(line()),
            "middle": Scored(head(), on="two", weight=0.3),
            "beside": Scored(head(), on="side"),
        },
        inputs="x",
        necks={
            "three": neck(("one", "two"), 8),
            "two": neck("one", 4),
            "one": neck("trunk", 4),
            "side": neck(("trunk", "one"), 8),
        },
    )


@architecture(segments=("neck",))
def a_head_on_trunk_and_neck() -> MultiTaskModel:
    return MultiTaskModel(
        trunk(lambda f: {"f": f, "n": 2}),
        {
            "both": Scored(on(lambda f: torch.cat([f[0]["f"], f[1]], 1), 8), on=("trunk", "neck")),
            "turned": Scored(on(lambda f: f[0] * f[1]["f"] * f[1]["n"]), on=("neck", "trunk")),
        },
        inputs="x",
        necks={"neck": Neck(on(lambda f: f["f"], 4, 4))},
    )


@architecture()
def a_head_on_trunk_and_inputs() -> MultiTaskModel:
    return MultiTaskModel(
        trunk(lambda f: f),
        {
            "skip": Scored(on(lambda f: torch.cat(f, dim=1), 7), on=("trunk", "inputs")),
            "inputs only": Scored(line(3), on="inputs"),
            "trunk only": Scored(line()),
        },
        inputs="x",
    )


@architecture(segments=("a", "trunk.layer"))
def a_module_used_twice() -> MultiTaskModel:
    return two_heads(
        Made(lambda self, x: self.layer(self.layer(x).tanh()), layer=line(3, 3)),
        Made(lambda self, f: self.layer(self.layer(f).sin()), layer=line(3, 3)),
        line(3),
    )


@architecture(segments=("a", "b.0"))
def a_weight_tied_between_heads() -> MultiTaskModel:
    a, b = line(), nn.Sequential(line(4, 4), nn.Tanh(), line())
    b[2].weight = a.weight
    return two_heads(trunk(lambda f: f), a, b)


@architecture(segments=("a",))
def a_layer_shared_by_heads() -> MultiTaskModel:
    layer = line(4, 4)
    return two_heads(
        trunk(lambda f: f), nn.Sequential(layer, nn.Tanh(), line()), Made(lambda self, f: self.l(f), l=layer)
    )


@architecture(tokens, segments=("a",))
def a_weight_tied_between_trunk_and_head() -> MultiTaskModel:
    # as in language models: what embeds the tokens also scores them
    embed = nn.Embedding(7, 4)
    head = nn.Linear(4, 7, bias=False)
    head.weight = embed.weight
    return two_heads(Made(lambda self, x: self.embed(x).mean(1).tanh(), embed=embed), head, line())


@architecture(segments=("neck",))
def a_weight_tied_between_trunk_neck_and_head() -> MultiTaskModel:
    one, two, three = line(3, 3), line(3, 3), line(3, 3)
    two.weight = three.weight = one.weight
    return MultiTaskModel(
        nn.Sequential(one, nn.Tanh()),
        {"a": Scored(three, on="neck"), "b": Scored(line(3))},
        inputs="x",
        necks={"neck": Neck(nn.Sequential(two, nn.Sigmoid()))},
    )


@architecture(segments=("trunk.layer",), chunks=())
def a_parameter_among_the_features() -> MultiTaskModel:
    # the queries of a transformer
    return two_heads(
        Made(
            lambda self, x: {"x": self.layer(x), "q": self.q, "part": self.q[:2], "same": self.layer.weight},
            layer=line(3, 4),
            q=nn.Parameter(torch.rand(5, 4)),
        ),
        Made(lambda self, f: f["x"] @ f["q"].T),
        on(lambda f: f["x"] @ f["part"].T @ f["same"][:2], 3),
    )


@architecture(chunks=())
def parameters_only_for_features() -> MultiTaskModel:
    return two_heads(
        Made(lambda self, x: self.q, q=nn.Parameter(torch.rand(5, 4))), line(), Made(lambda self, f: f * 2)
    )


@architecture(chunks=())
def a_buffer_among_the_features() -> MultiTaskModel:
    # prototypes that follow the data; a new tensor takes the old one's place
    def run(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.layer(x)
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * features.mean(0)
        return features, self.mean

    return two_heads(
        Made(run, layer=line(3, 4), mean=torch.zeros(4)), on(lambda f: f[0] - f[1]), on(lambda f: f[0] * f[1])
    )


@architecture(segments=("a",))
def features_that_are_the_inputs() -> MultiTaskModel:
    return two_heads(nn.Identity(), line(3), Made(lambda self, x: self.layer(x[:, :2]), layer=line(2)))


@architecture(segments=("trunk.layer",))
def inputs_and_views_of_them_among_the_features() -> MultiTaskModel:
    return two_heads(
        Made(lambda self, x: {"x": x, "half": x[:, :2], "mask": x > 0, "f": self.layer(x)}, layer=line(3, 4)),
        on(lambda f: f["f"] * f["mask"].any(1, keepdim=True)),
        on(lambda f: torch.cat([f["half"], f["f"], f["x"]], 1), 9),
    )


def with_gradient(samples: int, seed: int) -> dict[str, Tensor]:
    batch = vectors(samples, seed)
    batch["x"].requires_grad_()
    return batch


@architecture(with_gradient, segments=("trunk.layer",))
def inputs_that_want_a_gradient() -> MultiTaskModel:
    return two_heads(
        Made(lambda self, x: (self.layer(x).tanh(), x, x[:, 1:]), layer=line(3, 4)),
        on(lambda f: torch.cat([f[0], f[1]], 1), 7),
        on(lambda f: f[0][:, :2] * f[2], 2),
    )


@architecture(segments=("trunk.layer",), chunks=())
def features_that_are_views_of_each_other() -> MultiTaskModel:
    def make(f: Tensor) -> dict[str, Tensor]:
        first, second = f.chunk(2, dim=1)  # several views from one operation
        return {"f": f, "t": f.t(), "first": first, "second": second, "wide": f[:, :1].expand(-1, 4)}

    return two_heads(
        trunk(make),
        on(lambda f: f["t"].t() + f["wide"]),
        on(lambda f: torch.cat([f["first"] * f["second"], f["f"]], 1), 6),
    )


@architecture(segments=("trunk.layer",))
def one_feature_in_several_places() -> MultiTaskModel:
    return two_heads(
        trunk(lambda f: {"a": f, "b": [f, (f,)]}),
        on(lambda f: f["a"] * f["b"][0]),
        on(lambda f: f["b"][1][0].exp() + f["a"]),
    )


@architecture(segments=("trunk.layer",))
def features_without_dimensions_or_values() -> MultiTaskModel:
    return two_heads(
        trunk(lambda f: (f.mean(), f[:, :0], f)),
        on(lambda f: torch.cat([f[1], f[2]], 1) * f[0]),
        Made(lambda self, f: f[0] * self.scale, scale=nn.Parameter(torch.tensor(2.0))),
    )


@architecture(segments=("trunk.layer",))
def features_of_which_some_have_no_graph() -> MultiTaskModel:
    def run(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.no_grad():
            fixed = self.fixed(x)
        f = self.layer(x)
        return f, fixed, f.detach()

    return two_heads(
        Made(run, layer=line(3, 4), fixed=line(3, 4)),
        on(lambda f: f[0] * f[1]),
        on(lambda f: f[2] + f[1]),
    )


class Tagged(Tensor):
    """A tensor of a type of its own."""


@architecture(segments=("trunk.layer",))
def features_of_a_tensor_type_of_its_own() -> MultiTaskModel:
    def take(f: Tensor) -> Tensor:
        assert type(f) is Tagged
        return f

    return two_heads(trunk(lambda f: f.as_subclass(Tagged)), on(take), on(lambda f: take(f).exp()))


@architecture(segments=("trunk.layer",))
def features_with_a_hook_on_their_gradient() -> MultiTaskModel:
    def make(f: Tensor) -> Tensor:
        if f.requires_grad:
            f.register_hook(lambda gradient: gradient * 0.5)
        return f

    return two_heads(trunk(make), line(), line())


# --- operations -------------------------------------------------------------------------------------------


@architecture(segments=("trunk.layer", "a.0"))
def operations_in_place_on_own_tensors() -> MultiTaskModel:
    def run(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        f = self.layer(x)
        f.mul_(2).relu_()
        padded = torch.zeros(len(x), 6, dtype=x.dtype)
        padded[:, 1:5] = f
        padded[:, 0] += x[:, 0]
        return f, padded

    def head(self: Any, f: tuple[Tensor, Tensor]) -> Tensor:
        x = self.layer(f[0])
        x += f[1][:, :2]
        x[:, 1].mul_(3)
        return x.clamp_(min=-1)

    return two_heads(
        Made(run, layer=line(3, 4)),
        nn.Sequential(on(lambda f: f[0], 4, 4), nn.ReLU(inplace=True), line()),
        Made(head, layer=line()),
    )


@architecture()
def a_head_that_writes_into_a_view_of_its_copy() -> MultiTaskModel:
    def head(self: Any, f: Tensor) -> Tensor:
        mine = f.clone()
        mine[:, :2].zero_()
        return self.layer(mine)

    return two_heads(trunk(lambda f: f), Made(head, layer=line()), line())


@architecture(segments=("trunk.layer",))
def heads_without_parameters() -> MultiTaskModel:
    return two_heads(trunk(lambda f: f), nn.Identity(), Made(lambda self, f: f.cumsum(1)))


@architecture()
def nothing_learns_but_the_heads() -> MultiTaskModel:
    return two_heads(Made(lambda self, x: x * 2), line(3), nn.Sequential(line(3, 3), nn.Tanh(), line(3)))


@architecture()
def nothing_learns_at_all() -> MultiTaskModel:
    return two_heads(nn.Identity(), nn.Identity(), Made(lambda self, f: f * 2))


class Reverse(torch.autograd.Function):
    """Turns the gradient round, for features that shall not tell domains apart."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return -0.5 * gradient


class Parts(torch.autograd.Function):
    """Several results, one of which has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(x)
        signs = x.sign()
        ctx.mark_non_differentiable(signs)
        return x * 2, signs, x.square()

    @staticmethod
    def backward(ctx: Any, one: Tensor, _signs: Tensor, two: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * one + 2 * x * two


@architecture(segments=("a", "trunk.layer"))
def a_head_that_turns_the_gradient_round() -> MultiTaskModel:
    return two_heads(trunk(lambda f: f), on(Reverse.apply), line())


@architecture(segments=("trunk.layer",))
def a_function_with_a_backward_of_its_own() -> MultiTaskModel:
    # of its three results each head uses one or two
    return two_heads(trunk(Parts.apply), on(lambda f: f[0] * f[1]), on(lambda f: f[2]))


@architecture(segments=("trunk.layer", "b"))
def a_loss_on_the_gradient_by_the_features() -> MultiTaskModel:
    def head(self: Any, f: Tensor) -> Tensor:
        score = self.layer(f).tanh().sum()
        (slope,) = torch.autograd.grad(score, f, create_graph=True)
        return slope.norm(dim=1)

    return two_heads(trunk(lambda f: f), Made(head, layer=line()), line())


@architecture(segments=("trunk.body", "trunk"))
def checkpoints_of_the_users_own() -> MultiTaskModel:
    def run(self: Any, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False)

    def layers(inputs: int) -> nn.Sequential:
        return nn.Sequential(line(inputs, 4), nn.Dropout(0.4), nn.Tanh(), line(4, 4))

    return two_heads(Made(run, body=layers(3)), Made(run, body=layers(4)), line())


@architecture(segments=("trunk.layer",))
def complex_features() -> MultiTaskModel:
    weight = nn.Parameter(torch.rand(3, 2, dtype=torch.complex128))
    return two_heads(
        trunk(lambda f: {"f": torch.fft.rfft(f), "conj": torch.fft.rfft(f).conj()}),
        Made(lambda self, f: f["f"] @ self.w, w=weight),
        on(lambda f: f["conj"].real * f["f"].abs(), 3),
    )


@architecture()
def integers_only_for_features() -> MultiTaskModel:
    # a tokenizer: nothing goes back through it
    return two_heads(
        Made(lambda self, x: (x[:, 0] > 0).long() + self.one, one=torch.ones((), dtype=torch.long)),
        nn.Embedding(3, 2),
        nn.Sequential(nn.Embedding(3, 4), line()),
    )


@architecture(sequences, segments=("a",), chunks=())
def a_recurrent_trunk() -> MultiTaskModel:
    # returns (outputs, (hidden, cell))
    return two_heads(
        nn.LSTM(3, 4, num_layers=2, dropout=0.3, batch_first=True),
        on(lambda f: f[0]),
        on(lambda f: f[1][0][-1] * f[1][1][0]),
    )


@architecture(sequences, chunks=())
def features_packed_by_length() -> MultiTaskModel:
    def run(self: Any, x: Tensor) -> PackedSequence:
        lengths = torch.arange(len(x)) % 3 + 2
        return self.rnn(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[0]

    return two_heads(
        Made(run, rnn=nn.GRU(3, 4, batch_first=True)),
        on(lambda f: pad_packed_sequence(f, batch_first=True)[0]),
        on(lambda f: f.data),
    )


@architecture(sequences, segments=("trunk.layers.0", "trunk.layers.1"))
def a_transformer_with_dropout() -> MultiTaskModel:
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.2, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return two_heads(
        Made(
            lambda self, x: self.layers[1](self.layers[0](F.pad(x, (0, 1)))),
            layers=encoder.layers,
        ),
        on(lambda f: f[:, 0]),
        on(lambda f: f.mean(1)),
    )


# --- normalisation and randomness -------------------------------------------------------------------------


@architecture(images, segments=("trunk.0", "trunk.1", "a"), chunks=())
def batchnorm_and_dropout_everywhere() -> MultiTaskModel:
    def block(inputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, 3, 3), nn.BatchNorm2d(3), nn.Dropout2d(0.3), nn.ReLU())

    return two_heads(block(2), block(3), block(3))


@architecture(images, segments=("trunk[1:3]", "a"), chunks=())
def other_normalisations() -> MultiTaskModel:
    return two_heads(
        nn.Sequential(
            nn.Conv2d(2, 4, 3),
            nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
            nn.BatchNorm2d(4, momentum=None),  # the mean of all batches
            nn.GroupNorm(2, 4),
            nn.LocalResponseNorm(2),
        ),
        nn.Sequential(nn.Conv2d(4, 2, 1), nn.BatchNorm2d(2, track_running_stats=False)),
        nn.Sequential(nn.BatchNorm2d(4, affine=False), nn.AlphaDropout(0.2)),
    )


@architecture(segments=("a",), chunks=("b",))
def slopes_drawn_at_random() -> MultiTaskModel:
    # RReLU fills in what its backward needs while it runs
    return two_heads(
        nn.Sequential(line(3, 4), nn.RReLU()), nn.Sequential(line(), nn.RReLU()), nn.Sequential(line())
    )


@architecture(segments=("trunk.0", "a", "b.0"), chunks=("a",))
def spectral_and_weight_norm() -> MultiTaskModel:
    return two_heads(
        nn.Sequential(parametrizations.spectral_norm(line(3, 4)), nn.Tanh()),
        parametrizations.weight_norm(line()),
        nn.Sequential(parametrizations.spectral_norm(line(4, 4)), parametrizations.orthogonal(line(4, 4))),
    )


def by_hook(make: Callable[..., nn.Module], layer: nn.Module) -> nn.Module:
    """A layer normalised in the older way: a hook before its forward makes the weight, a plain attribute."""
    with torch.no_grad():  # or it couldn't be copied, for the reference
        return make(layer)


@architecture(segments=("trunk.0", "a"), chunks=("a",))
def spectral_and_weight_norm_by_hooks() -> MultiTaskModel:
    return two_heads(
        nn.Sequential(by_hook(nn.utils.spectral_norm, line(3, 4)), nn.Tanh()),
        by_hook(nn.utils.weight_norm, line()),
        nn.Sequential(by_hook(nn.utils.spectral_norm, line(4, 4)), nn.Sigmoid()),
    )


@architecture(segments=("trunk.layer",))
def a_layer_normalised_by_a_hook_and_used_twice() -> MultiTaskModel:
    # each use makes another weight
    return two_heads(
        Made(
            lambda self, x: self.layer(self.layer(self.first(x)).tanh()),
            first=line(3, 3),
            layer=by_hook(nn.utils.spectral_norm, line(3, 3)),
        ),
        line(3),
        line(3),
    )


@architecture(segments=("trunk", "a"), chunks=("b",))
def layers_dropped_at_random() -> MultiTaskModel:
    # by Python's own generator, and with noise of NumPy's; a layer that was not run has no gradient
    def run(self: Any, x: Tensor) -> Tensor:
        for layer in self.layers:
            if random.random() < 0.5:
                x = x + layer(x).tanh() * float(np.random.standard_normal())
        return x

    def layers() -> nn.ModuleList:
        return nn.ModuleList(line(3, 3) for _ in range(4))

    return two_heads(Made(run, layers=layers()), Made(run, layers=layers()), line(3))


@architecture(segments=("trunk", "trunk.layer"))
def a_codebook_that_follows_the_data() -> MultiTaskModel:
    # vector quantisation: the codes move in place in the forward, and the gradient goes straight through
    def run(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        f = self.layer(x)
        nearest = torch.cdist(f.detach(), self.codes).argmin(1)
        codes = self.codes[nearest]
        with torch.no_grad():
            self.codes.index_add_(0, nearest, 0.1 * (f - codes))
        return f + (codes - f).detach(), nearest

    return two_heads(
        Made(run, layer=line(3, 4), codes=torch.randn(6, 4)),
        on(lambda f: f[0]),
        on(lambda f: f[0] * f[1].unsqueeze(1)),
    )


# --- frozen, detached and disabled nodes ------------------------------------------------------------------


@architecture(segments=("trunk.0", "trunk.2"))
def a_trunk_that_is_frozen_in_part() -> MultiTaskModel:
    shared = nn.Sequential(line(3, 4), nn.BatchNorm1d(4), line(4, 4), nn.Tanh())
    shared[0].requires_grad_(False)
    shared[2].weight.requires_grad_(False)
    return two_heads(shared, line(), line())


@architecture(segments=("trunk.0", "a"))
def a_trunk_that_is_frozen_whole() -> MultiTaskModel:
    # its statistics stay, in training mode too
    shared = nn.Sequential(line(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3))
    return two_heads(shared.requires_grad_(False), line(), line())


@architecture(segments=("neck",))
def a_neck_that_is_frozen() -> MultiTaskModel:
    # the trunk learns through it
    neck = nn.Sequential(line(4, 4), nn.BatchNorm1d(4), nn.Tanh()).requires_grad_(False)
    return MultiTaskModel(
        trunk(lambda f: f),
        {"a": Scored(line(), on="neck"), "b": Scored(line())},
        inputs="x",
        necks={"neck": Neck(neck)},
    )


@architecture()
def a_frozen_neck_with_a_checkpoint_of_the_users_own() -> MultiTaskModel:
    # which runs once more in the backward, and must not move the statistics there either
    neck = Made(
        lambda self, f: checkpoint(self.body, f, use_reentrant=False),
        body=nn.Sequential(line(4, 4), nn.BatchNorm1d(4), nn.Tanh()),
    )
    return MultiTaskModel(
        trunk(lambda f: f),
        {"a": Scored(line(), on="neck"), "b": Scored(line())},
        inputs="x",
        necks={"neck": Neck(neck.requires_grad_(False))},
    )


def normalised_head() -> nn.Sequential:
    return nn.Sequential(line(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.2), line(3))


@architecture(segments=("frozen", "trunk.layer"))
def heads_of_every_mode() -> MultiTaskModel:
    modes = {"learning": "train", "frozen": "frozen", "detached": "detached", "switched off": "off"}
    tasks = {name: Scored(normalised_head(), mode=mode) for name, mode in modes.items()}
    tasks["no weight"] = Scored(line(), weight=0)
    return MultiTaskModel(trunk(lambda f: {"f": f, "n": 1}["f"]), tasks, inputs="x")


@architecture(segments=("neck", "a"))
def modes_on_a_neck() -> MultiTaskModel:
    return MultiTaskModel(
        trunk(lambda f: f),
        {
            "a": Scored(on(lambda f: f[0] * f[1]), mode="detached", on=("trunk", "neck")),
            "b": Scored(normalised_head(), mode="frozen", on="neck"),
            "c": Scored(line(), mode="detached"),
        },
        inputs="x",
        necks={"neck": Neck(nn.Sequential(line(4, 4), nn.BatchNorm1d(4), nn.Tanh()))},
    )


@architecture()
def heads_that_are_all_detached() -> MultiTaskModel:
    return MultiTaskModel(
        nn.Sequential(line(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)),
        {"a": Scored(line(), mode="detached"), "b": Scored(normalised_head(), mode="detached")},
        inputs="x",
    )


@architecture(segments=("a",))
def heads_frozen_by_their_parameters() -> MultiTaskModel:
    part = nn.Sequential(line(4, 4), nn.Tanh(), line())
    part[0].requires_grad_(False)
    return two_heads(trunk(lambda f: f), normalised_head().requires_grad_(False), part)


@architecture()
def a_weight_tied_with_a_frozen_head() -> MultiTaskModel:
    a, b = line(), line()
    b.weight = a.weight
    return MultiTaskModel(
        trunk(lambda f: f), {"a": Scored(a, mode="frozen"), "b": Scored(b), "c": Scored(line())}, inputs="x"
    )


# --- losses -----------------------------------------------------------------------------------------------


@architecture()
def losses_that_are_no_usual_mean() -> MultiTaskModel:
    losses: dict[str, Callable[[Tensor, Any], Any]] = {
        "zero": lambda prediction, _: prediction.new_zeros(()),
        "zero with a graph": lambda prediction, _: 0 * prediction.sum(),
        "constant": lambda prediction, _: torch.tensor(3.0),
        "whole": lambda prediction, _: torch.tensor(3),
        "python": lambda prediction, _: 2.5,
        "negative": lambda prediction, _: -wavy(prediction) - 10,
        "one value": lambda prediction, _: wavy(prediction).reshape(1, 1),
        "usual": wavy,
    }
    tasks = {name: Scored(line(), loss) for name, loss in losses.items()}
    return MultiTaskModel(trunk(lambda f: f), tasks, inputs="x")


@architecture()
def losses_that_are_all_constant() -> MultiTaskModel:
    return MultiTaskModel(
        trunk(lambda f: f),
        {"a": Scored(line(), lambda *_: 4.0), "b": Scored(line(), lambda *_: 0)},
        inputs="x",
    )


@architecture()
def losses_in_parts() -> MultiTaskModel:
    def nested(prediction: Tensor, _: Any) -> dict[str, Any]:
        return {
            "wave": wavy(prediction),
            "more": {"mean": -prediction.mean(), "constant": 1.5},
            "levels": UserDict({f"level {i}": prediction[:, i].exp().mean() for i in range(2)}),
        }

    return MultiTaskModel(
        trunk(lambda f: f), {"a": Scored(line(), nested, weight=0.7), "b": Scored(line())}, inputs="x"
    )


class InForward(Task):
    """A head that is given the batch, and returns its loss."""

    def forward(self, features: Any, batch: Any) -> Any:
        return self.head(features, batch[self.target])

    def loss(self, prediction: Any, batch: Any) -> Any:
        return prediction["loss"]


@architecture()
def losses_computed_in_the_forward() -> MultiTaskModel:
    def head() -> Made:
        return Made(
            lambda self, f, y: {"loss": F.mse_loss(self.layer(f), y), "logits": None}, layer=line(4, 1)
        )

    return MultiTaskModel(
        trunk(lambda f: f), {"a": InForward(head(), "y"), "b": InForward(head(), "y", weight=2)}, inputs="x"
    )


@architecture(segments=("a",))
def losses_with_parameters_of_their_own() -> MultiTaskModel:
    # weighted by learned variances
    class Uncertain(Scored):
        def __init__(self, head: nn.Module) -> None:
            super().__init__(head)
            self.log_variance = nn.Parameter(torch.tensor(-0.5))

        def loss(self, prediction: Any, batch: Any) -> Any:
            return torch.exp(-self.log_variance) * wavy(prediction) + self.log_variance

    return MultiTaskModel(trunk(lambda f: f), {n: Uncertain(line()) for n in "ab"}, inputs="x")


@architecture()
def one_task_only() -> MultiTaskModel:
    return MultiTaskModel(trunk(lambda f: (f, 1)), {"only": Scored(on(lambda f: f[0]))}, inputs="x")


# --- no trunk ---------------------------------------------------------------------------------------------


@architecture(segments=("a", "b.0"), trunk=False, chunks=("a",))
def no_trunk() -> MultiTaskModel:
    return two_heads(None, line(3), nn.Sequential(line(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2)))


@architecture(segments=("neck",), trunk=False)
def no_trunk_but_a_neck() -> MultiTaskModel:
    return MultiTaskModel(
        None,
        {"a": Scored(line(), on="neck"), "b": Scored(line(), on="neck"), "alone": Scored(line(3))},
        inputs="x",
        necks={"neck": Neck(nn.Sequential(line(3, 4), nn.BatchNorm1d(4)))},
    )


# --- batches ----------------------------------------------------------------------------------------------


def distance(key: Any) -> Callable[[Tensor, Any], Tensor]:
    """A loss: how far a prediction (batch, 1) is from an entry."""
    return lambda prediction, batch: F.mse_loss(prediction, batch[key])


def labelled(inputs: Any, target: Any, loss: Callable[[Any, Any], Any]) -> MultiTaskModel:
    """Two tasks of which one has a target."""
    return MultiTaskModel(
        trunk(lambda f: f), {"a": Scored(line(4, 1), loss, target=target), "b": Scored(line())}, inputs=inputs
    )


@architecture(segments=("a",))
def batches_that_are_dicts() -> MultiTaskModel:
    return labelled("x", "y", distance("y"))


@dataclass
class Scene:
    """A batch with attributes."""

    x: Tensor
    y: Tensor | None
    path: str = "scene.png"


@architecture(lambda samples, seed: Scene(**vectors(samples, seed)))
def batches_that_are_dataclasses() -> MultiTaskModel:
    return labelled("x", "y", lambda prediction, batch: F.mse_loss(prediction, batch.y))


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@architecture(lambda samples, seed: Pair(**vectors(samples, seed)))
def batches_that_are_named_tuples() -> MultiTaskModel:
    return labelled("x", "y", lambda prediction, batch: F.mse_loss(prediction, batch.y))


@architecture(lambda samples, seed: tuple(vectors(samples, seed).values()))
def batches_that_are_tuples() -> MultiTaskModel:
    return labelled(0, 1, distance(1))


@architecture(lambda samples, seed: list(vectors(samples, seed).values()))
def batches_that_are_lists() -> MultiTaskModel:
    return labelled(0, 1, distance(1))


def samples_of(samples: int, seed: int) -> list[dict[str, Tensor]]:
    """One dict for each sample, not collated."""
    whole = vectors(samples, seed)
    return [{key: value[i] for key, value in whole.items()} for i in range(samples)]


@architecture(samples_of)
def batches_that_are_lists_of_samples() -> MultiTaskModel:
    def stacked(batch: list[dict[str, Tensor]], key: str) -> Tensor:
        return torch.stack([sample[key] for sample in batch])

    return labelled(
        lambda batch: stacked(batch, "x"),
        None,
        lambda prediction, batch: F.mse_loss(prediction, stacked(batch, "y")),
    )


@architecture(lambda samples, seed: vectors(samples, seed)["x"])
def batches_that_are_bare_tensors() -> MultiTaskModel:
    return labelled(lambda batch: batch, None, lambda prediction, batch: F.l1_loss(prediction, batch[:, :1]))


class Encoding(UserDict):  # type: ignore[type-arg]
    """As a tokenizer of Hugging Face returns: a mapping that is no dict, with attributes and ``to``."""

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("data", {}):
            return self.data[name]
        raise AttributeError(name)

    def to(self, device: Any) -> Encoding:
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


def encodings(samples: int, seed: int) -> Encoding:
    ids = tokens(samples, seed)["x"]
    return Encoding(input_ids=ids, attention_mask=(ids > 0).double(), labels=ids[:, 0])


@architecture(encodings, segments=("trunk.embed",))
def batches_like_a_tokenizers() -> MultiTaskModel:
    def run(self: Any, input_ids: Tensor, attention_mask: Tensor) -> ModelOutput:
        x = self.embed(input_ids) * attention_mask.unsqueeze(2)
        return ModelOutput(last=x, pooled=x.mean(1).tanh())

    return MultiTaskModel(
        Made(run, embed=nn.Embedding(7, 4)),
        {
            "cls": Scored(
                on(lambda f: f.pooled, 4, 7),
                lambda prediction, batch: F.cross_entropy(prediction, batch.labels),
                target="labels",
            ),
            "lm": Scored(on(lambda f: f["last"])),
        },
        inputs=("input_ids", "attention_mask"),
    )


@architecture(encodings, segments=("a",), trunk=False)
def models_that_take_the_labels_as_inputs() -> MultiTaskModel:
    # each is a whole model of its own, and gets keyword arguments
    def run(self: Any, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.out(self.embed(input_ids).mean(1))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    def head() -> Made:
        return Made(run, embed=nn.Embedding(7, 4), out=line(4, 7))

    def loss(prediction: Mapping[str, Tensor], _: Any) -> Tensor:
        return prediction["loss"]

    return MultiTaskModel(
        None,
        {"a": Scored(head(), loss, target="labels"), "b": Scored(head(), loss, target="labels", weight=0.3)},
        inputs=("input_ids", "labels"),
    )


def detections(samples: int, seed: int) -> dict[str, Any]:
    """Images, and for each a dict of as many boxes as it happens to have; the first has none."""
    numbers = torch.Generator().manual_seed(seed)
    targets = [
        {"boxes": torch.rand(i % 3, 4, generator=numbers, dtype=torch.float64), "labels": torch.arange(i % 3)}
        for i in range(samples)
    ]
    return {**images(samples, seed), "targets": targets}


def detection_loss(prediction: Tensor, targets: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Mean over the images of the distances from all of their boxes: (batch, 4), list of dicts."""
    losses = [
        (box.unsqueeze(0) - target["boxes"]).abs().sum() + wavy(box)
        for box, target in zip(prediction, targets, strict=True)
    ]
    return torch.stack(losses).mean()


def detector(inputs: Any, targets: Any) -> MultiTaskModel:
    return MultiTaskModel(
        Made(lambda self, x: self.conv(x).relu(), conv=nn.Conv2d(2, 4, 3)),
        {
            "boxes": Scored(
                on(lambda f: f.mean((2, 3)), 4, 4),
                lambda prediction, batch: detection_loss(prediction, batch[targets]),
                target=targets,
            ),
            "map": Scored(nn.Conv2d(4, 1, 1)),
        },
        inputs=inputs,
    )


@architecture(detections, segments=("trunk.conv", "boxes"))
def targets_in_lists_of_varying_length() -> MultiTaskModel:
    return detector("x", "targets")


@architecture(lambda samples, seed: tuple(detections(samples, seed).values()))
def a_tuple_of_images_and_lists_of_targets() -> MultiTaskModel:
    return detector(0, 1)


def images_of_any_size(samples: int, seed: int) -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(samples, 2, 4 + seed, 7 - 2 * seed, generator=numbers, dtype=torch.float64),
        "size": torch.tensor(4 + seed),
    }


@architecture(images_of_any_size, segments=("trunk",))
def inputs_of_varying_size() -> MultiTaskModel:
    return two_heads(
        nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()),
        nn.Conv2d(3, 1, 1),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), line(3)),
    )


@architecture(sizes=(1, 1, 1), segments=("trunk.layer",), chunks=())
def batches_of_one() -> MultiTaskModel:
    return two_heads(trunk(lambda f: (f, f.squeeze(0))), on(lambda f: f[0]), on(lambda f: f[1]))


@architecture(sizes=(4, 0, 3), segments=("trunk.0",))
def an_empty_micro_batch() -> MultiTaskModel:
    # whose mean would be NaN
    return two_heads(nn.Sequential(line(3, 4), nn.BatchNorm1d(4)), line(), line())


@architecture(sizes=(0, 0, 0))
def batches_that_are_all_empty() -> MultiTaskModel:
    return two_heads(trunk(lambda f: f), line(), line())


def some_labels(samples: int, seed: int) -> dict[str, Any]:
    """The second micro-batch has no labels of ``a``, the third has no such entry."""
    batch: dict[str, Any] = vectors(samples, seed)
    if seed == 1:
        batch["y"] = None
    if seed == 2:
        del batch["y"]
    return batch


@architecture(
    some_labels, segments=("a",), counts=lambda window: {"a": 4, "b": sum(len(b["x"]) for b in window)}
)
def targets_that_are_missing_now_and_then() -> MultiTaskModel:
    return labelled("x", "y", distance("y"))


def awkward_counts(window: list[Any]) -> dict[str, float]:
    """Labels that are neither ignored nor NaN; those of ``cls`` weigh 1, 0.5 and 3."""

    def known(key: str) -> float:
        return sum(int((~batch[key].isnan()).sum()) for batch in window)

    return {
        "seg": sum(int((batch["seg"] != 255).sum()) for batch in window),
        "cls": sum((1.0, 0.5, 3.0)[int(label)] for batch in window for label in batch["cls"] if label >= 0),
        "depth": known("depth"),
        "bare": known("five"),
        **dict.fromkeys(("noisy", "left", "right"), known("pair")),
    }


@architecture(
    awkward_batch,
    counts=awkward_counts,
    segments=("trunk.norm", "fpn", "deep", "seg", "cls"),
    chunks=("seg", "depth", "bare", "left", "right"),
)
def all_of_it_at_once() -> MultiTaskModel:
    return awkward_model()
