"""Keeping rows inside a CUDA graph: padding, places, refreshes without a new capture."""

import pytest
import torch

from quads_common.compensation import CompensationOptions, Site, Staging, new_site_state, refresh
from quads_common.compensation.staging import StagedInput, count_staged, new_staging, stage
from tests.common.samples import normal

pytestmark = pytest.mark.gpu

HIDDEN, INNER, EXPERTS, TOP_K, ROWS, PLACES = 256, 96, 8, 2, 8, 6
OPTIONS = CompensationOptions.from_preset(
    "quads_splice", {"min_tokens": 16, "splice_count_w13": 16}
)
SITES = (
    Site("w13", "w13", HIDDEN, HIDDEN),
    Site("w2", "w2", INNER, INNER, 0, tuple(range(EXPERTS)), EXPERTS),
)


class Layer:
    """Both inputs of a MoE layer, their states and the rows that wait."""

    def __init__(self, device: str = "cpu") -> None:
        self.states = [new_site_state(site, OPTIONS, device) for site in SITES]
        self.sample_map = torch.full((ROWS,), -1, dtype=torch.int32, device=device)
        self.inputs = [
            StagedInput(
                state.statistics,
                state.selection.compensation(OPTIONS, state.site.kind),
                *new_staging(PLACES, k, state.site.width, torch.bfloat16, device),
            )
            for state, k in zip(self.states, (1, TOP_K), strict=True)
        ]

    def stage(self, x, inner, ids) -> None:
        for staged, rows, experts in zip(self.inputs, (x, inner), (None, ids), strict=True):
            stage(Staging(self.sample_map, staged.rows, staged.groups), rows, experts)

    def count(self, offered: int, triton: bool) -> None:
        if triton:
            from quads_common.kernels.statistics import count_staged_triton

            count_staged_triton(self.inputs, offered)
        else:
            count_staged(self.inputs, offered)


def batch(step: int, real: int):
    """Rows of which the last are padding, poisoned; and the map of a forward."""
    x, inner = normal(ROWS, HIDDEN, seed=step), normal(ROWS, TOP_K, INNER, seed=99 + step)
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, EXPERTS, (ROWS, TOP_K), generator=generator)
    x[real:], inner[real:] = 1e4, 1e4
    sample_map = torch.full((ROWS,), -1, dtype=torch.int32)
    chosen = range(step % 2, real, 2)
    sample_map[list(chosen)] = torch.arange(len(chosen), dtype=torch.int32)
    return (x, inner, ids), sample_map


class Captured:
    """A graph of ``Layer.stage`` with static inputs."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.inputs = [t.cuda() for t in batch(0, ROWS)[0]]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            layer.stage(*self.inputs)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            layer.stage(*self.inputs)

    def replay(self, inputs, sample_map=None) -> None:
        for static, new in zip(self.inputs, inputs, strict=True):
            static.copy_(new)
        if sample_map is not None:
            self.layer.sample_map.copy_(sample_map)
        self.graph.replay()
        self.layer.sample_map.fill_(-1)


@pytest.mark.parametrize("triton", [False, True], ids=["torch", "triton"])
def test_a_graph_gathers_what_eager_code_on_the_cpu_gathers(triton):
    eager, layer = Layer(), Layer("cuda")
    captured = Captured(layer)
    captured.replay(batch(1, ROWS)[0])
    assert all(bool((s.groups == -1).all()) for s in layer.inputs), "warm-up kept rows"
    for step in range(60):
        real = 1 + step % ROWS
        inputs, sample_map = batch(step, real)
        captured.replay(inputs, sample_map)
        eager.sample_map.copy_(sample_map)
        eager.stage(*inputs)
        layer.count(real, triton)
        eager.count(real, False)
        if step % 20 == 19:
            compare(layer.states, eager.states)
            refresh(layer.states, OPTIONS)
            refresh(eager.states, OPTIONS)
            compare(layer.states, eager.states)
    assert layer.states[0].selection.channels.ge(0).all()
    offered = layer.states[0].statistics.offered.item()
    assert offered == sum(1 + step % ROWS for step in range(60))


def compare(states, eager) -> None:
    for got, want in zip(states, eager, strict=True):
        for name, tensor in want.buffers().items():
            torch.testing.assert_close(
                got.buffers()[name].cpu(), tensor, rtol=1e-9, atol=1e-12, msg=f"{name}"
            )


@pytest.mark.parametrize("triton", [False, True], ids=["torch", "triton"])
def test_replays_are_deterministic(triton):
    runs = []
    for _ in range(2):
        layer = Layer("cuda")
        captured = Captured(layer)
        for step in range(40):
            captured.replay(*batch(step, 5))
            layer.count(5, triton)
        runs.append([t.cpu() for state in layer.states for t in state.buffers().values()])
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)
