"""How fast are the quantizers, against a copy that moves as many bytes?

    PYTHONPATH=common:. python benchmarks/bench_quantize.py

One table: activations with 4,096 and 65,536 rows, with and without the activation function, weights
of an MoE layer (amax and codes). Codes are compared with the torch code before anything is timed.
CUDA graph replay, median, buffers larger than the L2 cache.
"""

import argparse
from collections.abc import Callable

import torch

from benchmarks.timing import copy_rate, graph_time
from quads_common import quantize
from quads_common.activation import Activation
from quads_common.format import QuantizedTensor
from quads_common.kernels.quantize import (
    quantize_weight_into,
    weight_amax_triton,
)
from quads_common.kernels.rows import quantize_rows

COLD_BYTES = 256 * 2**20  # all sets of buffers of one measurement, several times the L2 cache


def check_rows(x: torch.Tensor, activation: Activation | None) -> None:
    """Refuse to time wrong codes."""
    got = quantize_rows(x, activation=activation, packed=True, product=True, operand=False)
    assert got.product is not None and got.quantized is not None
    want = quantize(got.product, per_token=True)
    if not torch.equal(got.quantized.packed, want.packed):
        raise SystemExit(f"codes of {list(x.shape)} are wrong")


def rows_case(rows: int, width: int, gated: bool, operand: bool) -> tuple[int, Callable, int]:
    """(bytes moved, call on one set of buffers, number of sets)."""
    activation = Activation() if gated else None
    columns = 2 * width if gated else width
    written = 2 * width if operand else width // 2 + width // 16
    nbytes = rows * (2 * columns + written + 4)
    sets = max(2, COLD_BYTES // nbytes + 1)
    inputs = [
        torch.randn((rows, columns), device="cuda", dtype=torch.bfloat16) for _ in range(sets)
    ]
    check_rows(inputs[0][:256], activation)

    def call(i: int) -> object:
        return quantize_rows(inputs[i], activation=activation, packed=not operand, operand=operand)

    return nbytes, call, sets


def weight_case(experts: int, n: int, k: int, with_amax: bool) -> tuple[int, Callable, int]:
    """One stacked weight, in place; without a given amax it is read twice."""
    w = torch.randn((experts, n, k), device="cuda", dtype=torch.bfloat16) * 0.02
    packed = torch.empty((experts, n, k // 2), dtype=torch.uint8, device="cuda")
    scale = torch.empty((experts, n, k // 16), dtype=torch.float8_e4m3fn, device="cuda")
    total = torch.empty(experts, device="cuda")
    flags = torch.zeros(experts, dtype=torch.int32, device="cuda")
    amax = weight_amax_triton(w) if with_amax else None
    quantize_weight_into(w, packed, scale, total, amax=amax, nonfinite=flags)
    want = quantize(w[:2])
    if not torch.equal(QuantizedTensor(packed, scale, total).packed[:2], want.packed):
        raise SystemExit("weight codes are wrong")
    nbytes = w.nbytes * (1 if with_amax else 2) + packed.nbytes + scale.nbytes

    def call(i: int) -> object:
        return quantize_weight_into(w, packed, scale, total, amax=amax, nonfinite=flags)

    return nbytes, call, 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", default="2048,768")
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    cases = {}
    for width in (int(w) for w in args.widths.split(",")):
        for rows in (4096, 65536):
            for gated in (False, True):
                for operand in (False, True):
                    name = f"rows {rows}x{width}{' silu' * gated} -> "
                    name += "operand" if operand else "packed"
                    cases[name] = (rows_case, (rows, width, gated, operand))
    for shape in ((128, 1536, 2048), (128, 2048, 768)):
        for with_amax in (True, False):
            name = f"weight {'x'.join(map(str, shape))}{'' if with_amax else ' with its amax'}"
            cases[name] = (weight_case, (*shape, with_amax))
    print(f"{'case':48} {'us':>9} {'GB/s':>8} {'of a copy':>10}")
    for name, (build, arguments) in cases.items():
        nbytes, call, sets = build(*arguments)
        time = graph_time([lambda i=i, call=call: call(i) for i in range(sets)])
        rate = nbytes / time * 1e6
        copy = copy_rate(nbytes, max(2, COLD_BYTES // nbytes + 1))
        print(f"{name:48} {time:9.1f} {rate / 1e9:8.0f} {rate / copy:10.2f}", flush=True)


if __name__ == "__main__":
    main()
