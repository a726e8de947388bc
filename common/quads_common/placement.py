"""Which modules are quantized: one decision for engines, trainer and export.

Names are checkpoint module names, ``model.layers.0.self_attn.q_proj``. A pattern is a run of dotted
components anywhere in the name (``mlp.gate`` is in ``model.layers.0.mlp.gate``, not in
``model.layers.0.mlp.gate_proj``) or, after ``re:``, a regular expression for the whole name.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["TARGETS", "ModelFacts", "Placement"]

TARGETS = ("auto", "experts", "linear", "all")

_EXPERT_COUNT_KEYS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_moe_experts",
)
# Components that are never quantized unless a pattern in targets names them.
_KEPT = re.compile(
    r"gate|router|shared_expert_gate|lm_head|embed\w*|word_embeddings|wte|wpe|\w*norm\w*|ln_\w+"
    r"|audio_\w+|multi_modal_projector|mm_projector|connector|shared_experts?|shared_mlp|mtp|mtp_\w+|nextn|draft\w*|eagle\w*|visual|vision_\w+"
)
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")


@dataclass(frozen=True)
class ModelFacts:
    """What the decision needs to know of a model.

    has_experts: it has routed experts somewhere.
    num_hidden_layers: layers from this index on are draft (MTP) layers; None if unknown.
    """

    has_experts: bool
    num_hidden_layers: int | None = None

    @classmethod
    def from_hf_config(cls, config: Any) -> "ModelFacts":
        """Read a transformers configuration (an object, nested text configuration included)."""
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        text = getattr(text, "text_config", None) or text
        places = (text, getattr(text, "ffn_config", None))  # DBRX nests it
        counts = [_largest(getattr(p, key, None)) for p in places for key in _EXPERT_COUNT_KEYS]
        layers = getattr(text, "num_hidden_layers", None)
        return cls(any(n > 1 for n in counts), layers)


@dataclass(frozen=True)
class Placement:
    """targets: "auto" (routed experts where the model has them, else all linears), "experts",
    "linear", "all", or several of these and patterns. ignore: patterns, stronger than targets.

    Raises:
        ValueError: empty targets, or a pattern that is no regular expression.
    """

    targets: tuple[str, ...] = ("auto",)
    ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for key in ("targets", "ignore"):
            if isinstance(getattr(self, key), str):
                raise ValueError(f"{key} must be a tuple of names, got {getattr(self, key)!r}")
        if not self.targets:
            raise ValueError(f"targets is empty: give {list(TARGETS)} or module name patterns")
        for key in ("targets", "ignore"):
            for pattern in getattr(self, key):
                _check_pattern(key, pattern)

    def decide(self, name: str, facts: ModelFacts) -> bool:
        """Whether the module ``name`` (a linear layer or an MoE's experts) is quantized.

        A module without a name is kept: nothing says that it is not lm_head.
        """
        if not name:
            return False
        if any(_matches(pattern, name) for pattern in self.ignore):
            return False
        if any(_matches(p, name) for p in self.targets if p not in TARGETS):
            return True
        if _is_kept(name, facts):
            return False
        wanted = {_resolve_auto(t, facts) for t in self.targets if t in TARGETS}
        kind = "experts" if "experts" in name.split(".") else "linear"
        return kind in wanted or "all" in wanted

    def unmatched(self, key: str, names: Iterable[str]) -> list[str]:
        """Patterns of "targets" or "ignore" that match none of the module names."""
        known = list(names)
        patterns = [p for p in getattr(self, key) if p not in TARGETS]
        return [p for p in patterns if not any(_matches(p, name) for name in known)]

    def decide_group(self, names: Iterable[str], facts: ModelFacts) -> bool:
        """The common decision for modules that an engine fuses (q, k, v or gate, up).

        Raises:
            ValueError: they are not all decided alike.
        """
        decisions = {name: self.decide(name, facts) for name in names}
        if len(set(decisions.values())) != 1:
            quantized = [n for n, d in decisions.items() if d]
            kept = [n for n, d in decisions.items() if not d]
            raise ValueError(
                f"targets/ignore quantize {quantized} but keep {kept}, which the engine fuses "
                "into one layer with one global scale: name all of them or none"
            )
        return next(iter(decisions.values()))


def _largest(count: Any) -> int:
    """An expert count as configurations write it: a number, or one per layer."""
    numbers = count if isinstance(count, list | tuple) else [count]
    return max((n for n in numbers if isinstance(n, int)), default=0)


def _resolve_auto(target: str, facts: ModelFacts) -> str:
    if target != "auto":
        return target
    return "experts" if facts.has_experts else "linear"


def _is_kept(name: str, facts: ModelFacts) -> bool:
    if any(_KEPT.fullmatch(part) for part in name.split(".")):
        return True
    layer = _LAYER.search(name)
    last = facts.num_hidden_layers
    return layer is not None and last is not None and int(layer.group(1)) >= last


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.fullmatch(pattern[3:], name) is not None
    return f".{pattern}." in f".{name}."


def _check_pattern(key: str, pattern: str) -> None:
    if not isinstance(pattern, str) or not pattern:
        raise ValueError(f"{key}: {pattern!r} is not a module name pattern")
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except re.error as error:
            raise ValueError(f"{key}: {pattern!r} is not a regular expression: {error}") from None
