"""What does compensation cost an MoE layer?

    PYTHONPATH=common:. python benchmarks/bench_compensation.py

Whole layers with random selections, that of the plain layer as the base: both backends, folded and
exact forms, with and without gathering statistics. CUDA graph replay, median, several layers and
routings in turn so that weights come from memory. Microseconds, and percent over the plain layer. A
result that is far from the plain layer's is not timed. The quantizers and the statistics alone
follow. ``tests/gpu/check_compensation_kernels.py`` compares results with the torch code.
"""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.moe_data import Layer, Routing, make_layers, make_routings
from benchmarks.moe_shapes import SHAPES
from benchmarks.timing import graph_time
from quads_common.activation import Activation
from quads_common.compensation.moe import Gathering
from quads_common.compensation.operands import InputCompensation, gather_columns
from quads_common.compensation.statistics import new_statistics
from quads_common.kernels.compensated import (
    fused_moe_compensated_hopper,
    fused_moe_compensated_triton,
)
from quads_common.kernels.compensated_rows import compensate_rows
from quads_common.kernels.moe import DOWN, GATE_UP, fused_moe_hopper, fused_moe_triton
from quads_common.kernels.route import Routes
from quads_common.kernels.rows import quantize_rows
from quads_common.kernels.statistics import observe_triton

SHAPE = "qwen3-30b-a3b"
TOKENS = (1, 4, 16, 64, 128, 256, 4096)
PERIOD = 64


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
    "RAC .5 obs": Variant(0.5, observed=True, hopper=True),
    "spl+R obs": Variant(0.5, SPLICE, observed=True, hopper=True),
}

Call = Callable[[Layer, Routing], torch.Tensor]


def lists_of(layer: Layer, variant: Variant) -> tuple[InputCompensation, InputCompensation]:
    """Random selections of exactly the share and the counts asked for."""
    found = []
    for weight, groups, slots in (
        (layer.w13_bf16, 1, variant.channels[0]),
        (layer.w2_bf16, layer.experts, variant.channels[1]),
    ):
        width = weight.shape[2]
        mask = channels = columns = None
        if variant.ratio is not None:
            order = torch.rand((groups, width // 16), device="cuda").argsort(dim=1)
            mask = order < round(variant.ratio * width / 16)
        if slots:
            order = torch.rand((groups, width), device="cuda").argsort(dim=1)[:, :slots]
            channels = order.sort(dim=1).values.int()
        if variant.columns and channels is not None:
            own = channels.expand(layer.experts, -1)
            columns = torch.stack([gather_columns(w, c) for w, c in zip(weight, own, strict=True)])
        found.append(InputCompensation(mask, channels, columns))
    return found[0], found[1]


def call_of(variant: Variant, layers: list[Layer]) -> Call:
    """The layer with this variant's lists, which differ from layer to layer."""
    lists = {id(layer): lists_of(layer, variant) for layer in layers}
    statistics = {id(layer): statistics_of(layer) for layer in layers}

    def call(layer: Layer, r: Routing) -> torch.Tensor:
        first, second = lists[id(layer)]
        gathering = None
        if variant.observed:
            gathering = Gathering(*statistics[id(layer)], PERIOD, all_real(r.x.shape[0]))
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
def all_real(tokens: int) -> torch.Tensor:
    return torch.ones(tokens, dtype=torch.bool, device="cuda")


def statistics_of(layer: Layer):
    both = (
        new_statistics(1, layer.w13.shape[2], device="cuda"),
        new_statistics(layer.experts, layer.w2.shape[2], device="cuda"),
    )
    for stats in both:
        stats.enabled.fill_(True)
    return both


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
        observe_table(layers)
    torch.cuda.synchronize()


def timing() -> bool:
    """The tables; a result that is far from the plain layer's is not timed."""
    layers = tile(make_layers(SHAPE, 3))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: us, and % over plain")
    ok = table("hopper", plain_hopper, HOPPER_VARIANTS, layers)
    ok &= table("triton", plain, VARIANTS, layers)
    rows_table(layers, timed=True)
    observe_table(layers, timed=True)
    return ok


def table(backend: str, base: Call, variants: dict[str, Variant], layers: list[Layer]) -> bool:
    calls = {name: call_of(variant, layers) for name, variant in variants.items()}
    print(" ".join(f"{h:>12}" for h in [backend, "plain", "again", *calls]), flush=True)
    ok = True
    for tokens in TOKENS:
        routings = make_routings(SHAPE, tokens)
        pairs = [(layer, r) for r in routings for layer in layers]

        def measure(call: Call, pairs=pairs) -> float:
            work = [functools.partial(call, *pair) for pair in pairs]
            return graph_time(work, replays=6 if len(pairs[0][1].x) > 1000 else 20)

        before, row = measure(base), []
        for name, call in calls.items():
            want, got = base(*pairs[0]).double(), call(*pairs[0]).double()
            far = float((got - want).norm() / want.norm())
            if not far < 0.3:
                ok = False
                print(f"  FAIL {name}, {tokens} tokens: {far:.1e} away from plain")
                continue
            took = measure(call)
            row.append(f"{took:6.1f} {100 * (took / before - 1):+5.1f}")
        print(f"{tokens:12} {before:12.1f} {measure(base):12.1f}", *row, flush=True)
    return ok


def rows_table(layers: list[Layer], timed: bool = False) -> None:
    """The quantizers alone, of both inputs."""
    hidden, inner, experts, top_k = SHAPES[SHAPE]
    names = ["RAC 0.5", "splice", "splice+RAC", "columns"]
    lists = {name: lists_of(layers[0], VARIANTS[name]) for name in names}
    if timed:
        print("quantizers, us: " + " ".join(f"{h:>10}" for h in ["plain", *names]))
    for tokens in (16, 128, 4096):
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


def observe_table(layers: list[Layer], timed: bool = False) -> None:
    """Statistics alone, one launch after the other; enabled, and switched off."""
    hidden, inner, experts, top_k = SHAPES[SHAPE]
    lists = lists_of(layers[0], VARIANTS["splice+RAC"])
    for tokens in (1, 32, 128, 256, 4096):
        x = torch.randn((tokens, hidden), device="cuda", dtype=torch.bfloat16)
        y = torch.randn((tokens * top_k, 2 * inner), device="cuda", dtype=torch.bfloat16)
        scores = torch.rand((tokens, experts), device="cuda")
        routes = Routes(scores.topk(top_k, dim=1).indices.int(), None, experts)
        mask = all_real(tokens)
        stats = [statistics_of(layer) for layer in layers]
        first = [
            functools.partial(observe_triton, s[0], x, lists[0], PERIOD, row_mask=mask)
            for s in stats
        ]
        options: dict = {"row_mask": mask, "routes": routes, "activation": Activation()}
        second = [
            functools.partial(observe_triton, s[1], y, lists[1], PERIOD, **options) for s in stats
        ]
        if not timed:
            first[0](), second[0]()
            continue
        on = graph_time(first), graph_time(second)
        for both in stats:
            for s in both:
                s.enabled.fill_(False)
        off = graph_time(first), graph_time(second)
        print(
            f"observe, {tokens} tokens: w13 {on[0]:.2f} w2 {on[1]:.2f} us; "
            f"switched off {off[0]:.2f} {off[1]:.2f}",
            flush=True,
        )


WARM = [f"{b}:{n}" for b, names in (("hopper", HOPPER_VARIANTS), ("triton", VARIANTS))
        for n in ("plain", *names)]  # fmt: skip


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(0 if timing() else 1)
