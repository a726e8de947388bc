"""``Site``: one compensated GEMM input, and the part of it that a rank holds."""

from collections.abc import Sequence
from dataclasses import dataclass

from quads_common.compensation.options import KINDS
from quads_common.format import BLOCK_SIZE

__all__ = ["Site", "linear_site", "moe_sites"]


@dataclass(frozen=True)
class Site:
    """An input of width ``full_width``, of which this rank has ``width`` channels from ``offset``.

    name: unique in the model, the same on every rank: the module's checkpoint name and the kind.
    kind: "w13", "w2" or "linear".
    groups: global ids of the lists that this rank has: its experts for w2, else (0,).
    num_groups: lists of the whole model's layer.

    Raises:
        ValueError: another kind, a width that cuts a block, a place outside the input.
    """

    name: str
    kind: str
    width: int
    full_width: int
    offset: int = 0
    groups: tuple[int, ...] = (0,)
    num_groups: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"{self.name}: kind {self.kind!r} is not one of {list(KINDS)}")
        if self.width < BLOCK_SIZE or self.width % BLOCK_SIZE:
            raise ValueError(f"{self.name}: width {self.width} is not a multiple of {BLOCK_SIZE}")
        equal_shards = self.full_width % self.width == 0 and self.offset % self.width == 0
        if not equal_shards or not 0 <= self.offset <= self.full_width - self.width:
            raise ValueError(
                f"{self.name}: {self.width} channels from {self.offset} are no shard of "
                f"{self.full_width}"
            )
        ids = set(self.groups)
        if len(ids) != len(self.groups) or not ids <= set(range(self.num_groups)):
            raise ValueError(
                f"{self.name}: groups {list(self.groups)} are not distinct ids below "
                f"{self.num_groups}"
            )

    @property
    def shards(self) -> int:
        """Ranks that share the input's channels; 1 if every rank has all of them."""
        return self.full_width // self.width

    @property
    def shard(self) -> int:
        """Which of them this rank is."""
        return self.offset // self.width

    @property
    def blocks(self) -> int:
        """16-blocks of this rank."""
        return self.width // BLOCK_SIZE


def moe_sites(
    name: str,
    *,
    hidden: int,
    inner: int,
    tp_size: int,
    tp_rank: int,
    experts: Sequence[int],
    num_experts: int,
) -> tuple[Site, Site]:
    """The inputs of w13 and w2 of a rank's routed experts.

    name: the experts module's. hidden: the model's. inner: the rank's intermediate size, one of
    ``tp_size`` shards (1 with expert parallelism). experts: global ids in the rank's order.
    """
    w2 = Site(
        f"{name}.w2",
        "w2",
        inner,
        inner * tp_size,
        tp_rank * inner,
        tuple(experts),
        num_experts,
    )
    return Site(f"{name}.w13", "w13", hidden, hidden), w2


def linear_site(name: str, *, width: int, full_width: int, tp_rank: int) -> Site:
    """The input of a linear layer; width: the rank's K, which is ``full_width`` or a shard."""
    offset = tp_rank * width if width < full_width else 0
    return Site(name, "linear", width, full_width, offset)
