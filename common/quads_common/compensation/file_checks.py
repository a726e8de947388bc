"""What a selection file may hold: a header of known types, ids and numbers that make sense.

A file may come from anywhere, and a wrong id would only show as a failing request. Every rank
checks the whole file, so all refuse it or none.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch

from quads_common.compensation.options import CompensationOptions
from quads_common.format import CONTRACT_VERSION

__all__ = ["HEADER", "check_header", "check_ids", "check_values"]

HEADER = "quads"  # the one entry of a file's metadata

_KEYS = {"contract_version": int, "tp_size": int, "options": dict, "sites": dict}
_SITE_KEYS = {"kind": str, "full_width": int, "num_groups": int, "shards": int}
_SIGNED = ("statistics_mean",)
_COUNTS = (
    "statistics_count",
    "statistics_underflows",
    "statistics_offered",
    "averages_uncovered",
    "averages_tokens",
    "averages_refreshes",
)
_MOST = 2**53  # what float64 counts exactly
# Squared deviations of channels below 2**128, of 16 channels and _MOST rows.
_LARGEST = 2.0**315


def check_header(path: str, header: object, entries: Collection[str] = ()) -> dict[str, Any]:
    """The header of a file of this contract version, if all of it is allowed: keys, types, options.

    An option may be missing, as one that is newer than the file; those that shape a selection are
    compared with the engine's later. entries: names of the file's metadata.

    Raises:
        ValueError: it is not so; the message names the file and the key.
    """
    if not isinstance(header, dict):
        raise ValueError(f"{path} is not a selection file: its header is {header!r:.80}")
    _check_keys(path, header, _KEYS)
    if (version := header["contract_version"]) != CONTRACT_VERSION:
        raise ValueError(f"{path}: contract_version {version}, this is {CONTRACT_VERSION}")
    _check_names(path, entries, (HEADER,))
    _check_names(path, header, _KEYS)
    try:
        CompensationOptions.from_preset("nvfp4", header["options"])
    except ValueError as error:
        raise ValueError(f"{path}: options: {error}") from None
    for name, site in header["sites"].items():
        if not isinstance(site, dict):
            raise ValueError(f"{path}: site {name} is {site!r:.80}, expected an object")
        _check_keys(f"{path}: site {name}", site, _SITE_KEYS)
        _check_names(f"{path}: site {name}", site, _SITE_KEYS)
    return header


def check_values(what: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Numbers of statistics and averages; ``what`` ends with the buffer's name.

    Raises:
        ValueError: another dtype, NaN or Inf, a number that none can be: negative, too large, or a
            fraction of a row.
    """
    if tensor.dtype != dtype:
        raise ValueError(f"{what} is {tensor.dtype}, expected {dtype}")
    if tensor.dtype == torch.bool:
        return
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"{what} holds NaN or Inf")
    if not what.endswith(_SIGNED) and bool((tensor < 0).any()):
        raise ValueError(f"{what} holds {tensor.min().item()}, expected no negative number")
    counts = what.endswith(_COUNTS)
    most = _MOST if counts else _LARGEST
    wrong = tensor.abs() > most
    if counts and dtype.is_floating_point:
        wrong |= tensor != tensor.round()
    if bool(wrong.any()):
        allowed = "whole numbers up to 2**53" if counts else "magnitudes up to 2**315"
        raise ValueError(f"{what} holds {tensor[wrong][0].item()}, expected {allowed}")


def check_ids(what: str, ids: torch.Tensor, dtype: torch.dtype, width: int) -> None:
    """Lists [groups, shards, slots]; shard s has the ids from s * width up to its end.

    Raises:
        ValueError: another dtype, an id of another shard or of none, a list that is not ascending
            ids and then -1.
    """
    if ids.dtype != dtype:
        raise ValueError(f"{what} is {ids.dtype}, expected {dtype}")
    starts = (torch.arange(ids.shape[1]) * width).view(1, -1, 1)
    wrong = (ids != -1) & ((ids < starts) | (ids >= starts + width))
    if bool(wrong.any()):
        group, shard, slot = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"{what} holds {ids[group, shard, slot].item()} in list {group} of shard {shard}, "
            f"expected ids from {shard * width} to {(shard + 1) * width - 1}, or -1"
        )
    before, after = ids[..., :-1], ids[..., 1:]
    wrong = (after != -1) & ((before == -1) | (before >= after))
    if bool(wrong.any()):
        group, shard, _ = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"{what}: list {group} of shard {shard} is {ids[group, shard].tolist()}, expected "
            "ascending ids, each once, then -1"
        )


def _check_names(what: str, found: Collection[str], wanted: Collection[str]) -> None:
    if surplus := sorted(set(found) - set(wanted)):
        raise ValueError(f"{what}: the header has {surplus[0]!r:.80}; allowed are {list(wanted)}")


def _check_keys(what: str, found: Mapping[str, Any], wanted: Mapping[str, type]) -> None:
    for key, kind in wanted.items():
        if key not in found:
            raise ValueError(f"{what}: the header has no {key!r}")
        if type(found[key]) is not kind:
            raise ValueError(f"{what}: {key} {found[key]!r:.80} is no {kind.__name__}")
