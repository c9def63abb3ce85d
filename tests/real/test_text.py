"""Hugging Face models as trunks, small and with random weights, against a joint backward written by hand.

The sequence head reads the batch's attention mask, so it is a task with a forward of its own. Everything is
in float64; BERT's dropouts are on, but where a test says otherwise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import SCHEDULE_NAMES, Reference, assert_close_gradients, assert_equal_states, seed_everything
from torch import Tensor, nn

from mtaccum import Classification, Engine, MultiTaskModel, Task, split_batch, windows

transformers = pytest.importorskip("transformers", reason="needs the extra text")

VOCABULARY, HIDDEN, SENTIMENTS, TAGS = 50, 32, 3, 5
Batch = Mapping[str, Tensor]
Sums = dict[str, tuple[Tensor, int]]
"""For each task that has labels in a micro-batch: the sum of its label losses, and how many labels."""


def batch_of(samples: int, length: int = 11, seed: int = 1) -> dict[str, Tensor]:
    """Padded sequences of uneven lengths; each token of a sequence has a tag but for some, and from the fifth
    sequence on there is no sentiment."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, length + 1, (samples,), generator=random)
    lengths[0] = length
    mask = (torch.arange(length) < lengths[:, None]).long()
    tags = torch.randint(0, TAGS, (samples, length), generator=random)
    tags[(mask == 0) | (torch.rand(tags.shape, generator=random) < 0.2)] = -100
    sentiment = torch.randint(0, SENTIMENTS, (samples,), generator=random)
    sentiment[4:] = -100
    words = torch.randint(1, VOCABULARY, (samples, length), generator=random)
    return {"input_ids": words * mask, "attention_mask": mask, "sentiment": sentiment, "tags": tags}


def masked_mean(hidden: Tensor, mask: Tensor) -> Tensor:
    """(batch, tokens, channels) and (batch, tokens) to (batch, channels)."""
    weights = mask.unsqueeze(-1).to(hidden)
    return (hidden * weights).sum(1) / weights.sum(1)


class Sentiment(Classification):
    """A class for each sequence, from the mean of its tokens."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(SENTIMENTS, head=nn.Linear(HIDDEN, SENTIMENTS), target="sentiment", **settings)

    def forward(self, features: Any, batch: Any) -> Tensor:
        return self.head(masked_mean(features.last_hidden_state, batch["attention_mask"]))


class Tags(Classification):
    """A class for each token; logits (batch, classes, tokens)."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(TAGS, head=nn.Linear(HIDDEN, TAGS), target="tags", **settings)

    def forward(self, features: Any, batch: Any) -> Tensor:
        return self.head(features.last_hidden_state).transpose(1, 2)


def bert_config(**settings: Any) -> Any:
    return transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        **settings,
    )


def on_trunk(trunk: nn.Module, **tasks: Task) -> MultiTaskModel:
    tasks = tasks or {"sentiment": Sentiment(), "tags": Tags(weight=0.3)}
    return MultiTaskModel(trunk, tasks, inputs=("input_ids", "attention_mask")).double()


def bert(**settings: Any) -> MultiTaskModel:
    torch.manual_seed(0)
    return on_trunk(transformers.BertModel(bert_config(**settings), add_pooling_layer=False))


def without_dropout() -> MultiTaskModel:
    return bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def class_sums(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(logits, labels, reduction="sum"), int((labels != -100).sum())


def forward(model: MultiTaskModel, batch: Batch) -> Sums:
    """One micro-batch of both tasks by hand."""
    mask, sums = batch["attention_mask"], {}
    hidden = model.trunk(input_ids=batch["input_ids"], attention_mask=mask)[0]
    if (batch["sentiment"] != -100).any():
        logits = model.task("sentiment").head(masked_mean(hidden, mask))
        sums["sentiment"] = class_sums(logits, batch["sentiment"])
    logits = model.task("tags").head(hidden)
    return {**sums, "tags": class_sums(logits.flatten(0, 1), batch["tags"].flatten())}


def joint(
    model: MultiTaskModel,
    window: Sequence[Batch],
    forward: Callable[[MultiTaskModel, Batch], Sums] = forward,
    weights: Mapping[str, float] | None = None,
) -> Reference:
    """All forwards, sum of weight * (sum of label losses) / (their number), one backward, on a copy."""
    model = copy.deepcopy(model)
    model.zero_grad()
    weights = weights or {"sentiment": 1.0, "tags": 0.3}
    micro_batches = [forward(model, batch) for batch in window]
    means = {}
    for name in weights:
        sums = [micro_batch[name] for micro_batch in micro_batches if name in micro_batch]
        means[name] = torch.stack([total for total, _ in sums]).sum() / sum(number for _, number in sums)
    torch.stack([weights[name] * mean for name, mean in means.items()]).sum().backward()
    return Reference(
        {name: parameter.grad for name, parameter in model.named_parameters()},
        {name: mean.detach() for name, mean in means.items()},
        dict(model.named_buffers()),
    )


@cache
def expected(micro_batches: int) -> Reference:
    model, window = bert(), split_batch(batch_of(7), micro_batches)
    seed_everything(5)
    return joint(model, window)


all_schedules = pytest.mark.parametrize("schedule", SCHEDULE_NAMES)


def recomputing(*parts: Sequence[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("recompute", parts, ids=lambda names: "+".join(names) or "kept")


# --- BERT, a sequence head and a token head ---------------------------------------------------------------


@all_schedules
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("kind", [dict, transformers.BatchEncoding])
@recomputing(
    (),
    ("trunk.encoder.layer.*",),
    ("trunk.encoder.layer.1", "trunk.embeddings", "tags"),
    ("trunk.encoder.layer.?.attention",),
    ("trunk",),
)
def test_bert_with_dropout_trains_as_the_joint_loss_s3(
    schedule: str, micro_batches: int, kind: Callable[[Batch], Any], recompute: Sequence[str]
) -> None:
    model, window = bert(), split_batch(kind(batch_of(7)), micro_batches)
    assert {type(batch) for batch in window} == {kind}
    seed_everything(5)

    result = Engine(model, schedule=schedule, recompute=recompute).accumulate(window)

    assert_close_gradients(model, expected(micro_batches), 1e-12)
    assert result.counts == {"sentiment": 4, "tags": (batch_of(7)["tags"] != -100).sum()}
    for name, loss in result.losses.items():
        assert loss.item() == pytest.approx(expected(micro_batches).losses[name].item(), rel=1e-12)


@all_schedules
@recomputing((), ("trunk.encoder.layer.*",))
def test_transformers_own_checkpointing_trains_as_the_joint_loss_s3(
    schedule: str, recompute: Sequence[str]
) -> None:
    model, runs = bert(), []
    trunk: Any = model.trunk
    enable = getattr(trunk, "activation_checkpointing_enable", None) or trunk.gradient_checkpointing_enable
    enable()
    trunk.encoder.layer[0].intermediate.register_forward_hook(lambda *_: runs.append(None))
    seed_everything(5)

    Engine(model, schedule=schedule, recompute=recompute).accumulate(split_batch(batch_of(7), 3))

    assert_close_gradients(model, expected(3), 1e-12)
    assert len(runs) >= 6  # it did checkpoint


@pytest.mark.parametrize(("schedule", "passes"), [("summed", 3), ("split", 3), ("sequential", 5)])
def test_recomputed_layers_run_once_more_and_others_do_not(schedule: str, passes: int) -> None:
    # sequential: two tasks in two micro-batches, one in the third, where no sentiment is known
    model, runs = bert(), {0: 0, 1: 0}
    for index, layer in enumerate(model.trunk.encoder.layer):

        def count(*_: Any, index: int = index) -> None:
            runs[index] += 1

        layer.intermediate.register_forward_hook(count)

    recompute = ["trunk.encoder.layer.1"]
    Engine(model, schedule=schedule, recompute=recompute).accumulate(split_batch(batch_of(7), 3))

    assert runs == {0: passes, 1: 2 * passes}


# --- each label weighs the same ---------------------------------------------------------------------------


@all_schedules
@recomputing((), ("trunk.encoder.layer.*",))
def test_the_number_of_micro_batches_makes_no_difference_without_dropout_n3(
    schedule: str, recompute: Sequence[str]
) -> None:
    reference = joint(without_dropout(), [batch_of(7)])
    for micro_batches in (1, 2, 4, 7):
        model = without_dropout()
        Engine(model, schedule=schedule, recompute=recompute).accumulate(
            split_batch(transformers.BatchEncoding(batch_of(7)), micro_batches)
        )
        assert_close_gradients(model, reference, 1e-12)


@all_schedules
def test_each_of_10_and_100_tokens_in_two_batches_of_other_lengths_weighs_a_110th_n1(schedule: str) -> None:
    short, long = batch_of(1, length=10), batch_of(4, length=25, seed=2)
    for batch in (short, long):
        batch["attention_mask"][:], batch["tags"] = 1, batch["tags"].clamp(min=0)
    model = without_dropout()

    Engine(model, schedule=schedule).accumulate([short, long])

    by_hand, losses = copy.deepcopy(model), []
    by_hand.zero_grad()
    for batch in (short, long):
        hidden = by_hand.trunk(batch["input_ids"], batch["attention_mask"])[0]
        tags = by_hand.task("tags").head(hidden).flatten(0, 1)
        sentiments = by_hand.task("sentiment").head(hidden.mean(1))
        losses += [
            0.3 / 110 * loss for loss in F.cross_entropy(tags, batch["tags"].flatten(), reduction="none")
        ]
        losses += [1 / 5 * loss for loss in F.cross_entropy(sentiments, batch["sentiment"], reduction="none")]
    assert len(losses) == 110 + 5
    torch.stack(losses).sum().backward()
    gradients = {name: parameter.grad for name, parameter in by_hand.named_parameters()}
    assert_close_gradients(model, Reference(gradients, {}, {}), 1e-12)


@all_schedules
def test_each_task_learns_as_from_its_labelled_samples_alone_l3(schedule: str) -> None:
    batch = batch_of(7)
    batch["tags"][2:4] = -100
    model = without_dropout()

    Engine(model, schedule=schedule).accumulate(split_batch(batch, 3))

    apart = copy.deepcopy(model)
    apart.zero_grad()
    for name, weight in (("sentiment", 1.0), ("tags", 0.3)):
        labels = batch[name].flatten(1) if name == "tags" else batch[name][:, None]
        labelled = (labels != -100).any(1)
        part = {key: value[labelled] for key, value in batch.items()}
        assert 0 < len(part["input_ids"]) < 7
        total, number = forward(apart, part)[name]
        (weight * total / number).backward()
    gradients = {name: parameter.grad for name, parameter in apart.named_parameters()}
    assert_close_gradients(model, Reference(gradients, {}, {}), 1e-12)


@all_schedules
def test_windows_of_encodings_padded_to_their_own_length_with_a_short_last_one_n4(schedule: str) -> None:
    loader = [
        transformers.BatchEncoding(batch_of(samples, length, seed=length))
        for samples, length in ((5, 7), (3, 12), (6, 9), (5, 5), (6, 15))
    ]
    model = bert()
    by_hand = copy.deepcopy(model)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), schedule=schedule)
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)

    seed_everything(5)
    results = [engine.step(window) for window in windows(loader, micro_batches=2)]

    seed_everything(5)
    for start in (0, 2, 4):
        reference = joint(by_hand, loader[start : start + 2])
        for name, parameter in by_hand.named_parameters():
            parameter.grad = reference.gradients[name]
        optimizer.step()
    assert [result.stepped for result in results] == [True] * 3
    for (name, own), wanted in zip(model.state_dict().items(), by_hand.state_dict().values(), strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-11, atol=1e-13, msg=name)


@all_schedules
def test_a_batch_without_sentiments_leaves_that_head_as_it_is_l4_i1(schedule: str) -> None:
    model = bert()
    engine = Engine(
        model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1), schedule=schedule
    )
    engine.step([batch_of(7)])  # momentum for all
    head = copy.deepcopy(model.task("sentiment").state_dict())
    unlabelled = transformers.BatchEncoding({k: v for k, v in batch_of(4).items() if k != "sentiment"})
    nothing = transformers.BatchEncoding({**batch_of(3), "sentiment": torch.full((3,), -100)})

    result = engine.step([unlabelled, nothing])

    assert result.losses.keys() == {"tags"}
    assert_equal_states(model.task("sentiment").state_dict(), head)


@all_schedules
@recomputing((), ("trunk.encoder.layer.0", "sentiment"), ("trunk",))
def test_a_frozen_encoder_runs_without_a_graph_b4(schedule: str, recompute: Sequence[str]) -> None:
    model, window = bert(), split_batch(batch_of(7), 3)
    model.trunk.requires_grad_(False)
    graphs: list[bool] = []
    model.trunk.encoder.layer[0].register_forward_hook(lambda *call: graphs.append(call[2][0].requires_grad))
    seed_everything(5)
    reference = joint(model, window)
    graphs.clear()

    seed_everything(5)
    Engine(model, schedule=schedule, recompute=recompute).accumulate(window)

    assert_close_gradients(model, reference, 1e-12)
    assert all(parameter.grad is None for parameter in model.trunk.parameters())
    assert graphs == [False] * (5 if schedule == "sequential" else 3)


@all_schedules
@recomputing((), ("trunk.encoder.layer.*", "tags"))
def test_a_detached_head_learns_alone_and_a_frozen_one_lets_the_trunk_learn_b3(
    schedule: str, recompute: Sequence[str]
) -> None:
    model, window = bert(), split_batch(batch_of(7), 3)
    model.task("sentiment").mode, model.task("tags").mode = "detached", "frozen"

    def apart(model: MultiTaskModel, batch: Batch) -> Sums:
        mask, sums = batch["attention_mask"], {}
        hidden = model.trunk(input_ids=batch["input_ids"], attention_mask=mask)[0]
        if (batch["sentiment"] != -100).any():
            logits = model.task("sentiment").head(masked_mean(hidden.detach(), mask))
            sums["sentiment"] = class_sums(logits, batch["sentiment"])
        logits = F.linear(hidden, *(parameter.detach() for parameter in model.task("tags").head.parameters()))
        return {**sums, "tags": class_sums(logits.flatten(0, 1), batch["tags"].flatten())}

    seed_everything(5)
    reference = joint(model, window, apart)
    seed_everything(5)
    Engine(model, schedule=schedule, recompute=recompute).accumulate(window)

    assert_close_gradients(model, reference, 1e-12)
    assert all(parameter.grad is None for parameter in model.task("tags").parameters())


@all_schedules
def test_a_trunk_under_detached_heads_alone_runs_without_a_graph_b4(schedule: str) -> None:
    model, graphs = bert(), []
    for task in model.tasks_by_name().values():
        task.mode = "detached"
    model.trunk.encoder.layer[0].register_forward_hook(lambda *call: graphs.append(call[2][0].requires_grad))

    Engine(model, schedule=schedule).accumulate(split_batch(batch_of(7), 3))

    assert graphs == [False] * (5 if schedule == "sequential" else 3)
    assert all(parameter.grad is None for parameter in model.trunk.parameters())
    assert all(parameter.grad is not None for parameter in model.task("tags").parameters())


# --- other outputs of the trunk ---------------------------------------------------------------------------


class OnPooled(Classification):
    def __init__(self) -> None:
        super().__init__(SENTIMENTS, head=nn.Linear(HIDDEN, SENTIMENTS), target="sentiment")

    def forward(self, features: Any, batch: Any) -> Tensor:
        return self.head(features["pooler_output"])


class OnLayer(Tags):
    """Tags from the tokens of an inner layer, of which the trunk's output holds a tuple."""

    def forward(self, features: Any, batch: Any) -> Tensor:
        return self.head(features.hidden_states[1]).transpose(1, 2)


@all_schedules
@pytest.mark.parametrize("micro_batches", [1, 3])
@recomputing((), ("trunk.encoder.layer.*",), ("trunk.encoder",), ("trunk",))
def test_pooled_output_and_hidden_states_train_as_the_joint_loss(
    schedule: str, micro_batches: int, recompute: Sequence[str]
) -> None:
    torch.manual_seed(0)
    settings = {"output_hidden_states": True, "output_attentions": True, "attn_implementation": "eager"}
    trunk = transformers.BertModel(bert_config(**settings))
    model = on_trunk(trunk, sentiment=OnPooled(), tags=OnLayer(weight=0.3))
    window = split_batch(transformers.BatchEncoding(batch_of(7)), micro_batches)

    def forward(model: MultiTaskModel, batch: Batch) -> Sums:
        output = model.trunk(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        sums = {}
        if (batch["sentiment"] != -100).any():
            logits = model.task("sentiment").head(output.pooler_output)
            sums["sentiment"] = class_sums(logits, batch["sentiment"])
        logits = model.task("tags").head(output.hidden_states[1]).flatten(0, 1)
        return {**sums, "tags": class_sums(logits, batch["tags"].flatten())}

    seed_everything(5)
    reference = joint(model, window, forward)
    seed_everything(5)
    Engine(model, schedule=schedule, recompute=recompute).accumulate(window)

    assert_close_gradients(model, reference, 1e-12)


class Words(Classification):
    """The words themselves, by BERT's own head, whose last layer is the trunk's table of words."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__(VOCABULARY, head=head, target="words", weight=0.2)

    def forward(self, features: Any, batch: Any) -> Tensor:
        return self.head(features.last_hidden_state).transpose(1, 2)


@all_schedules
@pytest.mark.parametrize("micro_batches", [1, 3])
@recomputing((), ("trunk.embeddings", "trunk.encoder.layer.*", "words"))
def test_a_word_table_tied_between_trunk_and_head_gets_the_gradients_of_both(
    schedule: str, micro_batches: int, recompute: Sequence[str]
) -> None:
    torch.manual_seed(0)
    pretraining = transformers.BertForMaskedLM(bert_config(tie_word_embeddings=True))
    model = on_trunk(pretraining.bert, words=Words(pretraining.cls), tags=Tags())
    tied = model.trunk.embeddings.word_embeddings.weight
    assert any(parameter is tied for parameter in model.task("words").parameters())
    batch = batch_of(7)
    batch["words"] = torch.where(batch["tags"] == 0, batch["input_ids"], -100)
    window = split_batch(batch, micro_batches)

    def forward(model: MultiTaskModel, batch: Batch) -> Sums:
        hidden = model.trunk(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])[0]
        return {
            name: class_sums(model.task(name).head(hidden).flatten(0, 1), batch[name].flatten())
            for name in ("words", "tags")
        }

    seed_everything(5)
    reference = joint(model, window, forward, {"words": 0.2, "tags": 1.0})
    seed_everything(5)
    Engine(model, schedule=schedule, recompute=recompute).accumulate(window)

    assert_close_gradients(model, reference, 1e-12)


@all_schedules
@pytest.mark.parametrize("micro_batches", [1, 3])
@recomputing((), ("trunk.h.*",), ("trunk",))
def test_gpt2_without_its_cache_trains_as_the_joint_loss(
    schedule: str, micro_batches: int, recompute: Sequence[str]
) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=HIDDEN,
        n_layer=2,
        n_head=4,
        n_positions=32,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model, window = on_trunk(transformers.GPT2Model(config)), split_batch(batch_of(7), micro_batches)

    seed_everything(5)
    reference = joint(model, window)
    seed_everything(5)
    Engine(model, schedule=schedule, recompute=recompute).accumulate(window)

    assert_close_gradients(model, reference, 1e-12)
