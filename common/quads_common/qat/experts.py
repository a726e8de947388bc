"""Fake quantization of expert weights as a function, for trainers that own their MoE layer."""

import torch

from quads_common.format import GlobalScaleRule, check_block_aligned
from quads_common.qat.effective import check_amax
from quads_common.qat.ops import AmaxHook, effective_weight, matrix_amax

__all__ = ["fake_quantize_experts"]


def fake_quantize_experts(
    w13: torch.Tensor,
    w2: torch.Tensor,
    *,
    w13_amax: torch.Tensor | None = None,
    w2_amax: torch.Tensor | None = None,
    amax_hook: AmaxHook | None = None,
    global_scale_rule: GlobalScaleRule = "pow2",
    check_finite: bool = True,
    name: str = "experts",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights that the rollout computes with, with a straight-through gradient.

    w13: [E, 2I, H] bf16, fp16 or fp32, rows [gate | up] in any order (one scale for both); or one
        matrix [2I, H]. w2: [E, H, I] or [H, I]. Both this rank's part. Results keep the dtype.
    w13_amax, w2_amax: float32 [E] (or scalar) of the full matrices, where the trainer has them.
    amax_hook: called once, unless both are given, with this rank's float32 [2, E] maxima (rows w13,
        w2); takes the maximum over the ranks that hold parts of the SAME matrices (expert tensor
        parallel), in place or by its return value, such as
        ``lambda amax: torch.distributed.all_reduce(amax, ReduceOp.MAX, group)``. Ranks that own
        whole experts (expert parallel) need none: their maxima are complete, and a maximum over
        ranks would mix different experts.
    check_finite: read the maxima back, once, and raise; else a bad matrix becomes NaN.

    Raises:
        ValueError: NaN or Inf; K cuts a block of 16; an amax of the wrong shape.
    """
    check_block_aligned(w13.shape[-1], f"{name}.w13 {list(w13.shape)}")
    check_block_aligned(w2.shape[-1], f"{name}.w2 {list(w2.shape)}")
    if w13.ndim not in (2, 3) or w13.shape[:-2] != w2.shape[:-2]:
        raise ValueError(
            f"{name}: w13 {list(w13.shape)} and w2 {list(w2.shape)} must both be stacks of the "
            "same number of experts, or both one matrix"
        )
    own = torch.stack([matrix_amax(w13), matrix_amax(w2)])
    amax = own.clone()
    if amax_hook is not None and (w13_amax is None or w2_amax is None):
        with torch.no_grad():
            reduced = amax_hook(amax)
        amax = amax if reduced is None else reduced
    w13_amax = _given(w13_amax, amax[0], f"{name}: w13_amax")
    w2_amax = _given(w2_amax, amax[1], f"{name}: w2_amax")
    if check_finite:
        known = torch.stack([w13_amax, w2_amax])
        check_amax(list(torch.maximum(own, known)), [f"{name}.w13", f"{name}.w2"])
    return (
        effective_weight(w13, w13_amax, rule=global_scale_rule),
        effective_weight(w2, w2_amax, rule=global_scale_rule),
    )


def _given(amax: torch.Tensor | None, otherwise: torch.Tensor, what: str) -> torch.Tensor:
    if amax is None:
        return otherwise
    if amax.shape != otherwise.shape:
        raise ValueError(f"{what} must have shape {list(otherwise.shape)}, got {list(amax.shape)}")
    return amax.detach().to(otherwise)
