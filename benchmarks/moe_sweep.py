"""Times many tiles of one grouped GEMM, to choose the tables in ``kernels.moe``."""

import functools
import itertools
import multiprocessing
import os
from collections.abc import Iterator

import torch

from benchmarks.moe_data import Layer, Routing
from benchmarks.moe_shapes import SHAPES
from benchmarks.timing import graph_time
from quads_common.activation import Activation
from quads_common.format import QuantizedTensor
from quads_common.kernels.gemm import GemmConfig, grouped_gemm
from quads_common.kernels.route import Routes, make_table
from quads_common.kernels.rows import quantize_rows

__all__ = ["candidates", "sweep", "warm"]

# Processes that compile; tiles that do not fit the GPU drop out there.
WORKERS = 12


def candidates(tokens: int) -> Iterator[GemmConfig]:
    """Tiles worth a try for so many tokens of 128 experts, top-8."""
    if tokens <= 128:
        grid = itertools.product(
            (16,), (32, 64, 128), (128, 256), (True, False), (2, 4, 8), (2, 3, 4)
        )
    elif tokens <= 512:
        grid = itertools.product((16, 32), (64, 128), (128, 256), (True, False), (4, 8), (2, 3))
    else:
        grid = itertools.product((64, 128), (64, 128, 256), (128,), (True, False), (4, 8), (2, 3))
    for block_m, block_n, block_k, swap, warps, stages in grid:
        if block_n // warps >= 8:
            yield GemmConfig(block_m, block_n, block_k, swap, warps, stages)


def warm(shape: str, gemm: str, counts: list[int]) -> None:
    """Compile all candidates in parallel processes; the disk cache keeps them."""
    configs = list(dict.fromkeys(c for count in counts for c in candidates(count)))
    with multiprocessing.get_context("spawn").Pool(min(WORKERS, os.cpu_count() or 1)) as pool:
        job = functools.partial(_compile, shape, gemm)
        failed = [message for message in pool.imap_unordered(job, configs) if message]
    print(f"{len(configs)} tiles, {len(failed)} do not compile or fit", flush=True)


def _compile(shape: str, gemm: str, config: GemmConfig) -> str:
    hidden, inner, _, top_k = SHAPES[shape]
    n, k = (2 * inner, hidden) if gemm == "gemm1" else (hidden, inner)
    device = torch.device("cuda")
    x = torch.zeros((1, k), dtype=torch.bfloat16, device=device)
    weight = QuantizedTensor(
        torch.zeros((1, n, k // 2), dtype=torch.uint8, device=device),
        torch.zeros((1, n, k // 16), dtype=torch.uint8, device=device).view(torch.float8_e4m3fn),
        torch.ones(1, device=device),
    )
    ids = torch.zeros((1, top_k), dtype=torch.int32, device=device)
    try:
        _call(gemm, x, weight, Routes(ids, None, 1), ids.float(), config, top_k)()
    except Exception as error:
        return f"{config}: {type(error).__name__}"
    return ""


def _call(
    gemm: str, x: torch.Tensor, weight: QuantizedTensor, routes: Routes, router: torch.Tensor,
    config: GemmConfig, top_k: int,
) -> functools.partial:  # fmt: skip
    """x: rows of the GEMM's input, [T, K] for gemm1 and [T * k, K] for gemm2."""
    table = make_table(routes, config.block_m)
    slots = routes.topk_ids.numel()
    first = gemm == "gemm1"
    y = x.new_empty((slots, weight.shape[1]), dtype=x.dtype if first else torch.float32)
    if not first and x.shape[0] != slots:
        x = x.expand(slots, -1).contiguous()
    return functools.partial(
        grouped_gemm, quantize_rows(x).operand, weight, y, config=config, table=table,
        top_k=top_k if first else 1, router_weight=None if first else router,
    )  # fmt: skip


def sweep(gemm: str, layers: list[Layer], routings: list[Routing], rate: float) -> None:
    """Print the candidates by time, fastest first."""
    tokens, top_k = routings[0].ids.shape
    weights = [layer.w13 if gemm == "gemm1" else layer.w2 for layer in layers]
    results = []
    for config in candidates(tokens):
        try:
            calls = []
            for r in routings:
                for w in weights:
                    x = r.x
                    if gemm == "gemm2":
                        x = torch.randn((tokens * top_k, 2 * w.shape[2]), device="cuda").bfloat16()
                        x = quantize_rows(
                            x, activation=Activation(), product=True, operand=False
                        ).product
                    routes = Routes(r.ids, None, w.shape[0])
                    calls.append(_call(gemm, x, w, routes, r.weights, config, top_k))
            results.append((graph_time(calls, 10), config))
        except Exception as error:
            torch.cuda.synchronize()
            if "out of resource" not in str(error):
                print(f"{config}: {type(error).__name__}: {str(error)[:100]}")
    used = [r.ids.unique().numel() for r in routings]
    w = weights[0]
    nbytes = (w.packed.nbytes + w.block_scale.nbytes) * sum(used) / len(used) / w.shape[0]
    print(f"{gemm}, {tokens} tokens, ceiling {nbytes / rate * 1e6:.1f} us")
    for time, config in sorted(results, key=lambda item: item[0])[:15]:
        print(f"  {time:7.1f} us  {nbytes / rate * 1e6 / time:.2f}  {config}", flush=True)
