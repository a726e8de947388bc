"""Two small inputs, a rank that has both, and what serves rows to their statistics."""

import torch
from torch import nn

from quads_common.compensation import CompensationOptions, Site
from quads_common.compensation.controller import Compensator
from quads_common.compensation.layers import Runtime
from quads_common.compensation.observe import observe
from quads_common.compensation.sampling import sampled_rows
from quads_common.compensation.state import SiteState
from quads_common.options import QuadsOptions
from quads_common.weight_tiles import TileLayout
from quads_common.weight_units import WeightUnits
from tests.common.samples import normal

K, N, EXPERTS = 128, 32, 3
W13 = Site("layers.0.w13", "w13", K, K)
W2 = Site("layers.0.w2", "w2", K, K, 0, tuple(range(EXPERTS)), EXPERTS)


def options(**changes) -> CompensationOptions:
    defaults = {"rac_ratio": 0.5, "splice_count_w13": 16, "splice_count_w2": 16}
    return CompensationOptions(**{**defaults, "min_tokens": 8, "sampling_rate": 1.0, **changes})


def feed(state: SiteState, x, chosen: CompensationOptions, expert: int | None = None) -> None:
    served = state.selection.compensation(chosen, state.site.kind)
    offered = state.statistics.offered
    rows = sampled_rows(int(offered), len(x), chosen.sampling_period, len(x))
    observe(state.statistics, x[rows], served, torch.full((len(rows),), expert or 0))
    offered.add_(len(x))


def rows_with(hot: list[int], rows: int, seed: int) -> torch.Tensor:
    x = normal(rows, K, seed=seed, dtype=torch.float32)
    x[:, hot] *= 25
    return x.to(torch.bfloat16)


PLANTED = sorted([0, 1, 17, 31, 32, 40, 41, 63, 64, 77, 90, 100, 111, 112, 126, 127])
# Of both inputs: lists without a channel, and with the planted ones.
NONE = [[[-1] * 16], [[-1] * 16] * EXPERTS]
ALL_PLANTED = [[PLANTED], [PLANTED] * EXPERTS]


def bf16(**changes):
    return options(rac_ratio=0.0, splice_weight="bf16", **changes)


def channels(compensator) -> list[list[list[int]]]:
    """The lists in force; what follows from them must be in force with them."""
    found = [state.selection.channels.tolist() for state in compensator.states]
    for state, lists in zip(compensator.states, found, strict=True):
        bits = [[0] * state.site.blocks for _ in lists]
        for group, hot in enumerate(lists):
            for channel in hot:
                if channel >= 0:
                    bits[group][channel // 16] |= 1 << channel % 16
        assert state.selection.hot_bits.tolist() == bits, state.site.name
    return found


def stored(rows: int = N, width: int = K, count: int = EXPERTS) -> WeightUnits:
    return WeightUnits(
        "w",
        ("a", "b"),
        torch.zeros(count, rows, width // 2, dtype=torch.uint8),
        torch.zeros(count, rows, width // 16, dtype=torch.uint8).view(torch.float8_e4m3fn),
        torch.ones(count),
        lambda unit: [],
    )


def loaded(log, chosen, layout: TileLayout | None = None, **more) -> Compensator:
    """A rank with two sites whose first load is over. layout: of both weights."""
    compensator = Compensator(chosen, tp_size=1, log=log, **more)
    for site in (W13, W2):
        state = compensator.add(site, torch.device("cpu"))
        compensator.add_columns(state, EXPERTS, N, layout)
    compensator.weights_arrive()
    compensator.end_sync()
    compensator.loaded()
    return compensator


def serve(compensator, chosen, seed=1) -> None:
    """Enough rows for w13 and for every expert, with planted channels."""
    first, second = compensator.states
    feed(first, rows_with(PLANTED, 64, seed), chosen)
    for expert in range(EXPERTS):
        feed(second, rows_with(PLANTED, 64, seed + expert), chosen, expert)


def runtime_of(options: QuadsOptions) -> Runtime:
    """Of a rank whose engine compensates with these options."""
    chosen = options.compensation
    compensator = Compensator(chosen, tp_size=1, log=None)
    return Runtime(compensator, chosen, period=1, max_tokens=8)


def check_columns_of_layer(layer: nn.Module, tiled: bool) -> None:
    """Load the second of two experts, I = 128 and H = 256, and compare its columns and theirs."""
    gate, up, down = (torch.randn(s).bfloat16() for s in ((128, 256), (128, 256), (256, 128)))
    channels = [layer.quads_w13_selection_channels, layer.quads_w2_selection_channels]
    for lists in channels:
        lists.copy_(torch.randperm(128)[: lists.shape[1]])
    for shard, tensor in (("w1", gate), ("w2", down), ("w3", up)):
        param = layer.w2_weight if shard == "w2" else layer.w13_weight
        param.weight_loader(param, tensor, f"experts.1.{shard}", shard, 1)
    wanted = [
        weight[:, lists[-1].long()]
        for weight, lists in zip((torch.cat((gate, up)), down), channels, strict=True)
    ]
    if tiled:
        layouts = TileLayout(gate_up=True), TileLayout(gate_up=False)
        wanted = [a.tile_columns(w) for a, w in zip(layouts, wanted, strict=True)]
    for stored, want in zip((layer.quads_w13_columns, layer.quads_w2_columns), wanted, strict=True):
        assert torch.equal(stored[1], want)
        assert not stored[0].any()
