"""The NVFP4 contract, version 1: every fact about the format, stated once.

An NVFP4 tensor holds E2M1 codes in blocks of 16 consecutive elements along K (the dimension that a
GEMM reduces), one E4M3 scale per block and one float32 global scale::

    x  ~  e2m1(code) * block_scale * global_scale

Steps of the quantizer, all in float32, round to nearest with ties to even, no fused multiply-add
(the order of TransformerEngine's reference and of FlashInfer with fast math off)::

    block_scale = e4m3(min(block_amax * (global_scale_inv * ONE_SIXTH), 448))
    encode      = min(1 / (block_scale * global_scale), FLT_MAX)
    code        = e2m1(x * encode)            # saturates at 6

Two directions of the global scale exist in the field. Here ``global_scale`` is always the decode
multiplier and ``global_scale_inv`` the encode multiplier, ``global_scale`` being
fl32(1 / global_scale_inv).

Choices that other implementations make differently:

- A block whose scale is 0 (its amax is 0, or the scale underflows E4M3) has all codes 0x0 and
  decodes to exact 0. In every other block the sign bit is that of the input, so -0.0 gives 0x8.
- Codes: even column in the low nibble.
- Weights are rounded to bfloat16 first: what the rollout holds is what the trainer ships.
- A weight's ``global_scale_inv`` is the largest power of two not above 2688 / amax, so the decoded
  weight is exact in bfloat16. Quantizing it again with the same amax gives the same values, but in
  blocks whose scale is below 3 * 2^-9 (amax under 1e-5 of the tensor's). With its own amax, bytes
  may differ where values do not: an amax that decodes to 1344 * 2^k halves the global scale. Rule
  ``"te"`` takes fl32(2688 / amax), as TransformerEngine does.
- An activation has one global scale per token (row), fl32(2688 / row amax): a token's codes never
  depend on its batch.
- An amax below 1e-30 counts as zero; a zero tensor or row has global scale 1.
- A row with NaN or Inf decodes to NaN as a whole (codes 0, block scales NaN) and touches no other.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

__all__ = [
    "AMAX_FLOOR",
    "BLOCK_SIZE",
    "CONTRACT_VERSION",
    "E2M1_MAX",
    "E2M1_MIDPOINTS",
    "E2M1_VALUES",
    "E4M3_MAX",
    "E4M3_NAN_BYTE",
    "FLT_MAX",
    "GLOBAL_SCALE_RULES",
    "INPUT_DTYPES",
    "ONE_SIXTH",
    "SWIZZLE_COLS",
    "SWIZZLE_ROWS",
    "TENSOR_MAX",
    "WEIGHT_AMAX_MAX",
    "GlobalScaleRule",
    "QuantizedTensor",
    "check_block_aligned",
]

CONTRACT_VERSION = 1

BLOCK_SIZE = 16  # elements along K that share one block scale
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitude of codes 0..7; bit 3 is the sign
# Boundary below magnitude code i + 1, and whether a value right on it goes up: ties go to the code
# with an even mantissa bit.
E2M1_MIDPOINTS = (
    (0.25, False),
    (0.75, True),
    (1.25, False),
    (1.75, True),
    (2.5, False),
    (3.5, True),
    (5.0, False),
)
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_NAN_BYTE = 0x7F
TENSOR_MAX = E2M1_MAX * E4M3_MAX  # 2688: what the amax of a tensor maps to
ONE_SIXTH = 0.16666667163372040  # fl32(1 / 6)
FLT_MAX = 3.4028234663852886e38
AMAX_FLOOR = 1e-30
# Largest weight that never decodes above bfloat16's range: its block scale, amax / 6 * 2^-117, must
# round to 320 and not to 352, so amax is at most 6 * 336 * 2^117.
WEIGHT_AMAX_MAX = 252 * 2.0**120

# Tile of the tensor cores' block-scale layout: 128 rows by 4 scales, stored as 32 x 4 x 4.
SWIZZLE_ROWS = 128
SWIZZLE_COLS = 4

INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

GlobalScaleRule = Literal["pow2", "te"]
GLOBAL_SCALE_RULES: tuple[str, ...] = get_args(GlobalScaleRule)


@dataclass(frozen=True)
class QuantizedTensor:
    """An NVFP4 tensor of logical shape [..., K].

    packed: [..., K/2] uint8, two codes a byte, even column in the low nibble.
    block_scale: [..., K/16] float8_e4m3fn, not swizzled.
    global_scale: float32 decode multiplier. A weight has one per matrix, shape
        ``packed.shape[:-2]``: a scalar for [N, K], [E] for stacked experts. Per token: [..., 1].
    """

    packed: torch.Tensor
    block_scale: torch.Tensor
    global_scale: torch.Tensor

    def __post_init__(self) -> None:
        lead, half_k = self.packed.shape[:-1], self.packed.shape[-1]
        expected = {
            "packed": (torch.uint8, self.packed.shape),
            "block_scale": (torch.float8_e4m3fn, (*lead, half_k * 2 // BLOCK_SIZE)),
        }
        for name, (dtype, shape) in expected.items():
            tensor = getattr(self, name)
            if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
                raise ValueError(
                    f"{name} must be {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}"
                )
        if self.global_scale.dtype != torch.float32:
            raise ValueError(f"global_scale must be float32, got {self.global_scale.dtype}")
        allowed = ((*lead, 1), tuple(lead[:-1]))
        if tuple(self.global_scale.shape) not in allowed:
            raise ValueError(
                f"global_scale must have shape {list(allowed[0])} (per token) or "
                f"{list(allowed[1])} (per matrix), got {list(self.global_scale.shape)}"
            )

    @property
    def shape(self) -> torch.Size:
        """Logical shape [..., K]."""
        return torch.Size((*self.packed.shape[:-1], self.packed.shape[-1] * 2))

    @property
    def per_token(self) -> bool:
        """Whether each row has its own global scale."""
        return self.global_scale.ndim == self.packed.ndim

    @property
    def row_global_scale(self) -> torch.Tensor:
        """The global scale in a shape that broadcasts over [..., K]."""
        if self.per_token:
            return self.global_scale
        return self.global_scale.reshape(*self.global_scale.shape, *(1,) * min(self.packed.ndim, 2))


def check_block_aligned(k: int, what: str) -> None:
    """Raise ``ValueError`` unless ``k`` elements are whole blocks; ``what`` names the tensor."""
    if k % BLOCK_SIZE:
        raise ValueError(
            f"{what}: K = {k} is not a multiple of {BLOCK_SIZE}, so a block would be cut"
        )
