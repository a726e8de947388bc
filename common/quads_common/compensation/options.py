"""The options of compensation, their presets, and what is allowed.

RAC (residual activation compensation) quantizes what the FP4 activation lost a second time, for the
16-blocks that lose most. Splice takes single channels out of the FP4 activation and multiplies them
as they are.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

__all__ = [
    "KINDS",
    "PRESETS",
    "SPLICE_WEIGHTS",
    "STATISTICS",
    "CompensationOptions",
    "Statistic",
]

# "residual": energy of x - Q(x). "variance" and "second_moment": of the input itself.
Statistic = Literal["residual", "variance", "second_moment"]
STATISTICS: tuple[str, ...] = get_args(Statistic)
# "dequant": the columns of the FP4 weight. "bf16": columns of the BF16 weight, kept beside it.
SpliceWeight = Literal["dequant", "bf16"]
SPLICE_WEIGHTS: tuple[str, ...] = get_args(SpliceWeight)
_LOWEST_RATE = 2.0**-62  # its period fits into the int64 that rows are counted in
_HIGHEST_INTEGER = 2**63 - 1
# Inputs that can be compensated: of the two GEMMs of routed experts, and of a linear layer.
KINDS = ("w13", "w2", "linear")

_SPLICE_COUNTS = MappingProxyType(
    {"splice_count_w13": 64, "splice_count_w2": 32, "splice_count_linear": 64}
)
PRESETS: Mapping[str, Mapping[str, float | int | str]] = MappingProxyType(
    {
        "nvfp4": MappingProxyType({}),
        "quads": MappingProxyType({"rac_ratio": 0.5}),
        "foursight": MappingProxyType({**_SPLICE_COUNTS, "splice_weight": "bf16"}),
        "quads_splice": MappingProxyType(
            {"rac_ratio": 0.5, **_SPLICE_COUNTS, "splice_weight": "dequant"}
        ),
    }
)


@dataclass(frozen=True)
class CompensationOptions:
    """What a user can set; the defaults compensate nothing (preset "nvfp4").

    rac_ratio: share of a rank's 16-blocks whose residual is added; 0 is off, 1 every block.
    rac_statistic: what ranks blocks. rac_alpha: factor of the residual, 1 minimizes its error.
    splice_count_w13, splice_count_w2, splice_count_linear: channels taken out of an input (of each
        expert's input for w2), of the whole model; a rank rounds its share up to 16. 0 is off.
    splice_statistic: what ranks channels. splice_weight: what hot channels are multiplied with.
    compensate: the inputs to compensate, of ``KINDS``.
    ema: weight of the past when a refresh averages statistics. refresh_interval: boundaries (weight
        syncs) per refresh. min_tokens: counted rows before a list is chosen, for each list.
    sampling_rate: share of the rows that is counted: one of round(1 / rate), so 0.7 counts all. A
        counted row moves about 40 bytes of memory for each channel: at 1/64, 0.2% of what a decode
        step of 128 tokens reads of FP4 experts.
    adaptive: give each layer its own ratio, with the multiplications of ``rac_ratio`` in total.
    exact: residuals and hot channels as products of their own where a backend folds them into one
        FP16 operand (``triton``, ``hopper``); slower, see ``fold`` for what it changes.

    Raises:
        ValueError: a bad value; the message names the key, the value and what is allowed.
    """

    rac_ratio: float = 0.0
    rac_statistic: Statistic = "residual"
    rac_alpha: float = 1.0
    splice_count_w13: int = 0
    splice_count_w2: int = 0
    splice_count_linear: int = 0
    splice_statistic: Statistic = "variance"
    splice_weight: SpliceWeight = "dequant"
    compensate: tuple[str, ...] = KINDS
    ema: float = 0.9
    refresh_interval: int = 1
    min_tokens: int = 1024
    sampling_rate: float = 1 / 64
    adaptive: bool = False
    exact: bool = False

    def __post_init__(self) -> None:
        _check_range("rac_ratio", self.rac_ratio, 0, 1)
        _check_range("rac_alpha", self.rac_alpha, 0, 1, low_open=True)
        _check_range("ema", self.ema, 0, 1, high_open=True)
        _check_range("sampling_rate", self.sampling_rate, 0, 1, low_open=True)
        if self.sampling_rate < _LOWEST_RATE:
            raise ValueError(
                f"sampling_rate {self.sampling_rate!r} is not allowed: a number from 2**-62 to 1"
            )
        for key in _SPLICE_COUNTS:
            _check_integer(key, getattr(self, key), 0)
        _check_integer("refresh_interval", self.refresh_interval, 1)
        _check_integer("min_tokens", self.min_tokens, 1)
        _check_choice("rac_statistic", self.rac_statistic, STATISTICS)
        _check_choice("splice_statistic", self.splice_statistic, STATISTICS)
        _check_choice("splice_weight", self.splice_weight, SPLICE_WEIGHTS)
        _check_kinds(self.compensate)
        for key in ("adaptive", "exact"):
            if not isinstance(value := getattr(self, key), bool):
                raise ValueError(f"{key} {value!r} is not allowed: true or false")
        if self.adaptive and self.rac_ratio == 0:
            raise ValueError("adaptive true is not allowed with rac_ratio 0: nothing to distribute")

    @classmethod
    def from_preset(
        cls, method: str, overrides: Mapping[str, Any] | None = None
    ) -> "CompensationOptions":
        """The options of a preset, with some of them replaced.

        Raises:
            ValueError: no such preset or option, or a bad value.
        """
        _check_choice("method", method, tuple(PRESETS))
        known = [field.name for field in dataclasses.fields(cls)]
        values: dict[str, Any] = {**PRESETS[method], **(overrides or {})}
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f"unknown option {unknown[0]!r}; allowed are {known}")
        if isinstance(values.get("compensate"), list):
            values["compensate"] = tuple(values["compensate"])
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {**dataclasses.asdict(self), "compensate": list(self.compensate)}

    def ratio(self, kind: str) -> float:
        """``rac_ratio`` where inputs of this kind are compensated, else 0."""
        return self.rac_ratio if kind in self.compensate else 0.0

    def splice_count(self, kind: str) -> int:
        """Channels of the whole model's input of this kind, 0 where it is not compensated."""
        counts = {
            "w13": self.splice_count_w13,
            "w2": self.splice_count_w2,
            "linear": self.splice_count_linear,
        }
        return counts[kind] if kind in self.compensate else 0

    def active(self, kind: str) -> bool:
        """Whether inputs of this kind are compensated at all."""
        return self.ratio(kind) > 0 or self.splice_count(kind) > 0

    @property
    def sampling_period(self) -> int:
        """One of so many rows is counted."""
        return max(1, round(1 / self.sampling_rate))


def _check_range(
    key: str,
    value: object,
    low: float,
    high: float,
    low_open: bool = False,
    high_open: bool = False,
) -> None:
    inside = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and (value > low if low_open else value >= low)
        and (value < high if high_open else value <= high)
    )
    if not inside:
        above, below = "above" if low_open else "from", "to below" if high_open else "to"
        raise ValueError(
            f"{key} {_shown(value)} is not allowed: a number {above} {low} {below} {high}"
        )


def _check_integer(key: str, value: object, low: int) -> None:
    inside = type(value) is int and low <= value <= _HIGHEST_INTEGER
    if not inside:
        raise ValueError(
            f"{key} {_shown(value)} is not allowed: an integer from {low} to 2**63 - 1"
        )


def _shown(value: object) -> str:
    """Python refuses to write integers of thousands of digits."""
    huge = isinstance(value, int) and abs(value) >= 10**40
    return "(an integer of more than 40 digits)" if huge else repr(value)


def _check_choice(key: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{key} {value!r} is not allowed: one of {list(allowed)}")


def _check_kinds(value: object) -> None:
    names = value if isinstance(value, tuple) else ()
    if not names or any(name not in KINDS for name in names) or len(set(names)) != len(names):
        shown = list(value) if isinstance(value, tuple) else value
        raise ValueError(f"compensate {shown!r} is not allowed: some of {list(KINDS)}")
