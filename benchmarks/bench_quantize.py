"""How fast are the quantizers, against a copy that moves as many bytes?

    PYTHONPATH=common:. python benchmarks/bench_quantize.py
    PYTHONPATH=common:. python benchmarks/bench_quantize.py --sweep

One table: activations with 4,096 and 65,536 rows, with and without the activation function, weights
of an MoE layer (amax and codes). Results are compared with the torch code before anything is timed.
CUDA graph replay, median, buffers larger than the L2 cache.

``--sweep`` times other tiles of the programs for 65,536 rows and for weights, and lists the best.
"""

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.timing import copy_rate, graph_time
from quads_common import quantize
from quads_common.activation import Activation
from quads_common.format import QuantizedTensor
from quads_common.kernels import quantize as weight_kernels
from quads_common.kernels import rows as row_kernels
from quads_common.kernels.quantize import quantize_weight_into, weight_amax_triton
from quads_common.kernels.rows import Tile, quantize_rows
from quads_common.packing import unscaled_values
from tests.kernels.compare_activation import fast_silu

COLD_BYTES = 256 * 2**20  # all sets of buffers of one measurement, several times the L2 cache
CHECKED = 256  # rows or, of a weight, matrices 0 and 1


@dataclass(frozen=True)
class Rows:
    """Activations of one shape, quantized to codes or to GEMM operands."""

    rows: int
    width: int
    gated: bool
    operand: bool

    def __str__(self) -> str:
        form = "operand" if self.operand else "packed"
        return f"rows {self.rows}x{self.width}{' silu' * self.gated} -> {form}"

    @property
    def columns(self) -> int:
        return 2 * self.width if self.gated else self.width

    @property
    def nbytes(self) -> int:
        written = 2 * self.width if self.operand else self.width // 2 + self.width // 16
        return self.rows * (2 * self.columns + written + 4)

    @property
    def sets(self) -> int:
        return max(2, COLD_BYTES // self.nbytes + 1)

    def run(self, x: torch.Tensor) -> row_kernels.QuantizedRows:
        activation = Activation() if self.gated else None
        packed = not self.operand
        return quantize_rows(x, activation=activation, packed=packed, operand=self.operand)

    def small(self) -> None:
        """Compile what ``run`` runs."""
        self.run(torch.randn((CHECKED, self.columns), device="cuda", dtype=torch.bfloat16))

    def build(self) -> tuple[Callable[[], None], list[Callable]]:
        """A check of the results, and the calls to time, each on its own buffers."""
        shape = (self.rows, self.columns)
        inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(self.sets)]
        return partial(self.check, inputs[0][:CHECKED]), [partial(self.run, x) for x in inputs]

    def check(self, x: torch.Tensor) -> None:
        values = x
        if self.gated:
            product = quantize_rows(x, activation=Activation(), product=True, operand=False).product
            assert product is not None
            values = product
        want = quantize(values, per_token=True)
        got = self.run(x)
        if got.operand is not None:
            scale = got.operand.row_scale
            natural = got.operand.values.transpose(1, 2).reshape(len(x), -1)[:, : self.width]
            same = torch.equal(natural.float(), unscaled_values(want.packed, want.block_scale))
        else:
            assert got.quantized is not None
            scale = got.quantized.global_scale
            same = same_codes(got.quantized, want)
        if not same or not torch.equal(scale.flatten(), want.global_scale.flatten()):
            raise SystemExit(f"{self}: results are wrong")


@dataclass(frozen=True)
class Weight:
    """One stacked weight, in place; without a given amax it is read twice."""

    experts: int
    n: int
    k: int
    with_amax: bool

    def __str__(self) -> str:
        name = f"weight {self.experts}x{self.n}x{self.k}"
        return name if self.with_amax else f"{name} with its amax"

    @property
    def nbytes(self) -> int:
        elements = self.experts * self.n * self.k
        return elements * 2 * (1 if self.with_amax else 2) + elements // 2 + elements // 16

    @property
    def sets(self) -> int:
        return 1

    def small(self) -> None:
        w = torch.randn((2, self.n, self.k), device="cuda", dtype=torch.bfloat16)
        for call in self.on(w)[1]:
            call()

    def build(self) -> tuple[Callable[[], None], list[Callable]]:
        shape = (self.experts, self.n, self.k)
        return self.on(torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02)

    def on(self, w: torch.Tensor) -> tuple[Callable[[], None], list[Callable]]:
        packed = torch.empty((*w.shape[:2], self.k // 2), dtype=torch.uint8, device="cuda")
        scale = torch.empty((*w.shape[:2], self.k // 16), dtype=torch.uint8, device="cuda")
        got = QuantizedTensor(
            packed, scale.view(torch.float8_e4m3fn), torch.empty(len(w), device="cuda")
        )
        flags = torch.zeros(len(w), dtype=torch.int32, device="cuda")
        amax = weight_amax_triton(w) if self.with_amax else None
        call = partial(
            quantize_weight_into, w, got.packed, got.block_scale, got.global_scale, amax=amax,
            nonfinite=flags,
        )  # fmt: skip

        def check() -> None:
            packed.fill_(0xFF)
            call()
            want = quantize(w[:2])
            first = QuantizedTensor(got.packed[:2], got.block_scale[:2], got.global_scale[:2])
            if not same_codes(first, want) or not torch.equal(
                first.global_scale, want.global_scale
            ):
                raise SystemExit(f"{self}: results are wrong")

        return check, [call]


Case = Rows | Weight


def same_codes(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    scales = (q.block_scale.view(torch.uint8) for q in (a, b))
    return torch.equal(a.packed, b.packed) and torch.equal(*scales)


@contextmanager
def tiled(tile: Tile | None) -> Iterator[None]:
    """All quantizers run with this tile; None: with their own choice."""
    if tile is None:
        yield
        return
    places = ((row_kernels, "row_tile"), (weight_kernels, "weight_tile"))
    places += ((weight_kernels, "amax_tile"),)
    chosen = [getattr(module, name) for module, name in places]
    for module, name in places:
        setattr(module, name, lambda *_: tile)
    try:
        yield
    finally:
        for (module, name), function in zip(places, chosen, strict=True):
            setattr(module, name, function)


def candidates(case: Case) -> list[Tile]:
    """Tiles to try; of a row all its blocks are in registers, 2 to 8 words for each chunk."""
    if isinstance(case, Weight):
        blocks = 16 if case.k // 16 % 32 else 32
        sizes = [(t // b, b, c) for b in {16, blocks} for t, c in ((128, 2), (128, 4), (256, 2))]
        sizes += [(t // blocks, blocks, c) for t, c in ((64, 4), (128, 1), (128, 8), (256, 1))]
        return [Tile(*size) for size in sizes]
    blocks = case.width // 16
    sizes = []
    for wide in (16, 32, 64, 128):
        chunks = -(-blocks // wide)
        if chunks <= 4 and wide * chunks < 1.4 * blocks and wide < 2 * blocks:
            sizes += [(threads // wide, wide, chunks) for threads in (64, 128, 256)]
    return [Tile(*size) for size in sizes if size[0]]


def compile_case(case: Case, tile: Tile | None) -> None:
    """In a process of its own: what is compiled stays in Triton's cache on disk."""
    with tiled(tile):
        case.small()


def compile_all(jobs: list[tuple[Case, Tile | None]], processes: int) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        for done in [pool.submit(compile_case, *job) for job in jobs]:
            done.result()


def measure(case: Case, tiles: list[Tile | None]) -> Iterator[tuple[Tile | None, float, float]]:
    """(tile, microseconds, share of a copy's rate) for each tile, all on the same buffers."""
    check, calls = case.build()
    copy = copy_rate(case.nbytes, max(2, COLD_BYTES // case.nbytes + 1))
    for tile in tiles:
        with tiled(tile):
            check()
            time_us = graph_time(calls, replays=10 if tile else 20)
        yield tile, time_us, case.nbytes / time_us * 1e6 / copy


def all_cases(widths: list[int]) -> list[Case]:
    cases: list[Case] = [
        Rows(rows, width, gated, operand)
        for width in widths
        for rows in (4096, 65536)
        for gated in (False, True)
        for operand in (False, True)
    ]
    for shape in ((128, 1536, 2048), (128, 2048, 768)):
        cases += [Weight(*shape, with_amax) for with_amax in (True, False)]
    return cases


def sweep(cases: list[Case], processes: int, shown: int = 4) -> None:
    jobs = [(case, tile) for case in cases for tile in candidates(case)]
    start = time.time()
    compile_all([(c, None) for c in cases] + jobs, processes)
    print(f"{len(jobs)} variants compiled in {time.time() - start:.0f} s")
    for case in cases:
        found = list(measure(case, [None, *candidates(case)]))
        _, chosen, share = found[0]
        print(f"{case!s:44} chosen {chosen:7.1f} us {share:.2f}; best, rows x blocks x chunks:")
        best = sorted(found[1:], key=lambda entry: entry[1])[:shown]
        print("   ", "; ".join(
            f"{t.rows}x{t.blocks}x{t.chunks} {time_us:.1f} us {share:.2f}"
            for t, time_us, share in best if t
        ), flush=True)  # fmt: skip
    print(f"{time.time() - start:.0f} s in all")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", default="2048,768")
    parser.add_argument("--sweep", action="store_true", help="try other tiles")
    parser.add_argument("--processes", type=int, default=14, help="that compile for --sweep")
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    for name, ok, text in fast_silu("cuda", {}, False):
        print(f"{name}: {text}")
        if not ok:
            raise SystemExit("wrong activation")
    cases = all_cases([int(width) for width in args.widths.split(",")])
    if args.sweep:
        sweep([case for case in cases if not isinstance(case, Rows) or case.rows > 4096],
              args.processes)  # fmt: skip
        return
    print(f"{'case':48} {'us':>9} {'GB/s':>8} {'of a copy':>10}")
    for case in cases:
        for _, time_us, share in measure(case, [None]):
            rate = case.nbytes / time_us / 1e3
            print(f"{case!s:48} {time_us:9.1f} {rate:8.0f} {share:10.2f}", flush=True)


if __name__ == "__main__":
    main()
