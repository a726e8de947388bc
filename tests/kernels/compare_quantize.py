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
    packed.fill_(0xA5)
    scale.fill_(0x5A)
    total.fill_(7.0)
    amax = torch.tensor([-9.0, -1e-30, -0.0, 9.0], device=device)
    flags = quantize_weight_into(
        w[:1].expand(4, -1, -1), packed, scale.view(torch.float8_e4m3fn), total, amax=amax
    )
    ok = flags.tolist() == [1, 1, 0, 0] and total.tolist()[:2] == [7.0, 7.0]
    ok &= bool((packed[:2] == 0xA5).all() and (scale[:2] == 0x5A).all())
    yield "weight under a negative amax", ok, f"flags {flags.tolist()}, {total.tolist()}"


# Shapes that are quantized as weights and as rows.
SHAPES = [
    (32,), (1, 16), (3, 32), (2, 3, 32), (2, 2, 3, 32), (2, 1, 2, 1, 16),
    (0, 32), (4, 0), (0,), (0, 0), (2, 0, 32), (0, 4, 32), (2, 3, 0), (2, 0, 3, 32),
    (), (24,), (2, 40), (0, 8),
]  # fmt: skip


AMAXES = {
    "float32": torch.tensor([7.0, 9.0]),
    "bf16": torch.tensor([7.0, 9.0]).bfloat16(),
    "float16": torch.tensor([7.0, 9.0]).half(),
    "float64": torch.tensor([7.1, 9.0], dtype=torch.float64),
    "with strides": torch.tensor([7.0, 1.0, 9.0, 1.0])[::2],
    "of one number": torch.tensor(7.0),
    "of another length": torch.ones(3),
    "of two dimensions": torch.ones((2, 1)),
    "negative": torch.tensor([7.0, -1.0]),
    "negative zero": torch.tensor([7.0, -0.0]),
    "zero": torch.tensor([0.0, 9.0]),
    "NaN": torch.tensor([torch.nan, 9.0]),
    "Inf": torch.tensor([7.0, torch.inf]),
    "too large": torch.tensor([7.0, 3.38e38]),
}


def calls() -> Iterator[tuple[str, torch.Tensor, dict]]:
    """Arguments of both quantizers, good ones and bad ones, one thing wrong at a time."""
    generator = torch.Generator().manual_seed(7)
    for shape in SHAPES:
        for per_token in (False, True):
            x = torch.randn(shape, generator=generator)
            yield f"{list(shape)} {per_token=}", x, {"per_token": per_token, "name": "layer.w"}
    for dtype in (torch.float64, torch.int32, torch.uint8):
        for per_token in (False, True):
            yield f"{dtype} {per_token=}", torch.ones((2, 16)).to(dtype), {"per_token": per_token}
    x = torch.randn((2, 3, 32), generator=generator)
    for name, amax in AMAXES.items():
        for rule in ("pow2", "te"):
            yield f"amax {name} {rule}", x, {"amax": amax, "global_scale_rule": rule}
    for value in (torch.nan, torch.inf, -torch.inf, -3.38e38):
        bad = x.clone()
        bad[1, 2, 5] = value
        for name, y in {"experts": bad, "matrix": bad[1], "row": bad[1, 2]}.items():
            yield f"{name} with {value}", y, {"name": "layer.w"}
        yield f"{value} under a finite amax", bad, {"amax": torch.tensor([7.0, 9.0])}
        yield f"rows with {value}", bad, {"per_token": True}
    yield "another rule", x, {"global_scale_rule": "static"}
    yield "rows with amax", x, {"per_token": True, "amax": torch.tensor([7.0, 9.0])}
    yield "rows with a rule", x, {"per_token": True, "global_scale_rule": "te"}
    yield "with a gradient", x.clone().requires_grad_(), {}


def same_answers(device: str, shapes: dict, quick: bool) -> Iterator[Check]:
    """Both quantizers give the same shapes and bytes, or raise the same type and message."""
    for name, x, options in calls():
        answers = []
        for quantizer, place in ((quantize_triton, device), (quantize_torch, "cpu")):
            moved = {k: v.to(place) if k == "amax" else v for k, v in options.items()}
            try:
                answers.append(quantizer(x.to(place), **moved))
            except (ValueError, TypeError) as error:
                answers.append((type(error), str(error)))
        got, want = answers
        if isinstance(want, QuantizedTensor) and isinstance(got, QuantizedTensor):
            ok, text = same(got, want)
            sizes = [[list(t.shape) for t in vars(q).values()] for q in answers]
            ok, text = ok and sizes[0] == sizes[1], f"{text}, shapes {sizes}"
        else:
            ok, text = got == want, f"{got} and {want}"
        yield f"answer to {name}", ok, text


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
