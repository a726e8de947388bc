"""BF16 columns of hot channels in the kernels of ``cuda/moe.cu``: counts and arguments."""

from dataclasses import dataclass

import torch

from quads_common.compensation.operands import InputCompensation

__all__ = [
    "MAX_COLUMNS",
    "NO_COLUMNS",
    "STEP",
    "Counts",
    "HotColumns",
    "column_counts",
    "hot_columns",
    "why_not_columns",
]

# The kernels are compiled with these: counts are multiples of STEP up to MAX_COLUMNS.
STEP, MAX_COLUMNS = 16, 128

# How many hot channels of w13's and w2's input have BF16 columns.
Counts = tuple[int, int]
NO_COLUMNS: Counts = (0, 0)


def why_not_columns(counts: Counts) -> str | None:
    """Why the kernels do not run with so many columns; None if they do."""
    for name, count in zip(("w13", "w2"), counts, strict=True):
        if count % STEP or not 0 <= count <= MAX_COLUMNS:
            return f"{count} BF16 columns of {name} (multiples of {STEP} from 0 to {MAX_COLUMNS})"
    return None


def column_counts(w13_input: InputCompensation, w2_input: InputCompensation) -> Counts:
    """Those of a layer's inputs."""
    return _count(w13_input.columns), _count(w2_input.columns)


def _count(columns: torch.Tensor | None) -> int:
    return 0 if columns is None else columns.shape[2]


@dataclass(frozen=True)
class HotColumns:
    """The columns of a layer, with what they are multiplied by.

    w13: [E, 2I, C] bf16 and hot: [T, C] bf16, the input's hot channels. w2: [E, H, C2] bf16 and
    channels: [1 or E, C2] int32, -1 for none, which the kernels take out of GEMM2's input. Each of
    the two may be None. w13 and w2 are tiled as the weights (``TileLayout.tile_columns``).
    """

    w13: torch.Tensor | None = None
    hot: torch.Tensor | None = None
    w2: torch.Tensor | None = None
    channels: torch.Tensor | None = None

    @property
    def counts(self) -> Counts:
        return _count(self.w13), _count(self.w2)

    def check(
        self, tokens: int, experts: int, hidden: int, inner: int, device: torch.device
    ) -> None:
        """Raise ``ValueError`` for tensors that the kernels would misread."""
        if reason := why_not_columns(self.counts):
            raise ValueError(f"the kernels cannot add {reason}")
        first, second = self.counts
        bf16, lists = torch.bfloat16, 0 if self.channels is None else self.channels.shape[0]
        if (first and self.hot is None) or (second and lists not in (1, experts)):
            raise ValueError("columns need the values or the channels that they belong to")
        wanted = (
            ("w13 columns", self.w13, bf16, (experts, 2 * inner, first)),
            ("hot", self.hot, bf16, (tokens, first)),
            ("w2 columns", self.w2, bf16, (experts, hidden, second)),
            ("channels", self.channels, torch.int32, (lists, second)),
        )
        for name, tensor, dtype, shape in wanted:
            if tensor is None:
                continue
            fits = tensor.dtype == dtype and tensor.shape == shape and tensor.device == device
            if not fits or not tensor.is_contiguous():
                raise ValueError(
                    f"{name} must be {dtype} {list(shape)}, contiguous, on {device}, got "
                    f"{tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())} on "
                    f"{tensor.device}"
                )
            if tensor.data_ptr() % 16:
                raise ValueError(f"{name} must start at a multiple of 16 bytes")


def hot_columns(
    w13_input: InputCompensation, hot: torch.Tensor | None, w2_input: InputCompensation
) -> HotColumns | None:
    """What the kernels take; None without columns. hot: ``CompensatedRows.hot`` of w13's."""
    first, second = column_counts(w13_input, w2_input)
    if not first and not second:
        return None
    channels = w2_input.channels
    return HotColumns(
        w13_input.columns if first else None,
        hot if first else None,
        w2_input.columns if second else None,
        channels.contiguous() if second and channels is not None else None,
    )
