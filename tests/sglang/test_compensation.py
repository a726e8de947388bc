"""Compensation in a running engine: statistics, layers, refreshes, files, the radix cache.

One engine answers everything here: ``quads_splice`` on every layer of arith-moe with planted hot
channels. At its end it gets arith-moe's weights as they are, and a selection that vLLM saved on
them.
"""

import re

import pytest
import torch

from quads_common.ops import quads_linear, quads_moe
from tests.checkpoints import ARITH_MOE
from tests.sglang.compensated import (
    ALONE,
    CAPTURED,
    FED,
    GROUP,
    SCORED,
    VLLM_FILES,
    heldout,
    hot_channels,
    options_of,
)
from tests.sglang.compensated_reference import check_lists, check_logprobs
from tests.sglang.layer_check import check_layers, linear_weight
from tests.vllm.test_compensation import check_counts
from tests.vllm.test_served_numerics import stored

pytestmark = pytest.mark.sglang

# Cuts prompts into chunks and mixes decodes into them.
SMALL_STEPS = {"chunked_prefill_size": 120, "max_running_requests": 40, "enable_mixed_chunk": True}


@pytest.fixture(scope="module")
def spliced(compensated, hot, tmp_path_factory):
    """The engine that is looked into most."""
    sequences, saved = heldout(), tmp_path_factory.mktemp("saved")
    fed, others = sequences[FED], sequences[FED.stop :]
    long = [token for ids in fed for token in ids][:200]
    file, batch, alone = str(saved / "splice"), sequences[:CAPTURED], sequences[:ALONE]
    probes = [
        ("units", "inside", ["units"]),
        ("first lists", "lists", []),
        ("first alone", "alone", [alone]),
        ("layers, every block", "layers", [batch]),
        ("fed", "generate", [[*fed, long], 5]),
        ("refreshed", "refresh", []),
        ("lists", "lists", []),
        ("metrics", "metrics", []),
        ("frozen", "frozen", [batch[0], others]),
        ("layers, quads_splice", "layers", [batch]),
        ("saved", "save", [file]),
        ("alone", "alone", [alone]),
        ("errors", "errors_of_load", [file, str(saved)]),
        ("synced", "from_disk", [str(hot)]),
        ("boundaries, flush", "boundaries", [str(hot), "flush"]),
        ("boundaries, end_sync", "boundaries", [str(hot), "end_sync"]),
        ("boundaries, release", "boundaries", [str(hot), "release"]),
        ("loaded", "load", [file]),
        ("alone, file", "alone", [alone]),
        ("calibrated", "calibrated", [["347+589=", "12-345="] * 4]),
        ("counted", "counted", [[*fed, long], 8]),
        ("warm-up", "counted_of_warm_up", [batch[0]]),
        ("buffers", "buffers", []),
        ("cached, refresh", "radix_cache", [long, "refresh"]),
        ("cached, metrics", "radix_cache", [long, "metrics"]),
        ("fed others", "generate", [others[:40], 5]),
        ("while running", "refresh_while_running", [long, batch[1]]),
        ("layers, quads", "layers_without", ["channels", batch]),
        ("layers, nvfp4", "layers_without", ["residual", batch]),
        ("arith-moe", "from_disk", [str(ARITH_MOE)]),
        ("vLLM's loaded", "load", [str(VLLM_FILES / "quads_splice.safetensors")]),
        ("vLLM's lists", "lists", []),
        ("logprobs", "in_groups", [sequences[SCORED], GROUP]),
    ]
    return compensated(options_of("quads_splice"), probes, **SMALL_STEPS)


def test_statistics_equal_the_rows_that_were_served(spliced):
    """Chunked prefill, mixed decode, layers padded to 8 rows of 1e4."""
    (result,) = spliced["counted"]
    check_counts(result, hidden_sites=4 + 4 + 4, expert_sites=4)
    padded = [rows - real for real, rows in result["forwards"]]
    assert max(padded) > 0 and min(padded) == 0, "padding was not exercised"
    assert {rows % 8 for _, rows in result["forwards"]} == {0}
    assert max(real for real, _ in result["forwards"]) == 120, "no prompt was cut"


def test_warm_up_is_not_counted(spliced):
    before, after = spliced["warm-up"]
    assert before == after > 0


def test_planted_channels_are_found(spliced, hot):
    (before,), (after,) = spliced["first lists"], spliced["lists"]
    for layer, planted in enumerate(hot_channels(hot)):
        site = f"model.layers.{layer}.mlp.experts.w13"
        assert before[site]["channels"] == [[-1] * 16]
        assert before[site]["blocks"] == [list(range(16))]
        assert after[site]["channels"] == [sorted(planted)]
        assert sum(b >= 0 for b in after[site]["blocks"][0]) == 8


# Hot channels and blocks of w13's input that are in force.
STATES = {"every block": (0, 16), "quads_splice": (16, 8), "quads": (0, 8), "nvfp4": (0, 0)}


@pytest.mark.parametrize("lists", STATES)
def test_layers_equal_the_formulas(spliced, lists):
    """In float64, with the lists in force, each layer on its own captured input."""
    calls = spliced[f"layers, {lists}"]
    kinds = check_layers(calls, spliced["units"][0])
    assert kinds["experts"] >= 4 and kinds["linears"] >= 8, kinds
    first = next(c["w13"] for c in calls if "w13" in c)
    hot, blocks = int((first["channels"] >= 0).sum()), int(first["block_mask"].sum())
    assert (hot, blocks) == dict(zip(STATES, ((0, 16), (16, 8), (0, 8), (0, 0)), strict=True))[
        lists
    ]


def test_wrong_lists_are_noticed(spliced):
    """The check of layers sees a channel or a block that is not the one in force."""
    units = spliced["units"][0]
    call = next(c for c in spliced["layers, quads_splice"] if "w13" in c)
    for name in ("channels", "blocks"):
        lists = call["w13"][name].clone()
        first = int(lists[0, 0])
        lists[0, 0] = next(i for i in range(16) if i not in lists[0].tolist() and i != first)
        with pytest.raises(AssertionError):
            check_layers([{**call, "w13": {**call["w13"], name: lists}}], units)


def test_without_lists_layers_are_plain(spliced):
    """Bit for bit."""
    units = spliced["units"][0]
    for call in spliced["layers, nvfp4"]:
        if "w13" in call:
            w13, w2 = stored(units, call["layer"])
            out = quads_moe(
                call["x"], w13.packed, w13.block_scale, w13.global_scale, w2.packed,
                w2.block_scale, w2.global_scale, call["topk_weights"], call["topk_ids"], None,
                "silu", None, "nvfp4", False, "emulated",
            )  # fmt: skip
        else:
            w = linear_weight(units, call["layer"])
            scale = w.global_scale.reshape(1)
            out = quads_linear(call["x"], w.packed, w.block_scale, scale, None, "nvfp4", "emulated")
        assert torch.equal(call["out"], out), call["layer"]


def test_refresh_reports(spliced):
    (result,) = spliced["refreshed"]
    assert result["applied"] and result["changed"]
    assert {m["name"] for m in result["metrics"]} == set(spliced["lists"][0])
    assert spliced["metrics"] == [result["metrics"]]
    for site in result["metrics"]:
        assert 0 < site["residual_energy_after"] < 0.1 * site["residual_energy_before"], site
    assert spliced["log"].count("selections refreshed: 16 inputs, residual energy ") >= 4


def test_nothing_moves_between_two_boundaries(spliced):
    frozen = spliced["frozen"]
    assert frozen["same lists"]
    assert torch.equal(frozen["before"], frozen["after"])


def test_an_update_moves_only_the_selection(spliced):
    """From disk, which is a boundary by itself."""
    before, after = spliced["synced"]["before"], spliced["synced"]["after"]
    assert before["prints"] == after["prints"]
    assert before["buffers"] == after["buffers"]
    assert before["lists"] != after["lists"], "300 other requests changed no list"


@pytest.mark.parametrize("boundary", ["flush", "end_sync", "release"])
def test_the_first_boundary_after_tensors_refreshes(spliced, boundary):
    start, loaded, first, second = spliced[f"boundaries, {boundary}"]
    assert (loaded - start, first - loaded, second - first) == (0, 1, 0)


def test_state_is_owned_by_the_model(spliced):
    """As buffers, which a release of memory keeps, but in no checkpoint."""
    (found,) = spliced["buffers"]
    assert found["not owned"] == []
    assert found["persistent"] == []
    assert found["addresses"] == spliced["synced"]["before"]["buffers"][0]["addresses"]


def test_a_selection_file_brings_the_outputs_back(spliced):
    same = zip(spliced["alone"], spliced["alone, file"], strict=True)
    assert all(torch.equal(a, b) for a, b in same)
    other = zip(spliced["alone"], spliced["first alone"], strict=True)
    assert not all(torch.equal(a, b) for a, b in other), "the selection changes nothing"
    assert spliced["saved"]["inputs"] == 16


def test_errors_reach_the_client(spliced):
    errors = spliced["errors"]
    assert re.search(r"ValueError: .*tp_size 8, this engine has 1", errors["tp_size"])
    assert re.search(r"ValueError: .*contract_version 99, this is 1", errors["contract_version"])
    assert "is not a selection file" in errors["no file"]
    assert "FileNotFoundError" in errors["missing"]
    assert "quads_load_selection needs a path" in errors["no path"]
    assert errors["unwritable"]
    assert errors["changed"] == ""


def test_calibration_runs_twice_for_splice_and_rac(spliced):
    result = spliced["calibrated"]
    assert result["applied"]
    assert result["sites"] == 16
    tokens = 4 * (len("347+589=") + len("12-345=")) + 8 * 4 - 8
    assert result["tokens"] >= tokens, "the radix cache keeps what prompts share"


def test_the_radix_cache_is_flushed(spliced):
    """By a refresh that changed lists, not by a question; and not while a request runs."""
    second, third = spliced["cached, refresh"]
    assert second > 0 and third == 0
    second, third = spliced["cached, metrics"]
    assert second == third > 0
    running = spliced["while running"]
    assert running["hits"] > 0, "the prompt was not cached"
    assert running["changed"] and running["later"] > 0, "a request ran on"
    assert running["after"] == 0, "results of the former lists were found again"
    assert spliced["log"].count("the selection changed while requests were running") == 1


def test_a_file_of_vllm_is_taken_over(spliced):
    check_lists("quads_splice", spliced["vLLM's lists"][0])


def test_end_to_end(spliced):
    """Within the noise of another order of summation: to transformers, and to vLLM."""
    check_logprobs("quads_splice", spliced["logprobs"])


def test_nothing_to_compensate_stops_the_engine(compensated):
    with pytest.raises(RuntimeError, match=r"compensate \['linear'\] with method 'quads' names no"):
        compensated({"compensate": ["linear"]}, [])
