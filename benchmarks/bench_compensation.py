"""What does compensation cost an MoE layer?

    PYTHONPATH=common:. python benchmarks/bench_compensation.py

Whole layers with random selections, that of the plain layer as the base: both backends, folded and
exact forms, with and without gathering statistics. CUDA graph replay, median, several layers and
routings in turn so that weights, lists and inputs come from memory. ``--hot-input``: the input lies
in the L2 cache, as in an engine, so it hides no latency of the lists. Microseconds, and percent
over the plain layer. A result that is far from the plain layer's is not timed. The quantizers and
the statistics alone follow. ``tests/gpu/check_compensation_kernels.py`` compares results with the
torch code.
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.moe_data import Layer, Routing, make_layers, make_routings
from benchmarks.moe_shapes import SHAPES
from benchmarks.timing import cache_reader, graph_time, graph_times
from quads_common.activation import Activation
from quads_common.compensation.moe import Gathering
from quads_common.compensation.operands import InputCompensation, channel_bits, gather_columns
from quads_common.compensation.sampling import most_samples
from quads_common.compensation.staging import StagedInput, Staging, new_staging
from quads_common.compensation.statistics import new_statistics
from quads_common.kernels.compensated import (
    fused_moe_compensated_hopper,
    fused_moe_compensated_triton,
)
from quads_common.kernels.compensated_rows import compensate_rows
from quads_common.kernels.moe import DOWN, GATE_UP, fused_moe_hopper, fused_moe_triton
from quads_common.kernels.route import Routes
from quads_common.kernels.rows import quantize_rows
from quads_common.kernels.statistics import count_staged_triton

SHAPE = "qwen3-30b-a3b"
TOKENS = (1, 4, 16, 32, 64, 128, 256, 4096)
OTHER_BYTES = 64 << 20  # more than the L2 cache of an H200 holds
PERIOD = 64
PLACES = most_samples(8192, PERIOD)


@dataclass(frozen=True)
class Variant:
    """A layer to time: share of blocks, splice counts of w13 and w2, their columns, the form."""

    ratio: float | None = None
    channels: tuple[int, int] = (0, 0)
    columns: bool = False
    exact: bool = False
    observed: bool = False
    hopper: bool = False


SPLICE = (64, 32)
VARIANTS = {
    "RAC 0.5": Variant(0.5),
    "RAC 1.0": Variant(1.0),
    "splice": Variant(None, SPLICE),
    "splice+RAC": Variant(0.5, SPLICE),
    "columns": Variant(None, SPLICE, columns=True),
    "RAC .5 ex": Variant(0.5, exact=True),
    "splice ex": Variant(None, SPLICE, exact=True),
    "spl+RAC ex": Variant(0.5, SPLICE, exact=True),
    "RAC .5 obs": Variant(0.5, observed=True),
    "spl+R obs": Variant(0.5, SPLICE, observed=True),
}
HOPPER_VARIANTS = {
    "RAC 0.5": Variant(0.5, hopper=True),
    "RAC 1.0": Variant(1.0, hopper=True),
    "splice": Variant(None, SPLICE, hopper=True),
    "splice+RAC": Variant(0.5, SPLICE, hopper=True),
    "columns": Variant(None, SPLICE, columns=True, hopper=True),
    "columns+RAC": Variant(0.5, SPLICE, columns=True, hopper=True),
    "RAC .5 obs": Variant(0.5, observed=True, hopper=True),
    "spl+R obs": Variant(0.5, SPLICE, observed=True, hopper=True),
}

Call = Callable[[Layer, Routing], torch.Tensor]


def lists_of(layer: Layer, variant: Variant) -> tuple[InputCompensation, InputCompensation]:
    """Random selections of exactly the share and the counts asked for."""
    found = []
    for weight, groups, slots, layout in (
        (layer.w13_bf16, 1, variant.channels[0], GATE_UP),
        (layer.w2_bf16, layer.experts, variant.channels[1], DOWN),
    ):
        width = weight.shape[2]
        mask = channels = columns = bits = None
        if variant.ratio is not None:
            order = torch.rand((groups, width // 16), device="cuda").argsort(dim=1)
            mask = order < round(variant.ratio * width / 16)
        if slots:
            order = torch.rand((groups, width), device="cuda").argsort(dim=1)[:, :slots]
            channels = order.sort(dim=1).values.int()
            bits = channel_bits(channels, width)
        if variant.columns and channels is not None:
            own = channels.expand(layer.experts, -1)
            columns = torch.stack([gather_columns(w, c) for w, c in zip(weight, own, strict=True)])
            if variant.hopper:
                columns = layout.tile_columns(columns)
        found.append(InputCompensation(mask, channels, columns, hot_bits=bits))
    return found[0], found[1]


def call_of(variant: Variant, layers: list[Layer]) -> Call:
    """The layer with this variant's lists, which differ from layer to layer."""
    lists = {id(layer): lists_of(layer, variant) for layer in layers}
    staged = {id(layer): staged_of(layer) for layer in layers} if variant.observed else {}

    def call(layer: Layer, r: Routing) -> torch.Tensor:
        first, second = lists[id(layer)]
        gathering = None
        if variant.observed:
            sample_map = sampled(r.x.shape[0])
            gathering = Gathering(*(Staging(sample_map, *b) for b in staged[id(layer)]))
        run = fused_moe_compensated_triton
        weights = layer.w13, layer.w2
        if variant.hopper:
            run, weights = fused_moe_compensated_hopper, layer.extra["tiled"]
        return run(
            r.x, *weights, r.weights, r.ids, w13_input=first, w2_input=second,
            gathering=gathering, exact=variant.exact,
        )  # fmt: skip

    return call


@functools.cache
def sampled(tokens: int) -> torch.Tensor:
    """One of PERIOD tokens, the first at least, so more often than at decode."""
    sample_map = torch.full((tokens,), -1, dtype=torch.int32)
    rows = range(0, tokens, PERIOD)
    sample_map[list(rows)] = torch.arange(len(rows), dtype=torch.int32)
    return sample_map.cuda()


def staged_of(layer: Layer) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Buffers of both inputs, as an engine has them."""
    top_k = SHAPES[SHAPE][3]
    sizes = ((1, layer.w13.shape[2]), (top_k, layer.w2.shape[2]))
    return [new_staging(PLACES, k, width, torch.bfloat16, "cuda") for k, width in sizes]


def column_bytes(layer: Layer) -> float:
    """Bytes of an expert's BF16 columns over those of its codes and scales."""
    columns = sum(
        2 * count * w.shape[1] for count, w in zip(SPLICE, (layer.w13, layer.w2), strict=True)
    )
    stored = sum(w.packed[0].nbytes + w.block_scale[0].nbytes for w in (layer.w13, layer.w2))
    return columns / stored


def plain(layer: Layer, r: Routing) -> torch.Tensor:
    return fused_moe_triton(r.x, layer.w13, layer.w2, r.weights, r.ids)


def plain_hopper(layer: Layer, r: Routing) -> torch.Tensor:
    return fused_moe_hopper(r.x, *layer.extra["tiled"], r.weights, r.ids)


def tile(layers: list[Layer]) -> list[Layer]:
    for layer in layers:
        layer.extra["tiled"] = GATE_UP.tile(layer.w13), DOWN.tile(layer.w2)
    return layers


def warm(name: str) -> None:
    """Compile what a variant, one of ``WARM``, launches for every number of tokens."""
    layers = tile(make_layers(SHAPE, 1))
    backend, _, name = name.partition(":")
    variants, base = VARIANTS, plain
    if backend == "hopper":
        variants, base = HOPPER_VARIANTS, plain_hopper
    call = base if name == "plain" else call_of(variants[name], layers)
    for tokens in TOKENS:
        call(layers[0], make_routings(SHAPE, tokens)[0])
    if name == "plain":
        rows_table(layers)
        count_table()
    torch.cuda.synchronize()


def timing(backends: Sequence[str] = ("hopper", "triton"), hot_input: bool = False) -> bool:
    """The tables; a result that is far from the plain layer's is not timed."""
    layers = tile(make_layers(SHAPE, 3))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: us, and % over plain")
    print(f"byte floor of columns: {100 * column_bytes(layers[0]):+.1f} % of expert bytes")
    tables = {"hopper": (plain_hopper, HOPPER_VARIANTS), "triton": (plain, VARIANTS)}
    passed = [table(backend, *tables[backend], layers, hot_input) for backend in backends]
    rows_table(layers, timed=True)
    count_table(timed=True)
    return all(passed)


def table(
    backend: str, base: Call, variants: dict[str, Variant], layers: list[Layer], hot_input: bool
) -> bool:
    calls = {name: call_of(variant, layers) for name, variant in variants.items()}
    print(" ".join(f"{h:>12}" for h in [backend, "plain", "again", *calls]), flush=True)
    ok, read = True, cache_reader(OTHER_BYTES)
    for tokens in TOKENS:
        routings = make_routings(SHAPE, tokens)
        pairs = [(layer, r) for r in routings for layer in layers]
        before = (
            [functools.partial(engine_before, read, r.x) for _, r in pairs] if hot_input else []
        )
        work: dict[str, list[Callable]] = {}
        for name, call in {"plain": base, "again": base, **calls}.items():
            want, got = base(*pairs[0]).double(), call(*pairs[0]).double()
            far = float((got - want).norm() / want.norm())
            if far < 0.3:
                work[name] = [functools.partial(call, *pair) for pair in pairs]
            else:
                ok = False
                print(f"  FAIL {name}, {tokens} tokens: {far:.1e} away from plain")
        replays = 6 if tokens > 1000 else 20
        times = graph_times(work, replays, before=before)
        row = [f"{t:6.1f} {100 * (t / times['plain'] - 1):+5.1f}" for t in list(times.values())[1:]]
        print(f"{tokens:12} {times['plain']:12.1f}", *row, flush=True)
    return ok


def engine_before(read: Callable[[], object], x: torch.Tensor) -> None:
    """Leave in the L2 cache what an engine leaves there when a layer starts: its input."""
    read()
    x.mul_(1.0)


def rows_table(layers: list[Layer], timed: bool = False) -> None:
    """The quantizers alone, of both inputs."""
    hidden, inner, experts, top_k = SHAPES[SHAPE]
    names = ["RAC 0.5", "splice", "splice+RAC", "columns"]
    lists = {name: lists_of(layers[0], VARIANTS[name]) for name in names}
    if timed:
        print("quantizers, us: " + " ".join(f"{h:>10}" for h in ["plain", *names]))
    for tokens in (1, 16, 128, 4096):
        ids = torch.randint(0, experts, (tokens, top_k), device="cuda", dtype=torch.int32)
        routes = Routes(ids, None, experts)
        sets = 8
        x = torch.randn((sets, tokens, hidden), device="cuda", dtype=torch.bfloat16)
        y = torch.randn((sets, tokens * top_k, 2 * inner), device="cuda", dtype=torch.bfloat16)
        options: dict = {"activation": Activation(), "routes": routes}
        for what, source, extra, which in (("w13", x, {}, 0), ("w2", y, options, 1)):
            calls = {"plain": functools.partial(quantize_rows, **extra)}
            for name in names:
                calls[name] = functools.partial(
                    compensate_rows, compensation=lists[name][which], **extra
                )
            if not timed:
                for call in calls.values():
                    call(source[0])
                continue
            row = [
                f"{graph_time([functools.partial(call, s) for s in source]):10.2f}"
                for call in calls.values()
            ]
            print(f"{what:>4} {tokens:10} ", *row, flush=True)


def count_table(timed: bool = False) -> None:
    """Counting what waits in all places of both inputs of some layers, of which lists differ."""
    hidden, inner, experts, top_k = SHAPES[SHAPE]
    for layers, channels in ((8, (0, 0)), (48, (0, 0)), (48, SPLICE)):
        inputs, groups = [], []
        for _ in range(layers):
            for width, lists, slots, k in (
                (hidden, 1, channels[0], 1),
                (inner, experts, channels[1], top_k),
            ):
                served = InputCompensation()
                if slots:
                    order = torch.rand((lists, width), device="cuda").argsort(dim=1)
                    chosen = order[:, :slots].int()
                    served = InputCompensation(
                        channels=chosen, hot_bits=channel_bits(chosen, width)
                    )
                rows, empty = new_staging(PLACES, k, width, torch.bfloat16, "cuda")
                stats = new_statistics(lists, width, device="cuda")
                inputs.append(StagedInput(stats, served, rows.normal_(), empty))
                groups.append(torch.randint_like(empty, lists))
        times = []
        for _ in range(12 if timed else 1):
            for staged, full in zip(inputs, groups, strict=True):
                staged.groups.copy_(full)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            before = time.perf_counter()
            start.record()
            count_staged_triton(inputs, PERIOD * PLACES)
            end.record()
            host = time.perf_counter() - before
            end.synchronize()
            times.append((start.elapsed_time(end) * 1000, host * 1e6))
        if timed:
            on_gpu, on_host = (sorted(t[i] for t in times)[len(times) // 2] for i in (0, 1))
            print(
                f"count {PLACES} tokens, {layers} layers, splice {channels}: {on_gpu:.0f} us, "
                f"{on_host:.0f} us on the host; once in {PERIOD * PLACES} tokens",
                flush=True,
            )


WARM = [f"{b}:{n}" for b, names in (("hopper", HOPPER_VARIANTS), ("triton", VARIANTS))
        for n in ("plain", *names)]  # fmt: skip


if __name__ == "__main__":
    torch.manual_seed(0)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", nargs="+", default=["hopper", "triton"])
    parser.add_argument("--hot-input", action="store_true")
    args = parser.parse_args()
    sys.exit(0 if timing(args.backends, args.hot_input) else 1)
