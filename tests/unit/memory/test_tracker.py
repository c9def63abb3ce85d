"""LiveBytes and measure_peak against sizes known to the byte."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from mtaccum.memory import LiveBytes, PeakReport, measure_peak
from mtaccum.memory.ledger import Ledger

N = 256
B = N * 4  # bytes of a float32 tensor of N elements, the unit of most counts below


def test_tensors_of_known_size_count_to_the_byte_g9():
    with LiveBytes() as live:
        assert (live.current_bytes, live.peak_bytes) == (0, 0)
        floats = torch.zeros(3, 5)
        assert live.current_bytes == 60
        longs = torch.arange(7)
        assert live.current_bytes == 60 + 56
        doubles = floats.double()
        assert live.current_bytes == 60 + 56 + 120
        del floats
        assert live.current_bytes == 56 + 120
        literal = torch.tensor([1, 2, 3], dtype=torch.int16)
        assert live.current_bytes == 56 + 120 + 6
        assert live.peak_bytes == 60 + 56 + 120
        live.reset_peak()
        assert live.peak_bytes == 56 + 120 + 6
        del longs, doubles, literal
        assert live.current_bytes == 0
    assert (live.current_bytes, live.peak_bytes) == (0, 182)


def test_freed_addresses_that_are_used_again_count_anew():
    addresses = set()
    with LiveBytes() as live:
        for size in range(1, 201):
            tensor = torch.empty(size, dtype=torch.uint8)
            addresses.add(tensor.untyped_storage()._cdata)
            assert live.current_bytes == size
            del tensor
            assert live.current_bytes == 0
    assert len(addresses) < 200, "no address was used again: the test shows nothing"


def test_views_and_in_place_ops_add_nothing_and_a_view_keeps_its_base():
    with LiveBytes() as live:
        base = torch.ones(N)
        view = base.view(16, 16)[3:5].t()
        base.mul_(2).add_(1)
        torch.add(base, base, out=base)
        assert live.current_bytes == live.peak_bytes == B
        del base
        gc.collect()
        assert live.current_bytes == B
        del view
        assert live.current_bytes == 0


def test_out_argument_and_resize_are_followed():
    with LiveBytes() as live:
        a = torch.ones(N)
        out = torch.empty(0)
        torch.add(a, a, out=out)
        assert live.current_bytes == 2 * B
        out.resize_(3 * N)
        assert live.current_bytes == 4 * B
        del out
        assert live.current_bytes == B


def test_foreign_tensors_stay_uncounted_through_views_and_in_place_ops():
    foreign = torch.ones(N)
    with LiveBytes() as live:
        foreign.add_(1)
        view = foreign[: N // 2]
        assert live.peak_bytes == 0
        made = view + 1
        assert live.current_bytes == B // 2
        del made, view, foreign
        assert live.current_bytes == 0


def test_existing_counts_once_and_its_deaths_are_seen():
    model = nn.BatchNorm1d(4)  # parameters 2 * 16, buffers 2 * 16 + 8 bytes
    model(torch.randn(3, 4)).sum().backward()  # gradients 2 * 16
    tensor = torch.ones(N)
    with LiveBytes(existing=[model, tensor, tensor[1:], model.weight]) as live:
        assert live.current_bytes == live.peak_bytes == 104 + B
        tensor.add_(1)
        assert live.current_bytes == live.peak_bytes == 104 + B
        del tensor
        assert live.current_bytes == 104
        model.zero_grad(set_to_none=True)
        assert live.current_bytes == 72


def test_tensor_kept_only_by_the_graph_counts_until_the_graph_frees_it():
    x = torch.randn(N, requires_grad=True)
    with LiveBytes(existing=[x]) as live:
        loss = x.exp().sum()  # exp keeps its result for backward
        gc.collect()
        assert live.current_bytes == B + B + 4
        loss.backward()
        assert live.current_bytes == B + B + 4, "result freed, gradient of x made"
        x.grad = None
        assert live.current_bytes == B + 4
        loss = x.exp().sum()
        assert live.current_bytes == B + B + 4
        del loss
        assert live.current_bytes == B, "a graph without backward frees it too"


class _Scale(torch.autograd.Function):
    """Saves a tensor of its own; makes another in backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x * 2)
        return x.sum()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


def test_custom_autograd_function_is_followed_into_its_backward():
    x = torch.randn(N, requires_grad=True)
    x.grad = torch.zeros(N)
    with LiveBytes(existing=[x, x.grad], timeline=True) as live:
        loss = _Scale.apply(x)
        assert live.current_bytes == 3 * B + 4
        live.reset_peak()
        loss.backward()
        assert live.current_bytes == 2 * B + 4
        # Over the forward pass: the gradient of the loss (4 bytes), that of x.
        assert live.peak_bytes == 4 * B + 8
        assert ("aten.mul.Tensor", 4 * B + 8) in [moment[:2] for moment in live.timeline]


@pytest.mark.parametrize("layers", [2, 5])
def test_chain_has_the_peak_derived_by_hand_and_backward_frees_layer_by_layer(layers):
    x, seed = torch.randn(N, requires_grad=True), torch.ones(N)
    with LiveBytes(existing=[x, seed], timeline=True) as live:
        out = x
        for _ in range(layers):
            out = out.exp()
        assert live.current_bytes == live.peak_bytes == (2 + layers) * B
        out.backward(seed)
        # At the second layer from the top: x, seed, all results (the last is ``out``), and the
        # gradients that come in and go out. Below that, each layer frees its own result.
        assert live.peak_bytes == (4 + layers) * B
        assert live.current_bytes == 4 * B, "x, seed, out, gradient of x"
    in_backward = [n // B for name, n, *_ in live.timeline if name == "aten.mul.Tensor"]
    assert in_backward == [3 + layers, *range(4 + layers, 5, -1)]


def test_timeline_names_ops_and_is_refused_unless_asked_for():
    with LiveBytes(timeline=True) as live:
        a = torch.ones(N)
        a.add_(1)
        b = a * a
        del a
        b.neg_()
    names = ["aten.ones.default", "aten.add_.Tensor", "aten.mul.Tensor", "aten.neg_.default"]
    assert [moment[:2] for moment in live.timeline] == list(zip(names, [B, B, 2 * B, B], strict=True))
    with pytest.raises(RuntimeError, match="timeline=True"):
        _ = LiveBytes().timeline


def test_exception_leaves_no_mode_active_and_freezes_the_numbers():
    live = LiveBytes()
    with pytest.raises(RuntimeError, match="size"), live:
        torch.ones(2) @ torch.ones(3)  # both held by the traceback as the block ends
    assert _get_current_dispatch_mode_stack() == []
    torch.ones(N)
    gc.collect()
    assert live.current_bytes == live.peak_bytes == 20


def test_nested_trackers_each_count_their_own_block():
    with LiveBytes() as outer:
        a = torch.ones(N)
        with LiveBytes() as inner:
            b = a + 1
            a.mul_(2)
            assert (outer.current_bytes, inner.current_bytes) == (2 * B, B)
        del b
        assert (outer.current_bytes, inner.current_bytes) == (B, B)


def test_second_entry_is_refused_within_and_after():
    live = LiveBytes()
    with live:
        with pytest.raises(RuntimeError, match="once"), live:
            pass
        assert torch.ones(N).nbytes == live.peak_bytes, "still at work"
    with pytest.raises(RuntimeError, match="once"), live:
        pass
    assert _get_current_dispatch_mode_stack() == []


def test_storages_and_trackers_do_not_keep_each_other_alive():
    def ledgers() -> int:
        return sum(type(other) is Ledger for other in gc.get_objects())

    existing, before = torch.ones(N), ledgers()
    with LiveBytes(existing=[existing], timeline=True) as tracker:
        made, dead = existing + 1, existing + 2
        storage = weakref.ref(dead.untyped_storage())
        del dead
        assert storage() is None
    unused = LiveBytes(existing=[existing])  # never entered, so never closed
    refs = [weakref.ref(o) for o in (tracker, unused)]
    assert ledgers() == before + 2
    del tracker, unused  # no cycle either, so no collection is needed
    assert [ref() for ref in refs] == [None] * 2
    assert ledgers() == before
    del existing, made  # must not call into what is gone


def test_sparse_gradients_count_indices_and_values():
    table, rows = nn.Embedding(10, 4, sparse=True), torch.tensor([1, 2, 3])
    with LiveBytes(existing=[table]) as live:
        table(rows).sum().backward()
        assert live.current_bytes == 160 + 3 * 8 + 3 * 16
    assert LiveBytes(existing=[table.weight.grad]).current_bytes == 3 * 8 + 3 * 16


def test_measure_peak_includes_the_start_and_tells_the_method_g9():
    existing = torch.ones(N)
    report = measure_peak(lambda: (existing * 2).neg(), existing=[existing])
    assert report == PeakReport(3 * B, B, "live tensor bytes")
    assert report.activation_bytes == 2 * B


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(TypeError, match="dict"):
        LiveBytes(existing=[{}])
    with pytest.raises(NotImplementedError, match="sparse_csr"):
        measure_peak(lambda: torch.eye(3).to_sparse_csr())
    with pytest.raises(ValueError, match="meta"):
        measure_peak(lambda: None, device="meta")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_measure_peak_on_cuda_reads_the_allocator():
    existing = torch.ones(1 << 20, device="cuda")
    report = measure_peak(lambda: (existing * 2).neg(), device="cuda")
    assert (report.method, report.activation_bytes) == ("CUDA allocator peak", 2 << 22)
