"""Activations as the native FP4 GEMMs read them: packed codes and E4M3 block scales."""

from dataclasses import dataclass

import torch

from quads_common.activation import Activation
from quads_common.compensation.operands import InputCompensation, channel_mask
from quads_common.compensation.staging import Staging
from quads_common.format import BLOCK_SIZE, QuantizedTensor
from quads_common.kernels.compensated_rows import compensate_rows
from quads_common.kernels.route import Routes
from quads_common.kernels.rows import quantize_rows
from quads_common.moe import local_expert_ids
from quads_common.packing import unscaled_values
from quads_common.quantize import activation_global_scale_inv, quantize, quantize_blocks

__all__ = ["PackedRows", "pack_rows", "pack_rows_ref"]


@dataclass(frozen=True)
class PackedRows:
    """Operands of rows of activations; what they mean stands in ``compensation.operands``.

    packed: [1, rows, K/2] uint8 codes of the cold channels, or [2, ..]: then of the residual, which
        is 0 outside the selected blocks.
    block_scale: [1 or 2, rows, K/16] float8_e4m3fn. row_scale: [rows] float32 global scales.
    hot: [rows, C] bf16 values of the hot channels, 0 where the list has -1; None: no splice.
    """

    packed: torch.Tensor
    block_scale: torch.Tensor
    row_scale: torch.Tensor
    hot: torch.Tensor | None = None

    @property
    def width(self) -> int:
        """K."""
        return self.packed.shape[2] * 2

    @property
    def has_residual(self) -> bool:
        """Whether RAC's residual is there."""
        return self.packed.shape[0] == 2


def pack_rows(
    x: torch.Tensor,
    lists: InputCompensation | None = None,
    *,
    activation: Activation | None = None,
    row_factor: torch.Tensor | None = None,
    routes: Routes | None = None,
    staging: Staging | None = None,
) -> PackedRows:
    """Activation function, rounding to the model's dtype and quantization of rows, in one pass.

    The arguments are those of ``kernels.compensated_rows.compensate_rows``; with neither lists nor
    staging it is ``kernels.rows.quantize_rows`` that runs. Rows of skipped slots are left
    uninitialized.

    Raises:
        ValueError, TypeError: shapes or dtypes that do not fit; splice of other activations than
            bf16.
    """
    lists = lists or InputCompensation()
    nothing = lists.block_mask is None and not _is_spliced(lists)
    if nothing and staging is None:
        q = quantize_rows(
            x, activation=activation, row_factor=row_factor, routes=routes, operand=False,
            packed=True,
        ).quantized  # fmt: skip
        assert q is not None
        return _packed_rows([q], None)
    rows = compensate_rows(
        x, lists, packed=True, operand=False, activation=activation, row_factor=row_factor,
        routes=routes, staging=staging,
    )  # fmt: skip
    assert rows.codes is not None and rows.quantized is not None
    scales = rows.quantized.global_scale.flatten()
    return PackedRows(*rows.codes, scales, rows.hot)


def pack_rows_ref(
    x: torch.Tensor,
    lists: InputCompensation | None = None,
    *,
    activation: Activation | None = None,
    row_factor: torch.Tensor | None = None,
    routes: Routes | None = None,
) -> PackedRows:
    """``pack_rows`` in torch; rows of skipped slots are unspecified."""
    lists = lists or InputCompensation()
    if activation is not None:
        x = activation(x)
    if row_factor is not None:
        x = (x.float() * row_factor.float().reshape(-1, 1)).to(x.dtype)
    group = torch.zeros(len(x), dtype=torch.long, device=x.device)
    if routes is not None:
        ids = local_expert_ids(routes.topk_ids, routes.expert_map).flatten().long()
        group = torch.where(ids < routes.num_experts, ids, -1).clamp(min=0)
    hot, cold = None, x
    if _is_spliced(lists):
        assert lists.channels is not None
        of_row = _of_rows(lists.channels, group)
        cold = torch.where(channel_mask(of_row, x.shape[1]), 0, x)
        hot = torch.where(of_row >= 0, x.gather(1, of_row.clamp(min=0).long()), 0)
    q = quantize(cold, per_token=True)
    if lists.block_mask is None:
        return _packed_rows([q], hot)
    chosen = _of_rows(lists.block_mask, group)
    values = cold.float()
    left = values - unscaled_values(q.packed, q.block_scale) * q.global_scale
    row_amax = values.abs().amax(dim=1, keepdim=True) if x.numel() else q.global_scale
    packed, scale, _ = quantize_blocks(left, activation_global_scale_inv(row_amax))
    packed = torch.where(chosen.repeat_interleave(BLOCK_SIZE // 2, dim=1), packed, 0)
    scale = torch.where(chosen, scale.view(torch.uint8), 0).view(torch.float8_e4m3fn)
    return _packed_rows([q, QuantizedTensor(packed, scale, q.global_scale)], hot)


def _is_spliced(lists: InputCompensation) -> bool:
    return lists.channels is not None and lists.channels.shape[1] > 0


def _of_rows(lists: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """The list of each row [rows, ..]: that of its group, or the only one."""
    return lists[group] if len(lists) > 1 else lists.expand(len(group), -1)


def _packed_rows(parts: list[QuantizedTensor], hot: torch.Tensor | None) -> PackedRows:
    """One part is not copied."""
    packed, scale = parts[0].packed.unsqueeze(0), parts[0].block_scale.view(torch.uint8)[None]
    if len(parts) > 1:
        packed = torch.stack([q.packed for q in parts])
        scale = torch.stack([q.block_scale.view(torch.uint8) for q in parts])
    row_scale = parts[0].global_scale.flatten()
    return PackedRows(packed, scale.view(torch.float8_e4m3fn), row_scale, hot)
