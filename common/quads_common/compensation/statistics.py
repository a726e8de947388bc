"""Streaming statistics of a GEMM's input: per channel and per 16-block, in fixed buffers.

For each list ("group": the layer for w13 and linears, each expert for w2) the buffers hold the
number of rows, the mean and the sum of squared deviations of every channel, and sums of residual
energies of every block. Batches are merged by Chan's formula::

    delta = mean_b - mean
    mean += delta * n_b / n
    m2   += m2_b + delta^2 * n_a * n_b / n          n = n_a + n_b

All sums are float64 and in a fixed order (matrix products with one-hot rows, no atomics), so equal
inputs give equal bits, and neither a large mean nor many rows cost precision. Nothing here
synchronizes with the host or has data-dependent shapes. Memory: 16 bytes a channel and group.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from quads_common.format import BLOCK_SIZE

__all__ = [
    "ChannelStatistics",
    "RowEnergies",
    "copy_into",
    "new_statistics",
    "reset",
    "update",
]


@dataclass(frozen=True)
class RowEnergies:
    """What quantization loses of each row and block: sums of squares over 16 channels.

    plain: [R, K/16] of x - Q(x), without compensation.
    served: [R, K/16] of the FP4 operand as served, hot channels taken out: what RAC can remove.
    left: [R, K/16] what remains of ``served`` where the block's residual is added.
    underflows: [R, K/16] bool: the residual is not 0, but its block scale rounds to 0.
    channels: [R, K] squares behind ``plain``, or None where nobody wants them.
    """

    plain: torch.Tensor
    served: torch.Tensor
    left: torch.Tensor
    underflows: torch.Tensor
    channels: torch.Tensor | None = None


@dataclass(frozen=True)
class ChannelStatistics:
    """Buffers of G groups and K channels, float64 unless noted, changed in place only.

    count: [G] rows. mean, m2: [G, K], m2 the sum of squared deviations from the mean.
    plain_energy, served_energy, left_energy: [G, K/16] sums of ``RowEnergies``.
    underflows: [G, K/16] rows whose residual was lost.
    channel_energy: [G, K] residual energy of each channel, or [G, 0] if not gathered.
    offered: [1] int64, tokens that came by, sampled or not.
    """

    count: torch.Tensor
    mean: torch.Tensor
    m2: torch.Tensor
    plain_energy: torch.Tensor
    served_energy: torch.Tensor
    left_energy: torch.Tensor
    underflows: torch.Tensor
    channel_energy: torch.Tensor
    offered: torch.Tensor

    @property
    def variance(self) -> torch.Tensor:
        """[G, K] population variance, 0 without rows."""
        return self.m2 / self.count.clamp(min=1).unsqueeze(1)

    @property
    def second_moment(self) -> torch.Tensor:
        """[G, K] mean square, 0 without rows."""
        return self.variance + self.mean.square()

    def buffers(self) -> dict[str, torch.Tensor]:
        """Every tensor by field name, in order."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def of(cls, buffers: Sequence[torch.Tensor]) -> "ChannelStatistics":
        """From the tensors of ``buffers()``, in order; shares their memory."""
        return cls(*buffers)


_ENERGIES = ("plain_energy", "served_energy", "left_energy", "underflows", "channel_energy")


def new_statistics(
    groups: int,
    width: int,
    *,
    device: torch.device | str = "cpu",
    channel_energy: bool = False,
) -> ChannelStatistics:
    """Empty statistics. channel_energy: gather it too."""

    def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    blocks = width // BLOCK_SIZE
    return ChannelStatistics(
        count=zeros(groups),
        mean=zeros(groups, width),
        m2=zeros(groups, width),
        plain_energy=zeros(groups, blocks),
        served_energy=zeros(groups, blocks),
        left_energy=zeros(groups, blocks),
        underflows=zeros(groups, blocks),
        channel_energy=zeros(groups, width if channel_energy else 0),
        offered=zeros(1, dtype=torch.int64),
    )


def update(
    stats: ChannelStatistics,
    x: torch.Tensor,
    energies: RowEnergies,
    row_mask: torch.Tensor | None = None,
    group: torch.Tensor | None = None,
) -> None:
    """Count rows, in place. A row with NaN or Inf counts nowhere.

    x: [R, K] any float dtype. row_mask: [R] bool, rows to count; None: all.
    group: [R] integers 0..G-1, others count nowhere; None: group 0.
    """
    keep = x.isfinite().all(dim=1)
    if row_mask is not None:
        keep = keep & row_mask
    groups = stats.count.shape[0]
    if group is None:
        group = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
    ids = torch.arange(groups, device=x.device).unsqueeze(1)
    member = ((group.unsqueeze(0) == ids) & keep.unsqueeze(0)).double()  # [G, R]
    values = _kept(x, keep)
    count = member.sum(dim=1)
    mean = (member @ values) / count.clamp(min=1).unsqueeze(1)  # [G, R] @ [R, K]
    deviation = values - mean[group.long().clamp(0, groups - 1)]
    _merge_moments(stats, count, mean, member @ deviation.square())
    stats.plain_energy.add_(member @ _kept(energies.plain, keep))
    stats.served_energy.add_(member @ _kept(energies.served, keep))
    stats.left_energy.add_(member @ _kept(energies.left, keep))
    stats.underflows.add_(member @ _kept(energies.underflows, keep))
    if stats.channel_energy.shape[1]:
        assert energies.channels is not None, f"{stats.channel_energy.shape=}"
        stats.channel_energy.add_(member @ _kept(energies.channels, keep))


def reset(stats: ChannelStatistics, groups: torch.Tensor | None = None) -> None:
    """Forget the rows of some groups ([G] bool) or of all, in place; keeps ``offered``."""
    for name in ("count", "mean", "m2", *_ENERGIES):
        tensor = getattr(stats, name)
        if groups is None:
            tensor.zero_()
        else:
            tensor.masked_fill_(groups.reshape(-1, *(1,) * (tensor.ndim - 1)), 0)


def copy_into(target: dict[str, torch.Tensor], source: dict[str, torch.Tensor], what: str) -> None:
    """Copy tensors by name into buffers, which keep their addresses.

    Raises:
        ValueError: a name is missing or unknown, or a shape differs; ``what`` names the owner.
    """
    if target.keys() != source.keys():
        raise ValueError(f"{what}: has {sorted(source)}, expected {sorted(target)}")
    for name, tensor in target.items():
        if tensor.shape != source[name].shape:
            raise ValueError(
                f"{what}: {name} has shape {list(source[name].shape)}, expected "
                f"{list(tensor.shape)}"
            )
    for name, tensor in target.items():
        tensor.copy_(source[name])


def _merge_moments(
    stats: ChannelStatistics, count: torch.Tensor, mean: torch.Tensor, m2: torch.Tensor
) -> None:
    """Merge rows of a batch: count [G], mean and m2 [G, K]."""
    total = stats.count + count
    share = count / total.clamp(min=1)
    delta = mean - stats.mean
    stats.m2.add_(m2 + delta.square() * (stats.count * share).unsqueeze(1))
    stats.mean.add_(delta * share.unsqueeze(1))
    stats.count.copy_(total)


def _kept(values: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """[R, n] as float64, rows that do not count replaced by 0: they may hold NaN."""
    return torch.where(keep.unsqueeze(1), values.double(), 0.0)
