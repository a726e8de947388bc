"""Names that trainer and engine share, and which linears an engine fuses."""

import re
from collections.abc import Sequence

__all__ = ["FUSED_SIBLINGS", "checkpoint_name", "expert_matrix", "fused_groups"]

# Children of one module that engines fuse into one layer with one global scale.
FUSED_SIBLINGS: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)

# Components that wrappers put into module names: compile, activation checkpointing, FSDP1.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_EXPERT = re.compile(r"((?:.+\.)?experts\.\d+)\.(?:(w1|w3|gate_proj|up_proj)|(w2|down_proj))")


def checkpoint_name(name: str) -> str:
    """A module's name without what wrappers add to it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def expert_matrix(name: str) -> str:
    """The unit of one expert's linear: ``...experts.3.up_proj`` -> ``...experts.3.w13``.

    The name of any other linear is its own.
    """
    match = _EXPERT.fullmatch(name)
    if match is None:
        return name
    return f"{match[1]}.{'w13' if match[2] else 'w2'}"


def fused_groups(
    names: Sequence[str], fused: Sequence[Sequence[str]] = FUSED_SIBLINGS
) -> list[list[str]]:
    """Put the module names that an engine fuses together; every other name is alone.

    Members of a group are in the order of ``fused``.
    """
    present = set(names)
    groups, done = [], set()
    for name in names:
        if name in done:
            continue
        parent, _, child = name.rpartition(".")
        prefix = f"{parent}." if parent else ""
        siblings = next((group for group in fused if child in group), (child,))
        group = [prefix + sibling for sibling in siblings if prefix + sibling in present]
        groups.append(group)
        done.update(group)
    return groups
