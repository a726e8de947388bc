"""Comparisons of what a layer can be asked for: activations, biases, expert maps, skipped slots.

GEMM1's sums are exact, so results differ from those of the torch code only where the activation's
last bit moves a code of GEMM2's input: one of I codes is 1 / sqrt(I) of a slot's output, a few per
thousand of a token's, and most tokens have none. Yields as ``compare_gemm`` does.
"""

from collections.abc import Iterator

import torch

from quads_common.activation import Activation
from quads_common.format import QuantizedTensor
from quads_common.gemm import linear
from quads_common.kernels.gemm import linear_triton
from quads_common.kernels.moe import fused_moe_triton
from quads_common.moe import fused_moe
from tests.kernels.compare_gemm import random_ids
from tests.kernels.exact import random_rows, random_weight

Check = tuple[str, bool, str]


def variants(device: str, shapes: dict, quick: bool) -> Iterator[Check]:
    """Whole layers with every option, against the torch layer; all codes under all scales."""
    yield from every_code_and_scale(device)
    hidden, inner, experts, top_k = next(iter(shapes.values()))
    tokens = 5 if quick else 67
    for name, options in CASES.items():
        yield from one_case(name, options, device, hidden, inner, experts, top_k, tokens)


def every_code_and_scale(device: str) -> Iterator[Check]:
    """All 16 codes under all 127 finite scales, picked out one by one: exact in both formats."""
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes[0::2] | (codes[1::2] << 4)).expand(127, 8)
    scale = torch.arange(127, dtype=torch.uint8)[:, None]
    weight = QuantizedTensor(
        packed.contiguous().to(device),
        scale.to(device).view(torch.float8_e4m3fn),
        torch.tensor(0.25, device=device),
    )
    x = torch.eye(16, dtype=torch.bfloat16, device=device)
    for act in ("nvfp4", "bf16"):
        got = linear_triton(x, weight, act=act)
        wrong = int((got != linear(x, weight, act=act)).sum())
        yield f"every code under every scale, {act}", wrong == 0, f"{wrong} of {got.numel()} wrong"


# activation, skipped share of the slots, and what else is on
CASES: dict[str, dict] = {
    "swiglu": {},
    "swiglu limit": {"activation": Activation("silu", limit=1.5)},
    "swigluoai biases": {"activation": Activation("swigluoai", limit=7.0), "biases": True},
    "relu2 not gated": {"activation": Activation("relu2_no_mul")},
    "gelu not gated, skipped": {"activation": Activation("gelu_no_mul"), "skipped": 0.4},
    "expert map": {"mapped": True},
    "expert map, skipped": {"mapped": True, "skipped": 0.4},
    "all skipped": {"skipped": 1.1},
    "ids of no expert": {"beyond": True},
    "one expert": {"skewed": True},
    "router on the input": {"top_k": 1, "on_input": True},
    "W4A16": {"act": "bf16"},
    "W4A16 router on the input": {"act": "bf16", "top_k": 1, "on_input": True},
    "W4A16 biases, map, skipped": {
        "act": "bf16", "biases": True, "mapped": True, "skipped": 0.4,
    },
    "int64 ids, bf16 router": {"ids": torch.int64, "router": torch.bfloat16},
}  # fmt: skip


def one_case(
    name: str, options: dict, device: str, hidden: int, inner: int, experts: int, top_k: int,
    tokens: int,
) -> Iterator[Check]:  # fmt: skip
    generator = torch.Generator().manual_seed(11)
    activation = options.get("activation", Activation())
    top_k = options.get("top_k", top_k)
    rows = 2 * inner if activation.gated else inner
    local = experts // 2 if options.get("mapped") else experts
    w13 = random_weight(local, rows, hidden, generator=generator, exact=True)
    w2 = random_weight(local, hidden, inner, generator=generator, exact=True)
    x = random_rows(tokens, hidden, generator=generator, exact=True) / 8
    ids = random_ids(tokens, top_k, experts, generator).to(options.get("ids", torch.int32))
    if options.get("skewed"):
        ids[:] = torch.arange(top_k)
    ids[torch.rand(ids.shape, generator=generator) < options.get("skipped", 0)] = -1
    if options.get("beyond"):
        ids[:, 0] += experts
    router = torch.rand(ids.shape, generator=generator).to(options.get("router", torch.float32))
    keywords: dict = {"activation": activation, "act": options.get("act", "nvfp4")}
    if options.get("mapped"):
        expert_map = torch.full((experts,), -1, dtype=torch.int32)
        chosen = torch.randperm(experts, generator=generator)[:local]
        expert_map[chosen] = torch.arange(local, dtype=torch.int32)
        keywords["expert_map"] = expert_map
    if options.get("biases"):
        keywords["w13_bias"] = torch.randn((local, rows), generator=generator).to(x.dtype)
        keywords["w2_bias"] = torch.randn((local, hidden), generator=generator).to(x.dtype)
    keywords["apply_router_weight_on_input"] = options.get("on_input", False)
    want = fused_moe(x, w13, w2, router, ids, **keywords)

    def moved(value):
        if isinstance(value, QuantizedTensor):
            parts = (value.packed, value.block_scale, value.global_scale)
            return QuantizedTensor(*(part.to(device) for part in parts))
        return value.to(device) if isinstance(value, torch.Tensor) else value

    arguments = [moved(value) for value in (x, w13, w2, router, ids)]
    got = fused_moe_triton(*arguments, **{k: moved(v) for k, v in keywords.items()}).cpu()
    share = float((got != want).float().mean())
    error = float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))
    yield f"variant {name}", error < 5e-3, f"{share:.1e} differ, rms {error:.1e}"
