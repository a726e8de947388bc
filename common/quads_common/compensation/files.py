"""Selection files: lists, averages and statistics of all sites in one safetensors file.

The header's ``quads`` entry is JSON: contract version, tp_size, options and the sites. Tensors are
``<site>/<buffer>`` of the whole model: rows are global groups (experts), columns the shards of the
input side by side, so channel and block ids are those of the checkpoint. A file belongs to one
tp_size, because each shard of an input chooses for itself.
"""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from quads_common.compensation.file_checks import HEADER, check_header, check_ids, check_values
from quads_common.compensation.options import CompensationOptions
from quads_common.compensation.paths import absolute, check_readable, write_whole
from quads_common.compensation.selection import DERIVED, derived_buffers
from quads_common.compensation.site import Site
from quads_common.compensation.state import SiteState
from quads_common.compensation.statistics import copy_into
from quads_common.format import BLOCK_SIZE, CONTRACT_VERSION

__all__ = [
    "SavedSelection",
    "SitePart",
    "check_selection_file",
    "fitting_parts",
    "read_selection_file",
    "restore",
    "snapshot",
    "write_parts",
    "write_selection_file",
]

_COUNTERS = ("statistics_offered", "averages_refreshes")  # [1], the same on every rank
_NOT_SAVED = tuple(f"selection_{name}" for name in DERIVED)
_IDS = {"selection_blocks": BLOCK_SIZE, "selection_channels": 1}  # channels per id
# Options that say what a selection means; others may change between saving and loading.
_SHAPING = (
    "rac_ratio",
    "rac_statistic",
    "rac_alpha",
    "splice_count_w13",
    "splice_count_w2",
    "splice_count_linear",
    "splice_statistic",
    "splice_weight",
    "compensate",
    "adaptive",
)


@dataclass(frozen=True)
class SitePart:
    """What one rank contributes: its site, and its buffers on the CPU with global ids."""

    site: Site
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class SavedSelection:
    """A file's content. sites: kind, full_width, num_groups and shards of each by name."""

    path: str
    tp_size: int
    options: dict[str, Any]
    sites: dict[str, dict[str, Any]]
    tensors: dict[str, torch.Tensor]


def snapshot(state: SiteState) -> SitePart:
    """Copy a site's buffers to the CPU."""
    tensors = {}
    for name, tensor in state.buffers().items():
        if name in _NOT_SAVED:
            continue
        copy = tensor.detach().cpu().clone()
        if name in _IDS:
            copy = torch.where(copy < 0, copy, copy + state.site.offset // _IDS[name])
        tensors[name] = copy if name in _COUNTERS or copy.ndim == 2 else copy.unsqueeze(1)
    return SitePart(state.site, tensors)


def write_selection_file(
    path: str | os.PathLike[str],
    parts: Iterable[SitePart],
    *,
    tp_size: int,
    options: CompensationOptions,
) -> None:
    """Write the parts of all ranks; the file appears whole or not at all.

    Raises:
        ValueError: ranks disagree on a site or on a replicated list, or a part is missing.
        OSError: see ``write_whole``.
    """
    by_name: dict[str, list[SitePart]] = {}
    for part in parts:
        by_name.setdefault(part.site.name, []).append(part)
    tensors, sites = {}, {}
    for name, found in by_name.items():
        sites[name] = _description(found[0].site)
        for buffer, tensor in _combine(found).items():
            tensors[f"{name}/{buffer}"] = tensor
    header = {
        "contract_version": CONTRACT_VERSION,
        "tp_size": tp_size,
        "options": options.to_dict(),
        "sites": sites,
    }
    write_whole(path, lambda file: save_file(tensors, file, {HEADER: json.dumps(header)}))


def read_selection_file(path: str | os.PathLike[str]) -> SavedSelection:
    """Read a file.

    Raises:
        ValueError: it is no selection file, of another contract version, or its header is wrong.
        OSError: it cannot be read.
    """
    return _read(path, tensors=True)


def check_selection_file(
    path: str | os.PathLike[str], *, tp_size: int, options: CompensationOptions
) -> None:
    """Whether a file's header fits an engine, before the engine has any site.

    Raises:
        ValueError: as ``read_selection_file``; another tp_size or options that shape a selection.
        OSError: it cannot be read.
    """
    _check_fits(_read(path, tensors=False), tp_size, options)


def _read(path: str | os.PathLike[str], *, tensors: bool) -> SavedSelection:
    shown = absolute(path)
    check_readable(shown)
    try:
        with safe_open(shown, framework="pt") as file:
            entries = file.metadata() or {}
            header = json.loads(entries.get(HEADER, "null"))
            names = file.keys() if tensors else ()
            content = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"{shown} is not a selection file: {error}") from None
    if header is None:
        raise ValueError(f"{shown} is not a selection file: its header has no {HEADER!r} entry")
    header = check_header(shown, header, entries)
    return SavedSelection(shown, header["tp_size"], header["options"], header["sites"], content)


def restore(
    saved: SavedSelection,
    states: Sequence[SiteState],
    *,
    tp_size: int,
    options: CompensationOptions,
) -> None:
    """Write this rank's part of a file into its buffers, in place; checks all before the first.

    Raises:
        ValueError: see ``fitting_parts``.
    """
    write_parts(fitting_parts(saved, states, tp_size=tp_size, options=options), states)


def fitting_parts(
    saved: SavedSelection,
    states: Sequence[SiteState],
    *,
    tp_size: int,
    options: CompensationOptions,
) -> list[dict[str, torch.Tensor]]:
    """This rank's buffers of each of its ``states``, on the CPU; changes nothing.

    Raises:
        ValueError: another tp_size, other options that shape a selection, other sites, shapes or
            tensors; ids or numbers that cannot be.
    """
    _check_fits(saved, tp_size, options)
    names = {state.site.name for state in states}
    if names != saved.sites.keys():
        odd = sorted(names ^ saved.sites.keys())[0]
        where = "only in the file" if odd in saved.sites else "not in the file"
        raise ValueError(f"{saved.path}: site {odd} is {where}")
    known = {f"{s.site.name}/{name}" for s in states for name in s.buffers()}
    known -= {f"{s.site.name}/{name}" for s in states for name in _NOT_SAVED}
    if surplus := sorted(saved.tensors.keys() - known):
        raise ValueError(f"{saved.path}: {surplus[0]} is no tensor of a selection file")
    cut = [_part_of(saved, state) for state in states]
    for tensors in cut:
        derived = derived_buffers(tensors["selection_blocks"], tensors["selection_channels"])
        tensors |= {f"selection_{name}": tensor for name, tensor in derived.items()}
    return cut


def write_parts(parts: Sequence[dict[str, torch.Tensor]], states: Sequence[SiteState]) -> None:
    """Write what ``fitting_parts`` found into the buffers, in place."""
    for state, tensors in zip(states, parts, strict=True):
        copy_into(state.buffers(), tensors, state.site.name)


def _check_fits(saved: SavedSelection, tp_size: int, options: CompensationOptions) -> None:
    if saved.tp_size != tp_size:
        raise ValueError(f"{saved.path}: tp_size {saved.tp_size}, this engine has {tp_size}")
    current = options.to_dict()
    for key in _SHAPING:
        if saved.options.get(key) != current[key]:
            raise ValueError(
                f"{saved.path}: {key} {saved.options.get(key)!r}, this engine has {current[key]!r}"
            )


def _description(site: Site) -> dict[str, Any]:
    return {
        "kind": site.kind,
        "full_width": site.full_width,
        "num_groups": site.num_groups,
        "shards": site.shards,
    }


def _combine(parts: Sequence[SitePart]) -> dict[str, torch.Tensor]:
    """Whole tensors [num_groups, shards * n] of one site from the ranks' [G, n]."""
    first = parts[0].site
    covered = torch.zeros((first.num_groups, first.shards), dtype=torch.bool)
    whole = {
        name: t
        if name in _COUNTERS
        else torch.zeros((first.num_groups, first.shards * t.shape[1]), dtype=t.dtype)
        for name, t in parts[0].tensors.items()
    }
    for part in parts:
        site = part.site
        if _description(site) != _description(first):
            raise ValueError(
                f"{first.name}: ranks disagree, {_description(site)} and {_description(first)}"
            )
        rows = torch.tensor(site.groups, dtype=torch.int64)
        for name, tensor in part.tensors.items():
            if name in _COUNTERS:
                continue
            place = whole[name].unflatten(1, (site.shards, tensor.shape[1]))[:, site.shard]
            seen = covered[rows, site.shard].unsqueeze(1)
            if name in _IDS and bool(((place[rows] != tensor) & seen).any()):
                raise ValueError(f"{first.name}: replicas chose different {name}")
            place[rows] = torch.where(seen, place[rows], tensor)
        covered[rows, site.shard] = True
    if not bool(covered.all()):
        group, shard = covered.logical_not().nonzero()[0].tolist()
        raise ValueError(f"{first.name}: no rank has group {group} of shard {shard}")
    return whole


def _part_of(saved: SavedSelection, state: SiteState) -> dict[str, torch.Tensor]:
    """This rank's buffers with its own ids, checked against what the state holds."""
    site, found = state.site, saved.sites[state.site.name]
    wanted = _description(site)
    for key, value in wanted.items():
        if found[key] != value:
            raise ValueError(
                f"{saved.path}: {site.name} has {key} {found[key]!r}, this engine has {value!r}"
            )
    rows = torch.tensor(site.groups, dtype=torch.int64)
    part: dict[str, torch.Tensor] = {}
    for name, buffer in state.buffers().items():
        if name in _NOT_SAVED:
            continue
        tensor = saved.tensors.get(f"{site.name}/{name}")
        columns = 1 if buffer.ndim == 1 else buffer.shape[1]
        shape = [1] if name in _COUNTERS else [site.num_groups, site.shards * columns]
        if tensor is None or list(tensor.shape) != shape:
            got = "missing" if tensor is None else f"of shape {list(tensor.shape)}"
            raise ValueError(f"{saved.path}: {site.name}/{name} is {got}, expected {shape}")
        what = f"{saved.path}: {site.name}/{name}"
        if name in _IDS:
            lists = tensor.unflatten(1, (site.shards, columns))
            check_ids(what, lists, buffer.dtype, site.width // _IDS[name])
        else:
            check_values(what, tensor, buffer.dtype)
        if name not in _COUNTERS:
            tensor = tensor.unflatten(1, (site.shards, columns))[rows, site.shard]
            tensor = tensor.reshape(buffer.shape)
        part[name] = _local_ids(name, tensor, site)
    return part


def _local_ids(name: str, tensor: torch.Tensor, site: Site) -> torch.Tensor:
    if name not in _IDS:
        return tensor
    return torch.where(tensor < 0, tensor, tensor - site.offset // _IDS[name])
