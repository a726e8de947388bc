"""Quantizer of activations on the GPU, byte for byte that of ``quads_common.quantize``.

Rows come as packed codes or, for the GEMMs of this package, as 16-bit operands in their own order
of K, and the activation function of an MoE layer can run in front: one pass, no host
synchronization.
"""

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-untyped]

from quads_common.activation import Activation
from quads_common.format import BLOCK_SIZE, INPUT_DTYPES, QuantizedTensor, check_block_aligned
from quads_common.kernels import _quantize
from quads_common.kernels.route import Routes

__all__ = ["Operand", "QuantizedRows", "check_dtype", "quantize_rows"]

# Largest row that one program holds in registers, in elements.
MAX_WIDTH = 65536
# Planes of an operand are whole K tiles of every GEMM configuration: 256 / 8 words.
PLANE_ALIGNMENT = 32
# Up to so many programs a GPU is not full: latency counts, not throughput.
FEW_TILES = 256
# Blocks of a thread where there are many rows, at most where they fit.
MAX_CHUNKS = 4
# Threads of a program where there are many rows, and at most.
ROW_THREADS = 128
MAX_THREADS = 512


@dataclass(frozen=True)
class Operand:
    """Activations as the GEMM kernels read them.

    values: [rows, 8, plane] float16 or bfloat16: element k of a row is at [k % 8, k // 8], zeros
        behind K / 8. Of quantized activations ``code * block_scale``, exact in float16.
    row_scale: [rows] float32 global scale of each row; None: activations that are not quantized.
    width: K.
    """

    values: torch.Tensor
    row_scale: torch.Tensor | None
    width: int


@dataclass(frozen=True)
class QuantizedRows:
    """What ``quantize_rows`` was asked for; the rest is None."""

    operand: Operand | None = None
    quantized: QuantizedTensor | None = None
    product: torch.Tensor | None = None


def quantize_rows(
    x: torch.Tensor,
    *,
    activation: Activation | None = None,
    quantized: bool = True,
    row_factor: torch.Tensor | None = None,
    routes: Routes | None = None,
    operand: bool = True,
    packed: bool = False,
    product: bool = False,
    next_may_start: bool = False,
) -> QuantizedRows:
    """Activation function, rounding to the model's dtype and per-token quantization, in one pass.

    x: [rows, K] bf16, fp16 or fp32, [rows, 2 * K] for a gated ``activation``. quantized: False
        leaves the values alone (W4A16) and only reorders. row_factor: [rows] or [rows, 1] bf16,
        fp16 or fp32, contiguous, multiplies x first.
    routes: rows are slots of a batch; those of skipped slots are left uninitialized.
    operand, packed, product: which results to write; product is the activation's, [rows, K].
    next_may_start: the next kernel, one that waits by itself, starts before this one ends (sm_90).

    Raises:
        ValueError, TypeError: shapes, dtypes or strides that do not fit, naming the argument;
            results that exclude each other.
    """
    rows, width = check_rows(x, activation, row_factor, routes)
    if packed and not quantized:
        raise ValueError("packed codes need quantized=True")
    if operand and not quantized and x.dtype == torch.float32:
        raise ValueError("float32 activations have no exact 16-bit operand: use act='nvfp4'")
    if x.stride(-1) != 1:
        x = x.contiguous()
    new = _Outputs(x, rows, width)
    result = QuantizedRows(
        new.operand(quantized) if operand else None,
        new.quantized() if packed else None,
        new.product() if product else None,
    )
    if rows and width:
        _launch_rows(
            x, activation, quantized, row_factor, routes, result, new.global_scale, width,
            next_may_start,
        )  # fmt: skip
    elif quantized:
        new.global_scale.fill_(1.0)  # of rows of no elements, as of zero rows
    return result


def check_rows(
    x: torch.Tensor,
    activation: Activation | None,
    row_factor: torch.Tensor | None,
    routes: Routes | None,
) -> tuple[int, int]:
    """Rows and K that a quantizer makes of these arguments of ``quantize_rows``.

    Raises:
        ValueError, TypeError: what does not fit, naming the argument and what is allowed.
    """
    check_dtype(x)
    if x.ndim != 2:
        raise ValueError(f"x must be [rows, K], got {list(x.shape)}")
    rows, width = x.shape
    if activation is not None and activation.gated:
        if width % 2:
            raise ValueError(f"x must be [rows, 2 * K] for {activation.name}, got {list(x.shape)}")
        width //= 2
    check_block_aligned(width, f"activations {list(x.shape)}")
    if width > MAX_WIDTH:
        raise ValueError(f"rows of {width} elements are too long: at most {MAX_WIDTH}")
    if row_factor is not None:
        if activation is not None:
            raise ValueError("row_factor applies to the layer's input, not to an activation")
        _check_factor(row_factor, rows, x.device)
    if routes is not None and routes.topk_ids.numel() != rows:
        raise ValueError(
            f"routes must have {rows} slots, one for each row of x, got topk_ids "
            f"{list(routes.topk_ids.shape)}"
        )
    return rows, width


def _check_factor(factor: torch.Tensor, rows: int, device: torch.device) -> None:
    fits = tuple(factor.shape) in ((rows,), (rows, 1)) and factor.is_contiguous()
    if not fits or factor.dtype not in INPUT_DTYPES or factor.device != device:
        raise ValueError(
            f"row_factor must be [{rows}] or [{rows}, 1], contiguous, on {device}, of one of "
            f"{[str(d) for d in INPUT_DTYPES]}; got {factor.dtype} {list(factor.shape)} with "
            f"strides {list(factor.stride())} on {factor.device}"
        )


class _Outputs:
    """Fresh result tensors of ``quantize_rows``."""

    def __init__(self, x: torch.Tensor, rows: int, width: int) -> None:
        self.x, self.rows, self.width = x, rows, width
        self.global_scale = x.new_empty((rows,), dtype=torch.float32)

    def operand(self, quantized: bool) -> Operand:
        plane = triton.cdiv(self.width // 8, PLANE_ALIGNMENT) * PLANE_ALIGNMENT
        dtype = torch.float16 if quantized else self.x.dtype
        values = self.x.new_empty((self.rows, 8, plane), dtype=dtype)
        return Operand(values, self.global_scale if quantized else None, self.width)

    def quantized(self) -> QuantizedTensor:
        packed = self.x.new_empty((self.rows, self.width // 2), dtype=torch.uint8)
        scale = self.x.new_empty((self.rows, self.width // BLOCK_SIZE), dtype=torch.uint8)
        return QuantizedTensor(
            packed, scale.view(torch.float8_e4m3fn), self.global_scale.reshape(-1, 1)
        )

    def product(self) -> torch.Tensor:
        return self.x.new_empty((self.rows, self.width))


def _launch_rows(
    x: torch.Tensor,
    activation: Activation | None,
    quantized: bool,
    row_factor: torch.Tensor | None,
    routes: Routes | None,
    result: QuantizedRows,
    global_scale: torch.Tensor,
    width: int,
    next_may_start: bool,
) -> None:
    tile = row_tile(x.shape[0], width, FEW_TILES, MAX_CHUNKS)
    limit = activation.limit if activation is not None else None
    alpha, beta = (activation.alpha, activation.beta) if activation is not None else (0.0, 0.0)
    values = result.operand.values if result.operand is not None else x
    codes = result.quantized
    _quantize.quantize_rows_kernel[(triton.cdiv(x.shape[0], tile.rows),)](
        x,
        row_factor if row_factor is not None else x,
        result.product if result.product is not None else x,
        codes.packed if codes is not None else x,
        codes.block_scale.view(torch.uint8) if codes is not None else x,
        global_scale,
        values,
        *(routes.lookup if routes is not None else (x, x, 0, 0)),
        x.shape[0], x.stride(0), limit or 0.0, alpha, beta,
        WIDTH=width,
        PLANE=values.shape[-1],
        ACTIVATION=activation.name if activation is not None else "none",
        HAS_LIMIT=limit is not None,
        HAS_FACTOR=row_factor is not None,
        QUANTIZE=quantized,
        PRODUCT=result.product is not None,
        PACKED=codes is not None,
        OPERAND=result.operand is not None,
        HAS_IDS=routes is not None,
        HAS_MAP=routes is not None and routes.expert_map is not None,
        ROWS=tile.rows, BLOCKS=tile.blocks, CHUNKS=tile.chunks, num_warps=tile.warps,
        WIDE=is_wide(x), PTX=x.is_cuda and x.dtype != torch.float32,
        NEXT_MAY_START=next_may_start, enable_fp_fusion=False,
    )  # fmt: skip


@dataclass(frozen=True)
class Tile:
    """What a program takes: rows * blocks threads, each of which holds ``chunks`` blocks."""

    rows: int
    blocks: int
    chunks: int

    @property
    def warps(self) -> int:
        return max(1, self.rows * self.blocks // 32)


def row_tile(rows: int, width: int, few: int, chunks: int) -> Tile:
    """The tile of a quantizer, with ``chunks`` of ``blocks`` in a row.

    Up to ``few`` rows: a block for each thread. Many: up to ``chunks``, which share the work of a
    row. ``blocks`` is a multiple of 16, so the tile covers the planes of an operand.
    """
    blocks = max(16, triton.cdiv(width, BLOCK_SIZE))
    if rows <= few:
        wide = min(MAX_THREADS, triton.next_power_of_2(blocks))
        tile_rows = max(1, 32 // wide)
    else:
        sizes = [s for s in (16, 32, 64, 128, 256, 512) if chunks * s >= blocks or s == MAX_THREADS]
        wide = best_split(blocks, sizes)
        tile_rows = max(1, ROW_THREADS // wide)
    return Tile(tile_rows, wide, triton.cdiv(blocks, wide))


def best_split(blocks: int, sizes: list[int]) -> int:
    """The size whose multiple wastes least over ``blocks``, and of those the smallest."""
    return min(sizes, key=lambda size: (triton.cdiv(blocks, size) * size, size))


def is_wide(x: torch.Tensor, alignment: int = 16) -> bool:
    """Whether x and its rows start at multiples of so many bytes."""
    steps = [stride * x.element_size() for stride in x.stride()[:-1]]
    return not any(number % alignment for number in (x.data_ptr(), *steps))


def check_dtype(x: torch.Tensor) -> None:
    if x.dtype not in INPUT_DTYPES:
        raise TypeError(f"cannot quantize {x.dtype}: allowed are {[str(d) for d in INPUT_DTYPES]}")
