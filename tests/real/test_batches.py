"""Batches of other libraries: split by sample, trained on in micro-batches, moved and counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mtaccum import BatchError, Engine, MultiTaskModel, Regression, Task, path, split_batch
from mtaccum.batch import batch_size_of, get_field, own_view, to_device


def gradients(model: MultiTaskModel, window: list[Any]) -> dict[str, Tensor]:
    model.zero_grad()
    Engine(model).accumulate(window)
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}  # type: ignore


def assert_same_in_micro_batches(model: MultiTaskModel, batch: Any, samples: int) -> None:
    assert batch_size_of(batch) == samples
    whole = gradients(model, [batch])
    for micro_batches in (2, samples):
        for name, gradient in gradients(model, split_batch(batch, micro_batches)).items():
            torch.testing.assert_close(gradient, whole[name], rtol=1e-12, atol=1e-12)


# --- PyTorch Geometric ------------------------------------------------------------------------------------


class OnGraphs(nn.Module):
    """The mean over the nodes of each graph of a layer and one round of messages: (graphs, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, batch: Any) -> Tensor:
        import torch_geometric

        source, target = batch.edge_index
        x = self.layer(batch.x)
        x = x.index_add(0, target, x[source].tanh())
        pooled: Tensor = torch_geometric.nn.global_mean_pool(x, batch.batch, batch.num_graphs)
        return pooled


def graphs(number: int) -> list[Any]:
    data = pytest.importorskip("torch_geometric.data", reason="needs the extra batches")
    random = torch.Generator().manual_seed(0)
    made = []
    for index in range(number):
        nodes = 2 + index % 3
        edges = torch.randint(nodes, (2, 2 * nodes), generator=random)
        x = torch.rand(nodes, 3, generator=random, dtype=torch.float64)
        y = torch.rand(1, 1, generator=random, dtype=torch.float64)
        made.append(data.Data(x=x, edge_index=edges, y=y))
    return made


@pytest.mark.parametrize("nested", [False, True])
def test_a_batch_of_graphs_is_split_by_graph_t1(nested: bool) -> None:
    listed = graphs(7)
    from torch_geometric.data import Batch

    batch: Any = Batch.from_data_list(listed)
    task = Regression(1, head=nn.Linear(4, 1), target="y", criterion="mse")
    inputs: Any = (lambda given: given["graphs"]) if nested else (lambda given: given)
    model = MultiTaskModel(OnGraphs(), {"y": task}, inputs=inputs).double()
    given = {"graphs": batch, "y": batch.y} if nested else batch
    assert_same_in_micro_batches(model, given, 7)
    parts = [part["graphs"] if nested else part for part in split_batch(given, 3)]
    assert [part.num_graphs for part in parts] == [3, 2, 2]
    again = [graph for part in parts for graph in part.to_data_list()]
    assert all(torch.equal(one.x, other.x) for one, other in zip(again, listed, strict=True))
    assert all(
        torch.equal(one.edge_index, other.edge_index) for one, other in zip(again, listed, strict=True)
    )


def test_a_list_of_graphs_is_one_per_sample_and_a_single_graph_is_refused_t1() -> None:
    listed = graphs(4)
    assert [len(part) for part in split_batch(listed, 2)] == [2, 2]
    with pytest.raises(
        BatchError, match=r"torch_geometric\.data\.data\.Data holds tensors.*register_split\(Data"
    ):
        split_batch({"x": torch.rand(4, 2), "graph": listed[0]}, 2)


def test_a_batch_of_graphs_moves_and_lends_copies_t4_t6() -> None:
    listed = graphs(3)
    from torch_geometric.data import Batch

    batch: Any = Batch.from_data_list(listed)
    moved: Any = to_device(batch, torch.device("meta"))
    assert (moved.x.device.type, batch.x.device.type) == ("meta", "cpu")
    view = own_view(batch)
    del view.y
    view.x = None
    assert batch.y is not None
    assert batch.x is not None


# --- TensorDict -------------------------------------------------------------------------------------------


def test_a_tensordict_is_split_along_its_batch_dimension_t1() -> None:
    tensordict = pytest.importorskip("tensordict", reason="needs the extra batches")
    held = {
        "x": torch.rand(6, 3, dtype=torch.float64),
        "labels": {"y": torch.rand(6, 1, dtype=torch.float64)},
    }
    batch = tensordict.TensorDict(held, batch_size=[6])
    task = Regression(1, head=nn.Linear(3, 1), target=path("labels", "y"), criterion="mse")
    model = MultiTaskModel(nn.Linear(3, 3), {"y": task}, inputs="x").double()
    assert_same_in_micro_batches(model, batch, 6)
    parts = split_batch({"held": batch, "id": list("abcdef")}, 4)
    assert [part["held"].batch_size[0] for part in parts] == [2, 2, 1, 1]
    assert torch.equal(torch.cat([part["held"]["x"] for part in parts]), batch["x"])
    view = own_view(batch)
    view.pop("x")
    assert "x" in batch.keys()  # noqa: SIM118 (a TensorDict's length is that of its batch)
    assert to_device(batch, torch.device("meta"))["x"].device.type == "meta"


def test_a_tensordict_without_a_batch_dimension_belongs_to_all_t1() -> None:
    tensordict = pytest.importorskip("tensordict", reason="needs the extra batches")
    shared = tensordict.TensorDict({"anchor": torch.rand(3, 4)}, batch_size=[])
    assert all(part["shared"] is shared for part in split_batch({"x": torch.rand(4, 2), "shared": shared}, 2))


# --- pandas -----------------------------------------------------------------------------------------------


def test_pandas_is_split_by_row_t1() -> None:
    pandas = pytest.importorskip("pandas", reason="needs the extra batches")
    frame = pandas.DataFrame({"age": [1.0, 2.0, 3.0, 4.0, 5.0], "name": list("abcde")}, index=[9, 8, 7, 6, 5])
    batch = {"x": torch.rand(5, 2), "table": frame, "age": frame["age"], "index": frame.index}
    parts = split_batch(batch, 2)
    assert [list(part["table"]["name"]) for part in parts] == [list("abc"), list("de")]
    assert [list(part["age"]) for part in parts] == [[1.0, 2.0, 3.0], [4.0, 5.0]]
    assert [list(part["index"]) for part in parts] == [[9, 8, 7], [6, 5]]
    assert batch_size_of(frame) == 5
    with pytest.raises(BatchError, match="can't be split with a batch of 4 samples: it holds 5"):
        split_batch({"x": torch.rand(4, 2), "y": torch.rand(4), "table": frame}, 2)

    class FromTable(Task):
        def loss(self, prediction: Tensor, batch: Any) -> Tensor:
            ages = torch.tensor(get_field(batch, "age").to_numpy(), dtype=torch.float64)
            return (prediction.squeeze(1) - ages).square().mean()

    model = MultiTaskModel(nn.Linear(2, 2), {"age": FromTable(nn.Linear(2, 1), "age")}, inputs="x").double()
    assert_same_in_micro_batches(model, {**batch, "x": batch["x"].double()}, 5)


# --- Hugging Face -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensors", [None, "pt"])
def test_an_encoding_is_split_with_its_tokens_t1(tensors: str | None) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra text")
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra text")
    words = {"[PAD]": 0, "[UNK]": 1, "a": 2, "red": 3, "car": 4, "is": 5, "here": 6}
    model = tokenizers.models.WordLevel(words, unk_token="[UNK]")
    raw = tokenizers.Tokenizer(model)
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]")
    texts = ["a red car", "is", "a car is here", "red red", "here"]
    batch = fast(texts, padding=True, return_tensors=tensors)
    parts = split_batch({"text": batch, "y": torch.arange(5)}, 2)
    assert [batch_size_of(part) for part in parts] == [3, 2]
    joined = [row for part in parts for row in torch.as_tensor(part["text"]["input_ids"]).tolist()]
    assert joined == torch.as_tensor(batch["input_ids"]).tolist()
    assert type(parts[0]["text"]) is type(batch)
    assert parts[1]["text"].tokens(0) == batch.tokens(3)
    assert batch_size_of(batch) == 5


def test_a_model_output_is_a_nest_of_fields_t1() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs", reason="needs the extra text")
    made = outputs.BaseModelOutput(
        last_hidden_state=torch.rand(4, 3, 2), hidden_states=(torch.rand(4, 2),) * 2
    )
    parts = split_batch({"x": torch.rand(4, 1), "output": made}, 2)
    assert torch.equal(
        torch.cat([part["output"].last_hidden_state for part in parts]), made.last_hidden_state
    )
    assert [len(part["output"].hidden_states) for part in parts] == [2, 2]
    assert type(parts[0]["output"]) is type(made)
