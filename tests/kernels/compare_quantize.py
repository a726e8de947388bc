"""Comparisons of the quantizer kernels with the torch code, on a GPU or in the interpreter.

Each function yields (name, whether it holds, figures) for a device and model shapes.
"""

from collections.abc import Iterator

import torch

from quads_common import quantize as quantize_torch
from quads_common.format import GlobalScaleRule, QuantizedTensor
from quads_common.kernels.quantize import (
    quantize_triton,
    quantize_weight_into,
    weight_amax_triton,
)
from quads_common.kernels.rows import quantize_rows
from quads_common.packing import unscaled_values
from tests.common.samples import DISTRIBUTIONS, random_bf16, tie_ladder
from tests.kernels.exact_activation import ACTIVATIONS_UNDER_TEST, exact_activation, outside

Check = tuple[str, bool, str]

DTYPES_AND_RULES: list[tuple[torch.dtype, GlobalScaleRule]] = [
    (torch.bfloat16, "pow2"),
    (torch.bfloat16, "te"),
    (torch.float32, "pow2"),
    (torch.float16, "pow2"),
]


def same(a: QuantizedTensor, b: QuantizedTensor) -> tuple[bool, str]:
    """Whether two quantized tensors have the same bytes, and how many differ."""
    counts = []
    for x, y in (
        (a.packed, b.packed),
        (a.block_scale.view(torch.uint8), b.block_scale.view(torch.uint8)),
        (a.global_scale.nan_to_num(-1.0), b.global_scale.nan_to_num(-1.0)),
    ):
        counts.append(int((x.to(y.device) != y).sum()))
    return not any(counts), f"{a.packed.numel()} bytes, differ: codes, scales, global {counts}"


def weights(device: str, shapes: dict, quick: bool) -> Iterator[Check]:
    """Weight quantizer against the torch code: large ones on this device, edges on the CPU."""
    generator = torch.Generator(device).manual_seed(1)
    for name, (hidden, inner, _, _) in shapes.items():
        for dtype, rule in DTYPES_AND_RULES:
            for rows, width in ((2 * inner, hidden), (hidden, inner)):
                w = torch.randn((2, rows, width), generator=generator, device=device) * 0.02
                got = quantize_triton(w.to(dtype), global_scale_rule=rule)
                ok, text = same(got, quantize_torch(w.to(dtype), global_scale_rule=rule))
                yield f"weight {name} {rows}x{width} {dtype} {rule}", ok, text
    for name in DISTRIBUTIONS:
        w = random_bf16(name)[: 4 if quick else 512]
        ok, text = same(quantize_triton(w.to(device)), quantize_torch(w))
        yield f"weight {name}", ok, text
    for scale in (1.0, 2.0**-9, 2.0**9):
        w = tie_ladder() * scale
        ok, text = same(quantize_triton(w.to(device)), quantize_torch(w))
        yield f"weight ties * {scale}", ok, text


def weight_storage(device: str, shapes: dict, quick: bool) -> Iterator[Check]:
    """In place, with a shard's amax; matrices with NaN keep what they had and are reported."""
    w = torch.randn((4, 64, 96)).to(device)
    w[1, 5, 7], w[2, 60, 90] = torch.nan, -torch.inf
    packed = torch.full((4, 64, 48), 0xA5, dtype=torch.uint8, device=device)
    scale = torch.full((4, 64, 6), 0x5A, dtype=torch.uint8, device=device)
    total = torch.full((4,), 7.0, device=device)
    flags = quantize_weight_into(w, packed, scale.view(torch.float8_e4m3fn), total)
    good = [0, 3]
    ok = flags.tolist() == [0, 1, 1, 0]
    ok &= bool((packed[1:3] == 0xA5).all() and (scale[1:3] == 0x5A).all())
    got = QuantizedTensor(packed[good], scale[good].view(torch.float8_e4m3fn), total[good])
    same_bytes, text = same(got, quantize_torch(w[good].cpu()))
    ok &= same_bytes and total[1:3].tolist() == [7.0, 7.0]
    yield "weight in place, NaN and Inf left alone", ok, f"flags {flags.tolist()}, {text}"
    amax = weight_amax_triton(w[:1], weight_amax_triton(3 * w[3:]))
    shard = w[:1, :, :48]
    got = quantize_triton(shard, amax=amax)
    want = quantize_torch(shard.cpu(), amax=amax.cpu())
    yield "weight shard with the full amax", *same(got, want)
    flags = quantize_weight_into(
        w[1:2], packed[:1], scale[:1].view(torch.float8_e4m3fn), total[:1], amax=amax
    )
    yield "weight NaN under a finite amax", flags.tolist() == [1], f"flags {flags.tolist()}"


def tokens(device: str, shapes: dict, quick: bool) -> Iterator[Check]:
    """Activation quantizer: bytes against torch, operands against the bytes."""
    samples = {name: random_bf16(name)[: 4 if quick else 512] for name in DISTRIBUTIONS}
    samples |= {f"ties * {s}": tie_ladder() * s for s in (1.0, 2.0**-9, 3e4)}
    generator = torch.Generator().manual_seed(2)
    for name, (hidden, inner, _, _) in shapes.items():
        for width in (hidden, inner):
            for dtype in (torch.bfloat16, torch.float32, torch.float16):
                rows = 7 if quick else 512
                x = torch.randn((rows, width), generator=generator)
                samples[f"{name} {width} {dtype}"] = x.to(dtype)
    bad = torch.randn(6, 64)
    bad[1, 3], bad[2, 60], bad[4, 0], bad[5] = torch.nan, torch.inf, -torch.inf, 0.0
    samples["NaN and Inf rows"] = bad
    samples["tiny"] = torch.tensor([[1e-30] * 16, [9.9e-31] * 16, [1e-38] * 16, [-0.0] * 16])
    for name, x in samples.items():
        want = quantize_torch(x, per_token=True)
        got = quantize_rows(x.to(device), packed=True, operand=True)
        assert got.quantized is not None and got.operand is not None
        ok, text = same(got.quantized, want)
        operand = natural(got.operand.values, x.shape[1]).float().cpu()
        expected = unscaled_values(want.packed, want.block_scale)
        wrong = int((operand.nan_to_num(-1.0) != expected.nan_to_num(-1.0)).sum())
        padding = float(got.operand.values[~bad_rows(x)][:, :, x.shape[1] // 8 :].abs().sum())
        yield f"tokens {name}", ok and wrong == 0 and padding == 0, f"{text}, operands {wrong}"


def odd_addresses(device: str, shapes: dict, quick: bool) -> Iterator[Check]:
    """Rows that start anywhere, and packed codes too."""
    generator = torch.Generator().manual_seed(4)
    whole = torch.randn((3, 20, 131), generator=generator)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = whole.to(device, dtype)[:, :, 3:115]
        want = quantize_torch(x.cpu())
        yield f"weight at odd addresses {dtype}", *same(quantize_triton(x), want)
        packed = torch.zeros((3, 20, 61), dtype=torch.uint8, device=device)[:, :, 5:]
        scale = torch.zeros((3, 20, 9), dtype=torch.uint8, device=device)[:, :, 2:]
        total = torch.zeros(3, device=device)
        quantize_weight_into(x, packed, scale.view(torch.float8_e4m3fn), total)
        got = QuantizedTensor(packed, scale.view(torch.float8_e4m3fn), total)
        yield f"weight to odd addresses {dtype}", *same(got, want)
        want = quantize_torch(x[0].cpu(), per_token=True)
        got = quantize_rows(x[0], packed=True).quantized
        yield f"tokens at odd addresses {dtype}", *same(got, want)


def bad_rows(x: torch.Tensor) -> torch.Tensor:
    return ~x.isfinite().all(dim=1)


def natural(values: torch.Tensor, width: int) -> torch.Tensor:
    """An operand [rows, 8, plane] in the natural order of K: [rows, width]."""
    return values.transpose(1, 2).reshape(values.shape[0], -1)[:, :width]


def activations(device: str, shapes: dict, quick: bool) -> Iterator[Check]:
    """The fused activation: products that float32 can give, codes exactly the product's."""
    generator = torch.Generator().manual_seed(3)
    for name, (_, inner, _, _) in shapes.items():
        for activation in ACTIVATIONS_UNDER_TEST:
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                width = 2 * inner if activation.gated else inner
                y = torch.randn((5 if quick else 512, width), generator=generator) * 3
                y = y.to(dtype)
                y[1, 3] = torch.nan
                y[2, 5], y[2, inner // 2 + 5] = 90.0, -90.0
                got = quantize_rows(
                    y.to(device), activation=activation, packed=True, product=True, operand=False
                )
                assert got.quantized is not None and got.product is not None
                product = got.product.cpu()
                ok, text = same(got.quantized, quantize_torch(product, per_token=True))
                wrong = int(outside(product, *exact_activation(activation, y)).sum())
                differ = float((product != activation(y)).float().mean())
                text = f"{text}; product: {wrong} wrong, {differ:.1e} differ from torch"
                yield f"activation {activation.name} {name} {dtype}", ok and not wrong, text
