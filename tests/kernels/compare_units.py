"""Comparisons of ``WeightUnits`` on a GPU with the same on the CPU: bytes, order, NaN, shards.

Each function yields (name, whether it holds, figures) for a device and model shapes. On the CPU
(``device="cpu"``, in the interpreter) the GPU's code runs with one program.
"""

import contextlib
import itertools
from collections.abc import Iterator

import torch

from quads_common.format import GlobalScaleRule
from quads_common.kernels.units import UnitQuantizer
from quads_common.weight_tiles import TileLayout
from quads_common.weight_units import Piece, WeightUnits
from tests.kernels.compare_quantize import DTYPES_AND_RULES

Check = tuple[str, bool, str]


def make_units(
    shape: tuple[int, int, int], parts: tuple[str, ...], device: str, kernels: bool,
    rule: GlobalScaleRule = "pow2", layout: TileLayout | None = None,
) -> WeightUnits:  # fmt: skip
    """Units over storage full of 0xA5; ``kernels`` on the CPU: those of the GPU, interpreted."""
    count, n, k = shape
    packed = torch.full((count, n, k // 2), 0xA5, dtype=torch.uint8, device=device)
    scale = torch.full((count, n, k // 16), 0x5A, dtype=torch.uint8, device=device)
    scale, total = scale.view(torch.float8_e4m3fn), torch.full((count,), 7.0, device=device)
    units = WeightUnits("layer.w", parts, packed, scale, total, lambda unit: [], rule, layout)
    if kernels and device == "cpu":
        units._on_gpu = UnitQuantizer(packed, scale, total, len(parts), rule, 1, layout)
    return units


def same_storage(a: WeightUnits, b: WeightUnits) -> tuple[bool, str]:
    """Whether two storages hold the same bytes."""
    counts = []
    for x, y in (
        (a.packed, b.packed),
        (a.block_scale.view(torch.uint8), b.block_scale.view(torch.uint8)),
        (a.global_scale, b.global_scale),
    ):
        counts.append(int((x.cpu() != y.cpu()).sum()))
    return not any(counts), f"{a.packed.numel()} bytes, differ: codes, scales, global {counts}"


def units(device: str, shapes: dict, quick: bool) -> Iterator[Check]:
    """Everything that a loader does, on the GPU and on the CPU."""
    generator = torch.Generator().manual_seed(8)
    for name, (hidden, inner, _, _) in shapes.items():
        # The torch code takes seconds for the largest.
        for dtype, rule in DTYPES_AND_RULES[: 1 if hidden * inner > 4e6 else None]:
            yield from expert_pairs(f"{name} {dtype} {rule}", device, hidden, inner, dtype, rule)
        yield from shards(name, device, hidden, inner, generator)
    yield from staged_groups(device, generator)
    yield from unusual_tensors(device, generator)
    yield from bad_units(device)
    yield from bad_units_later(device)
    yield from watched_units(device)


def tiled_units(device: str, shapes: dict, quick: bool) -> Iterator[Check]:
    """Units stored in tiles, the second sync over the first, and what they say they hold."""
    generator = torch.Generator().manual_seed(10)
    sizes = [(256, 64)] if quick else [(256, 64), (2048, 768), (4096, 1408)]
    for hidden, inner in sizes:
        for layout, rows, k, parts in (
            (TileLayout(gate_up=True), 2 * inner, hidden, ("w1", "w3")),
            (TileLayout(gate_up=False), inner, hidden, ("w2",)),
        ):
            mine = make_units((2, rows, k), parts, device, True, layout=layout)
            want = make_units((2, rows, k), parts, "cpu", False, layout=layout)
            plain = make_units((2, rows, k), parts, "cpu", False)
            for unit in (1, 0, 1):
                for first, part in enumerate(parts):
                    full = torch.randn((inner, k), generator=generator).to(torch.bfloat16)
                    for units_ in (mine, want, plain):
                        piece = Piece(inner, first_row=first * inner)
                        units_.load(unit, part, full.to(units_.packed.device), part, piece)
            same, text = same_storage(mine, want)
            yield f"tiled units {layout} {rows}x{k}", same and not mine.missing(), text
            held = [mine.quantized(unit) for unit in range(2)]
            ok = all(
                torch.equal(h.packed.cpu(), plain.packed[u])
                and torch.equal(
                    h.block_scale.cpu().view(torch.uint8), plain.block_scale[u].view(torch.uint8)
                )
                for u, h in enumerate(held)
            )
            yield f"tiled units {layout} {rows}x{k} canonical", ok, "differ"


def expert_pairs(
    name: str, device: str, hidden: int, inner: int, dtype: torch.dtype, rule: GlobalScaleRule
) -> Iterator[Check]:
    """w1 and w3 of experts in both orders and interleaved, w2, and a second sync over the first."""
    generator = torch.Generator().manual_seed(9)
    shapes = {"w1": (inner, hidden), "w3": (inner, hidden), "w2": (hidden, inner)}
    pieces = {"w1": Piece(inner), "w3": Piece(inner, first_row=inner), "w2": Piece(hidden)}
    orders = [(0, "w1"), (0, "w3"), (1, "w3"), (2, "w1"), (1, "w1"), (2, "w1"), (2, "w3")]
    orders += [(unit, "w2") for unit in range(3)]
    both = []
    for place, kernels in ((device, True), ("cpu", False)):
        w13 = make_units((3, 2 * inner, hidden), ("w1", "w3"), place, kernels, rule)
        w2 = make_units((3, hidden, inner), ("w2",), place, kernels, rule)
        both.append((w13, w2))
    for sync in range(2):
        done = []
        for unit, part in orders:
            w = torch.randn(shapes[part], generator=generator) * 0.02 * (1 + 3 * unit) * 2.0**sync
            full = w.to(dtype)
            done.append([
                (b[1] if part == "w2" else b[0]).load(
                    unit, part, full.to(place), f"{unit}.{part}", pieces[part]
                )
                for place, b in zip((device, "cpu"), both, strict=True)
            ])  # fmt: skip
        ok = all(a == b for a, b in done) and not any(u.missing() for u in both[0])
        for mine, want in zip(*both, strict=True):
            same, text = same_storage(mine, want)
            yield f"units {name} sync {sync} {mine.parts}", ok and same, text


def shards(
    name: str, device: str, hidden: int, inner: int, generator: torch.Generator
) -> Iterator[Check]:
    """This rank's part of tensors whose largest value lies with another rank."""
    tp = next((t for t in (4, 3, 2) if inner % (16 * t) == 0), None)
    if tp is None:
        yield f"units {name} shards", True, f"none: {inner} cannot be cut"
        return
    local, rank = inner // tp, 1
    start = rank * local
    w1, w3, w2 = (
        torch.randn(shape, generator=generator).to(torch.bfloat16)
        for shape in ((inner, hidden), (inner, hidden), (hidden, inner))
    )
    w3[0, 0], w2[0, -1] = 77.0, 99.0
    both = []
    for place, kernels in ((device, True), ("cpu", False)):
        w13_units = make_units((1, 2 * local, hidden), ("w1", "w3"), place, kernels)
        w2_units = make_units((1, hidden, local), ("w2",), place, kernels)
        piece = Piece(local, row_offset=start)
        w13_units.load(0, "w1", w1.to(place), "w1", piece)
        w13_units.load(0, "w3", w3.to(place), "w3", Piece(local, local, row_offset=start))
        w2_units.load(0, "w2", w2.to(place), "w2", Piece(hidden, k_offset=start))
        both.append((w13_units, w2_units))
    for mine, want in zip(*both, strict=True):
        yield f"units {name} shard of {tp} {mine.parts}", *same_storage(mine, want)


def staged_groups(device: str, generator: torch.Generator) -> Iterator[Check]:
    """Fused linears, whose parts the caller stages: in any order, several parts in one tensor."""
    rows, k = {"q": 32, "k": 16, "v": 16}, 48
    starts = {"q": slice(0, 32), "k": slice(32, 48), "v": slice(48, 64)}
    w = {
        part: torch.randn((n, k), generator=generator).to(torch.bfloat16)
        for part, n in rows.items()
    }
    w["k"][0, 0] = 50.0
    cases = {
        "one by one": [("q",), ("k",), ("v",)],
        "reversed": [("v",), ("k",), ("q",)],
        "fused": [("q", "k", "v")],
        "replaced": [("k",), ("q",), ("k", "v")],
    }
    for name, order in cases.items():
        both = []
        for place, kernels in ((device, True), ("cpu", False)):
            group = make_units((1, 64, k), ("q", "k", "v"), place, kernels)
            for parts in order:
                full = torch.cat([w[p] * (3 if len(order) == 3 else 1) for p in parts])
                stage = group.stage(0)
                stage[starts[parts[0]].start : starts[parts[-1]].stop].copy_(full)
                group.arrived(0, parts, full.to(place), name)
            both.append(group)
        yield f"units linear group {name}", *same_storage(*both)


def unusual_tensors(device: str, generator: torch.Generator) -> Iterator[Check]:
    """Tensors at odd addresses, with padded rows, transposed, on the CPU, and of another layout."""
    n, k = 32, 96
    base = torch.randn(n * k + 200, generator=generator).to(torch.bfloat16)
    variants = {
        "odd address": lambda x: x[1 : 1 + n * k].view(n, k),
        "padded rows": lambda x: x[: n * 98].view(n, 98)[:, 2:],
        "transposed": lambda x: x[: n * k].view(k, n).T,
    }
    for name, view in variants.items():
        for place in {device, "cpu"}:
            mine = make_units((1, n, k), ("weight",), device, True)
            want = make_units((1, n, k), ("weight",), "cpu", False)
            mine.load(0, "weight", view(base.to(place)), "w", Piece(n))
            want.load(0, "weight", view(base), "w", Piece(n))
            yield f"units tensor with {name} on {place}", *same_storage(mine, want)


def bad_units(device: str) -> Iterator[Check]:
    """NaN, Inf and too large: named when the last unit came, the unit as it was, others written."""
    n, k = 16, 32
    good = torch.ones((n, k), dtype=torch.bfloat16)
    for value, part in itertools.product((torch.nan, torch.inf, -3.38e38), ("w1", "w3")):
        group = make_units((3, 2 * n, k), ("w1", "w3"), device, True)
        bad = good.clone()
        bad[-1, 5] = value
        message = ""
        for unit, name in itertools.product(range(3), ("w1", "w3")):
            full = bad if (unit, name) == (1, part) else good
            try:
                piece = Piece(n, first_row=0 if name == "w1" else n)
                group.load(unit, name, full.to(device), f"{unit}.{name}", piece)
            except ValueError as error:
                message = f"{unit}.{name}: {error}"
        ok = message.startswith(f"2.w3: 1.{part}: NaN or Inf") and "layer.w[1] keeps" in message
        ok &= bool((group.packed[1] == 0xA5).all()) and float(group.global_scale[1]) == 7.0
        ok &= bool((group.packed[::2] == 0x77).all()) and group.missing() == [1]
        yield f"units {value} in {part}", ok, message


class Watcher:
    """Notes what a completed unit was told to be, before anything raised."""

    def __init__(self) -> None:
        self.told: list[tuple[int, bool, float]] = []

    def completed(self, unit: int, weight: torch.Tensor, good: torch.Tensor) -> None:
        self.told.append((unit, bool(good), float(weight[0, 0])))


def watched_units(device: str) -> Iterator[Check]:
    """A watcher hears of each unit with the kernel's own verdict, of the whole tensors."""
    n, k = 16, 32
    for kernels in (True, False):
        group = make_units((3, n, k), ("weight",), device if kernels else "cpu", kernels)
        group.watcher = watcher = Watcher()
        for unit in range(3):
            full = torch.full((2 * n, k), 1.0 + unit, dtype=torch.bfloat16)
            if unit == 1:
                full[-1, 5] = torch.nan  # another rank's rows
            group.stage(unit).copy_(full[:n])
            with contextlib.suppress(ValueError):
                group.arrived(unit, ("weight",), full.to(group.packed.device), str(unit))
        want = [(0, True, 1.0), (1, False, 2.0), (2, True, 3.0)]
        want = want if kernels else [told for told in want if told[1]]
        yield f"units watched, {kernels=}", watcher.told == want, str(watcher.told)


def bad_units_later(device: str) -> Iterator[Check]:
    """An incomplete sync tells at the boundary; a second copy of a bad unit tells at once."""
    n, k = 16, 32
    bad = torch.full((n, k), torch.nan, dtype=torch.bfloat16, device=device)
    good = torch.ones_like(bad)

    def raised(action) -> str:
        try:
            action()
        except ValueError as error:
            return str(error)
        return ""

    group = make_units((3, n, k), ("weight",), device, True)
    for unit in range(3):
        group.load(unit, "weight", good, "first", Piece(n))
    group.load(1, "weight", bad, "second", Piece(n))
    again = raised(lambda: group.load(1, "weight", good, "third", Piece(n)))
    ok = again.startswith("second: NaN or Inf") and group.missing() == []
    yield "units replaced while bad", ok, again
    for name in ("drop_open", "missing"):
        group.load(2, "weight", bad, name, Piece(n))
        text = raised(getattr(group, name))
        ok = text.startswith(f"{name}: NaN or Inf") and group.missing() == []
        ok &= bool((group.packed == 0x77).all()) and group.drop_open() == []
        yield f"units bad at {name}", ok, text
    pair = make_units((1, 2 * n, k), ("w1", "w3"), device, True)
    pair.load(0, "w1", bad, "bad", Piece(n))
    dropped = pair.drop_open()
    yield "units bad and incomplete", len(dropped) == 1 and pair.missing() == [0], str(dropped)
    pair.load(0, "w1", good, "open", Piece(n))
    then = pair.now
    stays = pair.drop_since(then) == []
    pair.load(0, "w1", good, "again", Piece(n))
    dropped = pair.drop_since(then)
    pair.load(0, "w3", good, "second half", Piece(n, n))
    ok = stays and len(dropped) == 1 and pair.missing() == [0] and len(pair.drop_open()) == 1
    yield "units dropped since a call", ok, str(dropped)
