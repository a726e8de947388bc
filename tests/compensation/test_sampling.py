"""Which rows are sampled, and ``Runtime``: their places, and when they are counted."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from quads_common.compensation import CompensationOptions
from quads_common.compensation.controller import Compensator
from quads_common.compensation.layers import MOST_PLACES, LayerInput, Runtime
from quads_common.compensation.observe import observe
from quads_common.compensation.sampling import most_samples, sampled_rows
from quads_common.compensation.site import Site
from quads_common.compensation.staging import Staging, stage
from quads_common.compensation.statistics import new_statistics
from tests.common.bits import assert_same_bits
from tests.common.samples import normal

K = 64
CPU = torch.device("cpu")


def ordinals(sizes: list[int], period: int) -> list[int]:
    """Of all tokens, those that are sampled when they come in forwards of these sizes."""
    found, seen = [], 0
    for size in sizes:
        most = most_samples(size, period)
        rows = sampled_rows(seen, size, period, most)
        assert rows == sorted(rows) and len(rows) <= most
        found += [seen + row for row in rows]
        seen += size
    return found


@pytest.mark.parametrize("period", [1, 2, 7, 64, 1000])
def test_one_row_of_each_window(period):
    found = ordinals([period * 20], period)
    assert [ordinal // period for ordinal in found] == list(range(20))


@pytest.mark.parametrize("period", [1, 3, 64])
def test_sampling_does_not_depend_on_the_batches(period):
    generator = np.random.default_rng(0)
    whole = ordinals([4000], period)
    sizes = []
    while sum(sizes) < 4000:
        sizes.append(int(min(generator.integers(0, 300), 4000 - sum(sizes))))
    assert ordinals(sizes, period) == whole
    assert ordinals([1] * 300, period) == [o for o in whole if o < 300]


@pytest.mark.parametrize("batch", [8, 32, 61, 64, 128])
def test_every_place_in_the_batch_is_sampled(batch):
    """Decoding with a fixed batch: no sequence is favoured by its place."""
    found = ordinals([batch] * (64 * 1024 // batch), 64)
    hits = np.bincount(np.array(found) % batch, minlength=batch)
    expected = len(found) / batch
    assert abs(hits - expected).max() < 6 * expected**0.5, hits


@pytest.mark.parametrize("period", [1, 16])
def test_of_more_windows_an_even_subset(period):
    found = sampled_rows(5, 8192, period, 256)
    assert 255 <= len(found) <= 256
    gaps = np.diff([(5 + row) // period for row in found])
    windows = -(-8192 // period)
    assert set(gaps.tolist()) <= {windows // 256, windows // 256 + 1}


# Runtime ----------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A compensated linear's input, in a runtime of its own."""

    def __init__(self, period: int, max_tokens: int = 8) -> None:
        super().__init__()
        options = CompensationOptions.from_preset("quads", {"sampling_rate": 1 / max(1, period)})
        log = SimpleNamespace(info=lambda *_: None, warning=lambda *_: None)
        self.runtime = Runtime(
            Compensator(options, tp_size=1, log=log), options, period, max_tokens
        )
        self.input = LayerInput(
            self, Site("x", "linear", K, K), self.runtime, units=1, rows=16,
            dtype=torch.bfloat16, device=CPU,
        )  # fmt: skip

    @property
    def statistics(self):
        return self.input.state.statistics

    def forward(self, x: torch.Tensor) -> None:
        sample_map = self.input.sample_map(self, len(x))
        if sample_map is not None:
            stage(Staging(sample_map, *self.input.staged(self)), x)

    def serve(self, x: torch.Tensor, padded: int = 0) -> None:
        """One forward of these tokens, and rows that are none."""
        more = self.runtime.begin(len(x))
        self(torch.cat([x, torch.full((padded, K), 1e4, dtype=x.dtype)]))
        if more:
            self.runtime.end()


def test_only_sampled_tokens_are_in_the_map():
    layer = Layer(4)
    sample_map = layer.input.sample_map(layer, 8)
    address, seen, places = sample_map.data_ptr(), 0, []
    for count in (5, 3, 8, 0, 1):
        rows = sampled_rows(seen, count, 4, 8)
        assert layer.runtime.begin(count) == bool(rows)
        assert torch.where(sample_map >= 0)[0].tolist() == rows
        places += sample_map[rows].tolist()
        if rows:
            layer.runtime.end()
        assert (sample_map == -1).all(), "whatever runs now has no tokens"
        seen += count
    assert places == [0, 1, 0, 1], "three places, and two more rows found no room"
    assert (layer.runtime.offered, layer.runtime.places) == (17, 3)
    assert layer.input.sample_map(layer, 8).data_ptr() == address


@pytest.mark.parametrize("period", [1, 3])
def test_every_sampled_row_is_counted_once(period):
    """Whether it waited or not; padding and rows of other forwards never are."""
    layer, want, seen = Layer(period), new_statistics(1, K), 0
    lists = layer.input.state.selection.compensation(layer.runtime.options, "linear")
    waiting = []
    for step in range(20):
        x = normal(1 + step % 8, K, seed=step).to(torch.bfloat16)
        rows = sampled_rows(seen, len(x), period, layer.runtime.places)
        layer(normal(4, K, seed=99).to(torch.bfloat16))  # as in graph capture
        layer.serve(x, padded=step % 3)
        seen += len(x)
        if len(waiting) + len(rows) > layer.runtime.places:
            observe(want, torch.stack(waiting), lists)
            waiting.clear()
        waiting += list(x[rows])
    assert int(layer.statistics.count) == int(want.count) > 0, (
        "rows wait until they must be counted"
    )
    layer.runtime.compensator.save("unused", lambda parts: None)
    observe(want, torch.stack(waiting), lists)
    want.offered.fill_(seen)
    for name, tensor in want.buffers().items():
        assert_same_bits(getattr(layer.statistics, name), tensor, name)


@pytest.mark.parametrize("read", ["refresh_now", "forget", "save", "end_sync", "count_staged"])
def test_rows_are_counted_before_statistics_are_read(read):
    layer = Layer(1)
    compensator = layer.runtime.compensator
    compensator.loaded()
    layer.serve(normal(5, K).to(torch.bfloat16))
    assert int(layer.statistics.offered) == 0
    if read == "end_sync":
        compensator.weights_arrive()
    arguments = ("unused", lambda parts: None) if read == "save" else ()
    getattr(compensator, read)(*arguments)
    assert int(layer.statistics.offered) == 5
    assert int(layer.statistics.count) == (0 if read == "forget" else 5)
    assert not layer.input.staged(layer)[1].ge(0).any()


def test_nothing_is_kept_where_tokens_are_not_known():
    layer = Layer(0)
    assert not layer.runtime.begin(5) and layer.runtime.offered == 0
    assert layer.input.sample_map(layer, 5) is None
    assert all(t.numel() == 0 for t in layer.input.staged(layer))


def test_preparing_counts_nothing():
    layer = Layer(1)
    before = {name: t.clone() for name, t in layer.named_buffers()}
    layer.runtime.prepare()
    for name, tensor in layer.named_buffers():
        assert_same_bits(tensor, before[name], name)
    Layer(0).runtime.prepare()


def test_places_of_the_usual_forwards():
    assert Layer(64, 8192).runtime.places == 129
    assert Layer(1, 8192).runtime.places == MOST_PLACES
    assert Layer(64, 8).runtime.places == 2
