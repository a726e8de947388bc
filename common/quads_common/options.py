"""The options of ``quads_nvfp4``: the same for every engine, checked when the engine starts."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from quads_common.backend import BACKENDS
from quads_common.compensation.options import KINDS, PRESETS, CompensationOptions
from quads_common.format import GLOBAL_SCALE_RULES, GlobalScaleRule
from quads_common.gemm import ACT_FORMATS, ActFormat
from quads_common.placement import Placement

__all__ = [
    "OPTION_KEYS",
    "QUANT_METHOD",
    "QuadsOptions",
    "check_options",
    "merge_options",
    "read_environment_options",
]

QUANT_METHOD = "quads_nvfp4"
METHODS = tuple(PRESETS)
DEFAULT_METHOD = "quads"
PLAIN_METHOD = "nvfp4"


@dataclass(frozen=True)
class QuadsOptions:
    """What a user can set.

    method: compensation preset, one of ``METHODS``; None means "quads", and "nvfp4" (plain) where
        activations are not quantized.
    act: "nvfp4" quantizes activations per token (W4A4); "bf16" leaves them alone (W4A16).
    targets, ignore: see ``quads_common.placement.Placement``.
    global_scale_rule: "pow2" (weights exact in bfloat16) or "te" (TransformerEngine's).
    backend: "auto" or the name of one.
    selection_file: a file of ``quads_save_selection`` to start with.
    knobs: options of ``CompensationOptions`` that replace the preset's, as sorted pairs. In JSON
        they stand beside the other keys.

    Raises:
        ValueError: an impossible value; the message names the key and what is allowed.
    """

    method: str | None = None
    act: ActFormat = "nvfp4"
    targets: tuple[str, ...] = ("auto",)
    ignore: tuple[str, ...] = ()
    global_scale_rule: GlobalScaleRule = "pow2"
    backend: str = "auto"
    selection_file: str | None = None
    knobs: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if self.method is not None:
            _check_choice("method", self.method, METHODS)
        _check_choice("act", self.act, ACT_FORMATS)
        _check_choice("global_scale_rule", self.global_scale_rule, GLOBAL_SCALE_RULES)
        _check_choice("backend", self.backend, BACKENDS)
        _ = self.placement, self.compensation
        if not isinstance(self.selection_file, str | None) or self.selection_file == "":
            raise ValueError(f"selection_file {self.selection_file!r} is not allowed: a path")
        if self.method == PLAIN_METHOD and self.compensates:
            others = [method for method in METHODS if method != PLAIN_METHOD]
            raise ValueError(
                f"method {PLAIN_METHOD!r}{_shown(self.knobs)} is not allowed: {PLAIN_METHOD!r} "
                f"compensates nothing; use one of {others} with these options"
            )
        if self.act == "bf16" and self.compensates:
            raise ValueError(
                f"method {self.preset!r}{_shown(self.knobs)} compensates quantized activations, "
                "and act 'bf16' quantizes none: use method 'nvfp4' or act 'nvfp4'"
            )
        if self.selection_file is not None and not self.compensates:
            raise ValueError(
                f"selection_file {self.selection_file!r} is not allowed with method "
                f"{self.preset!r}{_shown(self.knobs)}: nothing is selected"
            )

    @property
    def preset(self) -> str:
        """The method in force."""
        if self.method is not None:
            return self.method
        return DEFAULT_METHOD if self.act == "nvfp4" else PLAIN_METHOD

    @cached_property
    def compensation(self) -> CompensationOptions:
        """The options of the preset, with the knobs."""
        return CompensationOptions.from_preset(self.preset, dict(self.knobs))

    @property
    def compensates(self) -> bool:
        """Whether any input is compensated."""
        return any(self.compensation.active(kind) for kind in KINDS)

    @property
    def placement(self) -> Placement:
        """The placement that ``targets`` and ``ignore`` describe."""
        return Placement(self.targets, self.ignore)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], source: str) -> "QuadsOptions":
        """Check and build; ``source`` says in messages where the options came from.

        Raises:
            ValueError: an unknown key or a bad value.
        """
        try:
            return _build(check_options(raw, source))
        except ValueError as error:
            raise ValueError(f"{source}: {str(error).removeprefix(f'{source}: ')}") from None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; ``from_dict`` takes it back."""
        values = {key: getattr(self, key) for key in _OWN_KEYS} | dict(self.knobs)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


_OWN_KEYS = tuple(f.name for f in dataclasses.fields(QuadsOptions) if f.name != "knobs")
_KNOBS = tuple(f.name for f in dataclasses.fields(CompensationOptions))
OPTION_KEYS = (*_OWN_KEYS, *_KNOBS)


def merge_options(sources: Mapping[str, Mapping[str, Any]]) -> QuadsOptions:
    """Options of several places as one; the keys of ``sources`` say in messages which is which.

    Raises:
        ValueError: an option error, or the same key with different values in two places.
    """
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for source, raw in sources.items():
        for key, value in check_options(raw, source).items():
            if merged.setdefault(key, value) != value:
                raise ValueError(
                    f"{key!r} is {merged[key]!r} in {origin[key]} and {value!r} in {source}: give "
                    "it once"
                )
            origin.setdefault(key, source)
    try:
        return _build(merged)
    except ValueError as error:
        places = list(dict.fromkeys(origin.values()))
        raise ValueError(f"{', '.join(places)}: {error}") from None


def check_options(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The options of one place in their final types, each possible by itself.

    Raises:
        ValueError: an unknown key or a bad value; ``source`` says where it came from.
    """
    if raw.get("quant_method", QUANT_METHOD) != QUANT_METHOD:
        raise ValueError(
            f"{source}: quant_method is {raw['quant_method']!r}, expected {QUANT_METHOD!r}"
        )
    values = {key: value for key, value in raw.items() if key != "quant_method"}
    unknown = sorted(set(values) - {*OPTION_KEYS})
    if unknown:
        raise ValueError(
            f"{source}: unknown option {unknown[0]!r}; allowed are {list(OPTION_KEYS)}"
        )
    for key, value in values.items():
        if key in ("targets", "ignore"):
            values[key] = _as_names(source, key, value)
        elif key == "compensate" and isinstance(value, list):
            values[key] = tuple(value)
    for key, value in values.items():
        try:
            # What one key allows does not depend on the others; pairs are checked once merged.
            if key in _KNOBS:
                CompensationOptions.from_preset(DEFAULT_METHOD, {key: value})
            elif key != "selection_file":
                _build({"method": PLAIN_METHOD, key: value})
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None
    return values


def _build(values: Mapping[str, Any]) -> QuadsOptions:
    own = {key: value for key, value in values.items() if key in _OWN_KEYS}
    knobs = {key: value for key, value in values.items() if key in _KNOBS}
    return QuadsOptions(**own, knobs=tuple(sorted(knobs.items())))


def _shown(knobs: tuple[tuple[str, Any], ...]) -> str:
    return f" with {dict(knobs)}" if knobs else ""


def read_environment_options(variable: str, value: str | None) -> dict[str, Any]:
    """Options in an environment variable: a JSON object or the path of a file that holds one.

    Raises:
        ValueError: neither; the message names the variable.
    """
    if value is None or not value.strip():
        return {}
    text = value
    if not value.lstrip().startswith("{"):
        text = _read_file(variable, value)
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{variable} is not valid JSON: {error}") from None
    if not isinstance(options, dict):
        raise ValueError(f"{variable} must be a JSON object, got {type(options).__name__}")
    return options


def _read_file(variable: str, value: str) -> str:
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # no such file, a name too long, not text
        raise ValueError(
            f"{variable}={value!r} is neither a JSON object nor a readable file: {error}"
        ) from None


def _check_choice(key: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{key} {value!r} is not allowed: one of {list(allowed)}")


def _as_names(source: str, key: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list | tuple) and all(isinstance(v, str) for v in value):
        return tuple(value)
    raise ValueError(f"{source}: {key} must be a string or a list of strings, got {value!r}")
