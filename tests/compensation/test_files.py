"""Selection files: round trips of whole and sharded models, and refusals by name."""

import json
import pickle

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from quads_common.compensation import (
    CompensationOptions,
    Site,
    new_site_state,
    read_selection_file,
    refresh,
    restore,
    snapshot,
    write_selection_file,
)
from quads_common.compensation.files import check_selection_file
from quads_common.compensation.observe import observe
from quads_common.compensation.selection import checksums
from tests.common.bits import assert_same_bits
from tests.common.samples import normal

HIDDEN, INNER, EXPERTS = 64, 96, 4
OPTIONS = CompensationOptions.from_preset(
    "quads_splice",
    {"min_tokens": 8, "splice_count_w13": 16, "splice_count_w2": 32},
)


def sites(tp: int = 1, rank: int = 0, experts: tuple[int, ...] = tuple(range(EXPERTS))):
    inner = INNER // tp
    return [
        Site("layers.0.w13", "w13", HIDDEN, HIDDEN),
        Site("layers.0.w2", "w2", inner, INNER, inner * rank, experts, EXPERTS),
    ]


def empty(**where):
    return [new_site_state(site, OPTIONS) for site in sites(**where)]


def served(**where):
    """States of a rank that served the same tokens as every other rank."""
    states = empty(**where)
    hidden = normal(60, HIDDEN)
    inner = normal(60, 2, INNER, seed=1)
    ids = torch.randint(0, EXPERTS, (60, 2), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        for state in states:
            site, lists = state.site, state.selection.compensation(OPTIONS, state.site.kind)
            if site.kind == "w13":
                observe(state.statistics, hidden, lists)
                continue
            local = torch.full((EXPERTS,), -1)
            local[list(site.groups)] = torch.arange(len(site.groups))
            x = inner[..., site.offset : site.offset + site.width]
            observe(state.statistics, x.flatten(0, 1), lists, local[ids].flatten())
        refresh(states, OPTIONS)
    lists = states[0].selection.compensation(OPTIONS, "w13")
    observe(states[0].statistics, hidden[:5], lists)  # rows that wait
    return states


def written(path, ranks, tp: int = 1):
    parts = [snapshot(state) for states in ranks for state in states]
    write_selection_file(path, pickle.loads(pickle.dumps(parts)), tp_size=tp, options=OPTIONS)
    return read_selection_file(path)


def assert_same_state(got, want) -> None:
    for name, tensor in want.buffers().items():
        assert_same_bits(got.buffers()[name], tensor, f"{want.site.name} {name}")


LAYOUTS = {
    "one-rank": [{}],
    "tp-2": [{"tp": 2, "rank": rank} for rank in range(2)],
    "ep-2": [{"experts": (0, 2)}, {"experts": (3, 1)}],
    "tp-2-ep-2": [
        {"tp": 2, "rank": rank, "experts": experts}
        for rank in range(2)
        for experts in ((0, 1), (2, 3))
    ],
    "replicas": [{}, {}],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_round_trip_gives_the_same_selection(tmp_path, layout):
    tp = LAYOUTS[layout][0].get("tp", 1)
    ranks = [served(**where) for where in LAYOUTS[layout]]
    saved = written(tmp_path / "s.safetensors", ranks, tp)
    for where, states in zip(LAYOUTS[layout], ranks, strict=True):
        fresh = empty(**where)
        assert checksums([fresh[1].selection]) != checksums([states[1].selection])
        addresses = [t.data_ptr() for state in fresh for t in state.buffers().values()]
        restore(saved, fresh, tp_size=tp, options=OPTIONS)
        for got, want in zip(fresh, states, strict=True):
            assert_same_state(got, want)
            assert checksums([got.selection]) == checksums([want.selection])
        assert [t.data_ptr() for s in fresh for t in s.buffers().values()] == addresses
        refresh(fresh, OPTIONS)
        refresh(states, OPTIONS)
        for got, want in zip(fresh, states, strict=True):
            assert_same_state(got, want)


def test_ids_in_the_file_are_global(tmp_path):
    ranks = [served(tp=2, rank=rank) for rank in range(2)]
    saved = written(tmp_path / "s.safetensors", ranks, 2)
    channels = saved.tensors["layers.0.w2/selection_channels"]
    blocks = saved.tensors["layers.0.w2/selection_blocks"]
    assert channels.shape == (EXPERTS, 32)
    assert torch.equal(channels[:, :16], ranks[0][1].selection.channels)
    assert torch.equal(channels[:, 16:], ranks[1][1].selection.channels + INNER // 2)
    local = ranks[1][1].selection.blocks
    assert torch.equal(blocks[:, 3:], torch.where(local < 0, local, local + 3))
    mean = saved.tensors["layers.0.w2/statistics_mean"]
    assert mean.shape == (EXPERTS, INNER)


def changed(options=None, **sites_changes):
    states = [new_site_state(s, options or OPTIONS) for s in sites_changes.pop("at", sites())]
    return states, options or OPTIONS


REFUSALS = {
    "tp-size": (lambda: (empty(tp=2), OPTIONS), 2, r"tp_size 1, this engine has 2"),
    "ratio": (
        lambda: changed(CompensationOptions.from_preset("quads_splice")),
        1,
        r"splice_count_w13 16, this engine has 64",
    ),
    "missing-site": (lambda: changed(at=sites()[:1]), 1, r"site layers.0.w2 is only in the file"),
    "extra-site": (
        lambda: changed(at=[*sites(), Site("layers.1.w2", "w2", 32, 32)]),
        1,
        r"site layers.1.w2 is not in the file",
    ),
    "width": (
        lambda: changed(at=[Site("layers.0.w13", "w13", 128, 128), sites()[1]]),
        1,
        r"layers.0.w13 has full_width 64, this engine has 128",
    ),
    "experts": (
        lambda: changed(at=[sites()[0], Site("layers.0.w2", "w2", INNER, INNER, 0, (0, 1), 2)]),
        1,
        r"layers.0.w2 has num_groups 4, this engine has 2",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_restore_refuses_what_does_not_fit_and_writes_nothing(tmp_path, case):
    build, tp, message = REFUSALS[case]
    saved = written(tmp_path / "s.safetensors", [served()])
    states, chosen = build()
    before = [t.clone() for state in states for t in state.buffers().values()]
    with pytest.raises(ValueError, match=message):
        restore(saved, states, tp_size=tp, options=chosen)
    after = [t for state in states for t in state.buffers().values()]
    for old, new in zip(before, after, strict=True):
        assert_same_bits(new, old, "state")


def test_options_that_shape_nothing_may_differ(tmp_path):
    saved = written(tmp_path / "s.safetensors", [served()])
    other = CompensationOptions.from_preset(
        "quads_splice",
        {"splice_count_w13": 16, "splice_count_w2": 32, "ema": 0.5, "min_tokens": 1},
    )
    restore(saved, empty(), tp_size=1, options=other)


def rewrite(path, change, tp_size=1) -> None:
    """Change a file's header or tensors."""
    tensors = load_file(path)
    saved = read_selection_file(path)
    header = {
        "contract_version": 1, "tp_size": tp_size, "options": saved.options, "sites": saved.sites,
    }  # fmt: skip
    change(header, tensors)
    save_file(tensors, path, {"quads": json.dumps(header)})


def test_other_contract_version_is_refused(tmp_path):
    path = tmp_path / "s.safetensors"
    written(path, [served()])
    rewrite(path, lambda header, tensors: header.update(contract_version=2))
    with pytest.raises(ValueError, match=r"s.safetensors: contract_version 2, this is 1"):
        read_selection_file(path)


def test_a_tensor_of_another_shape_is_refused(tmp_path):
    path = tmp_path / "s.safetensors"
    written(path, [served()])

    def cut(header, tensors):
        tensors["layers.0.w2/statistics_mean"] = torch.zeros(EXPERTS, 16, dtype=torch.float64)

    rewrite(path, cut)
    with pytest.raises(ValueError, match=r"layers.0.w2/statistics_mean is of shape \[4, 16\]"):
        restore(read_selection_file(path), empty(), tp_size=1, options=OPTIONS)
    rewrite(path, lambda header, tensors: tensors.pop("layers.0.w2/statistics_mean"))
    with pytest.raises(ValueError, match=r"layers.0.w2/statistics_mean is missing"):
        restore(read_selection_file(path), empty(), tp_size=1, options=OPTIONS)


def put(name, value, place=0):
    """One number of a tensor of w2."""

    def change(header, tensors):
        tensor = tensors[f"layers.0.w2/{name}"].clone()
        tensor.view(-1)[place] = value
        tensors[f"layers.0.w2/{name}"] = tensor

    return change


def cast(name, dtype):
    def change(header, tensors):
        tensors[f"layers.0.w2/{name}"] = tensors[f"layers.0.w2/{name}"].to(dtype)

    return change


def fill(name, value):
    def change(header, tensors):
        tensors[f"layers.0.w2/{name}"].fill_(value)

    return change


def surplus(header, tensors):
    tensors["layers.0.w2/selection_blocks_2"] = tensors["layers.0.w2/selection_blocks"].clone()


# Channels of w2: 0 to 47 of shard 0, 48 to 95 of shard 1, 16 slots each; blocks 0 to 2 and 3 to 5.
CONTENTS = {
    "channel-too-large": (put("selection_channels", 100000), r"channels holds 100000 in list 0"),
    "channel-of-the-next-shard": (put("selection_channels", 48, 15), r"48 .*from 0 to 47"),
    "channel-of-the-last-shard": (put("selection_channels", 47, 16), r"47 .*from 48 to 95"),
    "channel-negative": (put("selection_channels", -5), r"holds -5 in list 0 of shard 0"),
    "channel-twice": (fill("selection_channels", 3), r"from 48 to 95"),
    "channels-of-one-shard-twice": (put("selection_channels", 0, 1), r"channels: list 0 of"),
    "channel-after-the-end": (put("selection_channels", -1, 3), r"each once, then -1"),
    "channel-float": (cast("selection_channels", torch.float64), r"is torch.float64, .*int32"),
    "block-too-large": (put("selection_blocks", 99999), r"selection_blocks holds 99999"),
    "block-float": (cast("selection_blocks", torch.float32), r"is torch.float32, .*int32"),
    "average-nan": (put("averages_block", float("nan")), r"averages_block holds NaN or Inf"),
    "mean-inf": (put("statistics_mean", float("inf")), r"statistics_mean holds NaN or Inf"),
    "count-negative": (put("statistics_count", -7.0), r"statistics_count holds -7\.0"),
    "m2-negative": (put("statistics_m2", -1e-3), r"statistics_m2 holds -0\.001"),
    "refreshes-negative": (put("averages_refreshes", -1), r"averages_refreshes holds -1"),
    "refreshes-too-many": (
        put("averages_refreshes", 2**63 - 1),
        r"refreshes holds 9223372036854775807",
    ),
    "offered-too-many": (put("statistics_offered", 2**53 + 2), r"offered holds .* up to 2\*\*53"),
    "count-too-large": (put("statistics_count", 1.7e308), r"statistics_count holds 1\.7e\+308"),
    "count-a-fraction": (put("statistics_count", 2.5), r"count holds 2\.5, expected whole numbers"),
    "energy-too-large": (
        put("statistics_plain_energy", 1e100),
        r"energy holds 1e\+100, .* 2\*\*315",
    ),
    "mean-too-large": (put("statistics_mean", -1e100), r"statistics_mean holds -1e\+100"),
    "average-too-large": (put("averages_channel", 1e100), r"averages_channel holds 1e\+100"),
    "surplus-tensor": (surplus, r"blocks_2 is no tensor of a selection file"),
    "ready-no-bool": (cast("averages_ready", torch.int64), r"averages_ready is torch.int64"),
    "count-single": (cast("statistics_count", torch.float32), r"count is torch.float32"),
}


@pytest.mark.parametrize("case", CONTENTS)
def test_contents_that_cannot_be_are_refused_on_every_rank(tmp_path, case):
    """Nothing is written, whichever rank the wrong number belongs to."""
    change, message = CONTENTS[case]
    path = tmp_path / "s.safetensors"
    written(path, [served(tp=2, rank=rank) for rank in range(2)], 2)
    rewrite(path, change, tp_size=2)
    saved = read_selection_file(path)
    for rank in range(2):
        states = empty(tp=2, rank=rank)
        before = [t.clone() for state in states for t in state.buffers().values()]
        with pytest.raises(ValueError, match=rf"s.safetensors: layers.0.w2/.*{message}"):
            restore(saved, states, tp_size=2, options=OPTIONS)
        for old, new in zip(before, (t for s in states for t in s.buffers().values()), strict=True):
            assert_same_bits(new, old, "state")


def test_a_mean_may_be_negative(tmp_path):
    path = tmp_path / "s.safetensors"
    written(path, [served()])
    rewrite(path, put("statistics_mean", -3.0))
    restore(read_selection_file(path), empty(), tp_size=1, options=OPTIONS)


HEADERS = {
    "no-version": (lambda h: h.pop("contract_version"), r"header has no 'contract_version'"),
    "no-tp-size": (lambda h: h.pop("tp_size"), r"the header has no 'tp_size'"),
    "tp-size-none": (lambda h: h.update(tp_size=None), r"tp_size None is no int"),
    "options-none": (lambda h: h.update(options=None), r"options None is no dict"),
    "sites-list": (lambda h: h.update(sites=[]), r"sites \[\] is no dict"),
    "site-null": (lambda h: h["sites"].update({"layers.0.w2": None}), r"site layers.0.w2 is None"),
    "site-empty": (lambda h: h["sites"].update({"layers.0.w2": {}}), r"w2: the header has no 'kin"),
    "site-type": (lambda h: h["sites"]["layers.0.w2"].update(shards="1"), r"shards '1' is no int"),
    "surplus": (lambda h: h.update(note=1), r"the header has 'note'; allowed are \['contract_ver"),
    "site-surplus": (
        lambda h: h["sites"]["layers.0.w2"].update(note=1),
        r"site layers.0.w2: the header has 'note'; allowed are \['kind', ",
    ),
    "ema": (lambda h: h["options"].update(ema=1.9), r"options: ema 1.9 is not allowed: a number"),
    "sampling-rate": (
        lambda h: h["options"].update(sampling_rate=2),
        r"options: sampling_rate 2 is not allowed",
    ),
    "shaping-option": (
        lambda h: h["options"].update(rac_statistic="mean"),
        r"options: rac_statistic 'mean' is not allowed",
    ),
    "option-surplus": (lambda h: h["options"].update(knob=1), r"options: unknown option 'knob'"),
    "version-first": (
        lambda h: h.update(contract_version=2, note=1),
        r"contract_version 2, this is 1",
    ),
}


@pytest.mark.parametrize("case", HEADERS)
def test_wrong_headers_are_refused(tmp_path, case):
    change, message = HEADERS[case]
    path = tmp_path / "s.safetensors"
    written(path, [served()])
    rewrite(path, lambda header, tensors: change(header) and None)
    with pytest.raises(ValueError, match=rf"s.safetensors: .*{message}"):
        read_selection_file(path)
    save_file({"x": torch.zeros(1)}, path, {"quads": "[1]"})
    with pytest.raises(ValueError, match=r"not a selection file: its header is \[1\]"):
        read_selection_file(path)


def test_other_metadata_is_refused(tmp_path):
    path = tmp_path / "s.safetensors"
    written(path, [served()])
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file(load_file(path), path, {**metadata, "format": "pt"})
    with pytest.raises(ValueError, match=r"the header has 'format'; allowed are \['quads'\]"):
        read_selection_file(path)


def test_an_option_may_be_newer_than_a_file_unless_it_shapes_a_selection(tmp_path):
    path = tmp_path / "s.safetensors"
    written(path, [served()])
    rewrite(path, lambda header, tensors: [header["options"].pop(k) for k in ("exact", "ema")])
    restore(read_selection_file(path), empty(), tp_size=1, options=OPTIONS)
    rewrite(path, lambda header, tensors: header["options"].pop("splice_weight"))
    with pytest.raises(ValueError, match=r"splice_weight None, this engine has 'dequant'"):
        restore(read_selection_file(path), empty(), tp_size=1, options=OPTIONS)


def test_a_header_is_checked_without_any_site(tmp_path):
    path = tmp_path / "s.safetensors"
    written(path, [served()])
    check_selection_file(path, tp_size=1, options=OPTIONS)
    with pytest.raises(ValueError, match="tp_size 1, this engine has 2"):
        check_selection_file(path, tp_size=2, options=OPTIONS)
    with pytest.raises(ValueError, match="splice_count_w13 16, this engine has 64"):
        check_selection_file(
            path, tp_size=1, options=CompensationOptions.from_preset("quads_splice")
        )


def test_foreign_files_are_refused(tmp_path):
    path = tmp_path / "s.safetensors"
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="not a selection file: its header"):
        read_selection_file(path)
    path.write_bytes(b"no safetensors at all")
    with pytest.raises(ValueError, match="not a selection file"):
        read_selection_file(path)
    with pytest.raises(OSError):
        read_selection_file(tmp_path / "absent")


def test_incomplete_and_contradicting_ranks_are_refused(tmp_path):
    path = tmp_path / "s.safetensors"
    with pytest.raises(ValueError, match=r"layers.0.w2: no rank has group 0 of shard 1"):
        written(path, [served(tp=2, rank=0)], 2)
    with pytest.raises(ValueError, match=r"layers.0.w2: no rank has group 1 of shard 0"):
        written(path, [served(experts=(0, 2))])
    with pytest.raises(ValueError, match=r"layers.0.w13: replicas chose different"):
        written(path, [served(), empty()])
    with pytest.raises(ValueError, match=r"layers.0.w2: ranks disagree"):
        written(path, [served(), served(tp=2, rank=0)])
    assert not list(tmp_path.iterdir()), "a failed write leaves nothing"
    path.mkdir()
    with pytest.raises(OSError):
        written(path, [served()])
    assert list(tmp_path.iterdir()) == [path], "nor does a path that is a folder"


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "s.safetensors"
    written(path, [empty()])
    want = served()
    saved = written(path, [want])
    assert [p.name for p in tmp_path.iterdir()] == ["s.safetensors"]
    fresh = empty()
    restore(saved, fresh, tp_size=1, options=OPTIONS)
    assert_same_state(fresh[1], want[1])
