"""Layers and routings that all MoE benchmarks share: random weights, fresh tokens."""

from dataclasses import dataclass, field

import torch

from benchmarks.moe_shapes import SHAPES
from quads_common.activation import Activation
from quads_common.backend import choose_backend, moe_backend
from quads_common.format import QuantizedTensor
from quads_common.kernels.moe import DOWN, GATE_UP
from quads_common.kernels.quantize import quantize_triton

__all__ = ["Layer", "Routing", "make_layers", "make_routings"]


@dataclass(eq=False)
class Layer:
    """w13: [E, 2I, H], w2: [E, H, I]; weights of the peers are added to ``extra``.

    backend: what the layer gets on this GPU; tiled: its weights as ``hopper`` stores them.
    """

    w13_bf16: torch.Tensor
    w2_bf16: torch.Tensor
    w13: QuantizedTensor
    w2: QuantizedTensor
    backend: str = "triton"
    tiled: tuple[QuantizedTensor, QuantizedTensor] | None = None
    extra: dict[str, object] = field(default_factory=dict)

    @property
    def experts(self) -> int:
        return self.w13.shape[0]

    def stored(self, backend: str) -> tuple[QuantizedTensor, QuantizedTensor]:
        """w13 and w2 as ``backend`` takes them."""
        if backend != "hopper":
            return self.w13, self.w2
        assert self.tiled is not None, f"{self.backend=}"
        return self.tiled

    def nbytes(self, routing: "Routing") -> int:
        """Bytes of the NVFP4 weights of the experts that a routing uses."""
        total = sum(w.packed.nbytes + w.block_scale.nbytes for w in (self.w13, self.w2))
        return total * routing.ids.unique().numel() // self.experts


@dataclass(eq=False)
class Routing:
    """x: [T, H] bf16. weights: [T, k] float32. ids: [T, k] int32."""

    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor


def make_layers(shape: str, count: int) -> list[Layer]:
    hidden, inner, experts, _ = SHAPES[shape]
    backend = choose_backend("auto", "cuda", torch.cuda.get_device_capability())
    backend, _ = moe_backend(backend, experts, hidden, inner, Activation(), "nvfp4")
    layers = []
    for _ in range(count):
        w13 = torch.randn((experts, 2 * inner, hidden), device="cuda", dtype=torch.bfloat16)
        w2 = torch.randn((experts, hidden, inner), device="cuda", dtype=torch.bfloat16)
        w13, w2 = w13 * 0.02, w2 * 0.02
        q13, q2 = quantize_triton(w13), quantize_triton(w2)
        tiled = (GATE_UP.tile(q13), DOWN.tile(q2)) if backend == "hopper" else None
        layers.append(Layer(w13, w2, q13, q2, backend, tiled))
    return layers


def make_routings(shape: str, tokens: int, skew: bool = False) -> list[Routing]:
    """Several routings; more of them for small batches, so that together they exceed the L2."""
    hidden, _, experts, top_k = SHAPES[shape]
    popularity = 1 / torch.arange(1, experts + 1, device="cuda") if skew else torch.ones(experts)
    routings = []
    for _ in range(8 if tokens <= 4 else 2):
        p = popularity.to("cuda").expand(tokens, experts)
        ids = torch.multinomial(p, top_k, replacement=False).int()
        weights = torch.rand((tokens, top_k), device="cuda")
        x = torch.randn((tokens, hidden), device="cuda", dtype=torch.bfloat16)
        routings.append(Routing(x, weights / weights.sum(1, keepdim=True), ids))
    return routings
