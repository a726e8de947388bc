"""The options of ``quads_nvfp4``: the same for every engine, checked when the engine starts."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quads_common.backend import BACKENDS
from quads_common.format import GLOBAL_SCALE_RULES, GlobalScaleRule
from quads_common.gemm import ACT_FORMATS, ActFormat
from quads_common.placement import Placement

__all__ = ["QUANT_METHOD", "QuadsOptions", "merge_options", "read_environment_options"]

QUANT_METHOD = "quads_nvfp4"

METHODS = ("nvfp4",)
# Presets of the design that this version cannot run; refused by name, never served as plain NVFP4.
PLANNED_METHODS = ("quads", "foursight", "quads_splice")


@dataclass(frozen=True)
class QuadsOptions:
    """What a user can set.

    method: compensation preset; "nvfp4" is plain.
    act: "nvfp4" quantizes activations per token (W4A4); "bf16" leaves them alone (W4A16).
    targets, ignore: see ``quads_common.placement.Placement``.
    global_scale_rule: "pow2" (weights exact in bfloat16) or "te" (TransformerEngine's).
    backend: "auto" or the name of one.

    Raises:
        ValueError: an impossible value; the message names the key and what is allowed.
    """

    method: str = "nvfp4"
    act: ActFormat = "nvfp4"
    targets: tuple[str, ...] = ("auto",)
    ignore: tuple[str, ...] = ()
    global_scale_rule: GlobalScaleRule = "pow2"
    backend: str = "auto"

    def __post_init__(self) -> None:
        if self.method in PLANNED_METHODS:
            raise ValueError(
                f"method {self.method!r} is not available in this version: use one of "
                f"{list(METHODS)}"
            )
        _check_choice("method", self.method, METHODS)
        _check_choice("act", self.act, ACT_FORMATS)
        _check_choice("global_scale_rule", self.global_scale_rule, GLOBAL_SCALE_RULES)
        _check_choice("backend", self.backend, BACKENDS)
        _ = self.placement

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
        known = [field.name for field in dataclasses.fields(cls)]
        values = {key: value for key, value in raw.items() if key != "quant_method"}
        if raw.get("quant_method", QUANT_METHOD) != QUANT_METHOD:
            raise ValueError(
                f"{source}: quant_method is {raw['quant_method']!r}, expected {QUANT_METHOD!r}"
            )
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f"{source}: unknown option {unknown[0]!r}; allowed are {known}")
        for key in ("targets", "ignore"):
            if key in values:
                values[key] = _as_names(source, key, values[key])
        try:
            return cls(**values)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; ``from_dict`` takes it back."""
        values = dataclasses.asdict(self)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def merge_options(sources: Mapping[str, Mapping[str, Any]]) -> QuadsOptions:
    """Options of several places as one; the keys of ``sources`` say in messages which is which.

    Raises:
        ValueError: an option error, or the same key with different values in two places.
    """
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for source, raw in sources.items():
        checked = QuadsOptions.from_dict(raw, source)
        for key in raw.keys() - {"quant_method"}:
            value = getattr(checked, key)
            if merged.setdefault(key, value) != value:
                raise ValueError(
                    f"{key!r} is {merged[key]!r} in {origin[key]} and {value!r} in {source}: give "
                    "it once"
                )
            origin.setdefault(key, source)
    return QuadsOptions(**merged)


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
