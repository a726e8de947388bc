"""Activation functions between the two GEMMs of an MoE layer."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

__all__ = ["ACTIVATIONS", "Activation", "ActivationName"]

# "swiglu": silu(gate) * up. "swigluoai": gpt-oss' clamped form on interleaved gate/up columns.
# "*_no_mul": not gated (Nemotron-H uses relu2_no_mul).
ActivationName = Literal["silu", "swigluoai", "silu_no_mul", "gelu_no_mul", "relu2_no_mul"]
ACTIVATIONS: tuple[str, ...] = get_args(ActivationName)


@dataclass(frozen=True)
class Activation:
    """What turns GEMM1's output into GEMM2's input: float32 inside, rounded once at the end.

    name: one of ``ACTIVATIONS`` (vLLM's names). "silu" is SwiGLU: columns [gate | up].
    limit: SwiGLU's clamp: gate at most ``limit``, up within +-``limit``. None: no clamp.
    alpha, beta: of "swigluoai", ``(up + beta) * gate * sigmoid(alpha * gate)``.

    Raises:
        ValueError: another name, or a limit that is not positive.
    """

    name: str = "silu"
    limit: float | None = None
    alpha: float = 1.702
    beta: float = 1.0

    def __post_init__(self) -> None:
        if self.name not in ACTIVATIONS:
            raise ValueError(
                f"MoE activation {self.name!r} is not supported: one of {list(ACTIVATIONS)}"
            )
        if self.limit is not None and not self.limit > 0:
            raise ValueError(f"the activation's limit must be positive, got {self.limit}")
        if self.limit is not None and not self.gated:
            raise ValueError(f"{self.name} takes no limit, got {self.limit}")

    @property
    def gated(self) -> bool:
        """Whether GEMM1 yields gate and up."""
        return not self.name.endswith("_no_mul")

    def __call__(self, y: torch.Tensor) -> torch.Tensor:
        """y: [M, 2I] (gated) or [M, I], model dtype. Returns [M, I] in the same dtype."""
        values = y.float()
        if not self.gated:
            return self._plain(values).to(y.dtype)
        if self.name == "swigluoai":
            gate, up = values[..., 0::2], values[..., 1::2]
        else:
            gate, up = values.chunk(2, dim=-1)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        if self.name == "swigluoai":
            product = (up + self.beta) * (gate * torch.sigmoid(self.alpha * gate))
        else:
            product = torch.nn.functional.silu(gate) * up
        return product.to(y.dtype)

    def _plain(self, values: torch.Tensor) -> torch.Tensor:
        if self.name == "relu2_no_mul":
            return torch.relu(values).square()
        if self.name == "gelu_no_mul":
            return torch.nn.functional.gelu(values)
        return torch.nn.functional.silu(values)
