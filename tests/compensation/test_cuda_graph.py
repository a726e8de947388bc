"""Gathering inside a CUDA graph: padding, the switch, refreshes without a new capture."""

import pytest
import torch

from quads_common.compensation import CompensationOptions, Site, new_site_state, refresh
from quads_common.compensation.observe import observe
from tests.common.samples import normal

pytestmark = pytest.mark.gpu

HIDDEN, INNER, EXPERTS, TOP_K, ROWS = 256, 96, 8, 2, 8
OPTIONS = CompensationOptions.from_preset(
    "quads_splice", {"min_tokens": 16, "sampling_rate": 0.5, "splice_count_w13": 16}
)
SITES = (
    Site("w13", "w13", HIDDEN, HIDDEN),
    Site("w2", "w2", INNER, INNER, 0, tuple(range(EXPERTS)), EXPERTS),
)


def observe_all(states, x, inner, ids, mask) -> None:
    for state, rows, experts in zip(states, (x, inner), (None, ids), strict=True):
        lists = state.selection.compensation(OPTIONS, state.site.kind)
        period = OPTIONS.sampling_period
        observe(state.statistics, rows, lists, period, row_mask=mask, expert_ids=experts)


def batch(step: int, real: int):
    """Rows of which the last are padding, poisoned."""
    x, inner = normal(ROWS, HIDDEN, seed=step), normal(ROWS, TOP_K, INNER, seed=99 + step)
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, EXPERTS, (ROWS, TOP_K), generator=generator)
    mask = torch.arange(ROWS) < real
    x[real:], inner[real:] = 1e4, 1e4
    return x, inner, ids, mask


class Captured:
    """A graph of ``observe_all`` with static inputs."""

    def __init__(self, states) -> None:
        self.inputs = [t.cuda() for t in batch(0, ROWS)]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            observe_all(states, *self.inputs)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            observe_all(states, *self.inputs)

    def replay(self, inputs) -> None:
        for static, new in zip(self.inputs, inputs, strict=True):
            static.copy_(new)
        self.graph.replay()


def test_a_graph_gathers_what_eager_code_on_the_cpu_gathers():
    eager = [new_site_state(site, OPTIONS) for site in SITES]
    states = [new_site_state(site, OPTIONS, "cuda") for site in SITES]
    captured = Captured(states)
    captured.replay(batch(1, ROWS))
    assert all(s.statistics.offered.item() == 0 for s in states), "warm-up counted"
    for state in (*eager, *states):
        state.statistics.enabled.fill_(True)
    for step in range(60):
        inputs = batch(step, 1 + step % ROWS)
        captured.replay(inputs)
        observe_all(eager, *inputs)
        if step % 20 == 19:
            compare(states, eager)
            refresh(states, OPTIONS)
            refresh(eager, OPTIONS)
            compare(states, eager)
    assert states[0].selection.channels.ge(0).all()
    assert states[0].statistics.offered.item() == sum(1 + step % ROWS for step in range(60))


def compare(states, eager) -> None:
    for got, want in zip(states, eager, strict=True):
        for name, tensor in want.buffers().items():
            torch.testing.assert_close(
                got.buffers()[name].cpu(), tensor, rtol=1e-9, atol=1e-12, msg=f"{name}"
            )


def test_replays_are_deterministic():
    runs = []
    for _ in range(2):
        states = [new_site_state(site, OPTIONS, "cuda") for site in SITES]
        captured = Captured(states)
        for state in states:
            state.statistics.enabled.fill_(True)
        for step in range(40):
            captured.replay(batch(step, 5))
        runs.append([t.cpu() for state in states for t in state.buffers().values()])
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)
