"""Compensation in a running engine: statistics, refreshes, files, BF16 columns, the radix cache.

One engine runs ``quads_splice`` on every layer of arith-moe with planted hot channels and is looked
into most, one starts with ``quads`` from a file of vLLM's, two run ``foursight``, the second from
what the first saved. ``vllm_files`` holds selections that vLLM saved on arith-moe as it is, and its
log-probs with them; the engines get those weights before they are compared.
"""

import re

import pytest
import torch

from quads_common.compensation import read_selection_file
from quads_common.ops import quads_linear, quads_moe
from tests.checkpoints import ARITH_MOE
from tests.sglang.compensated import (
    FED,
    PROMPTS,
    VLLM_FILES,
    heldout,
    hot_channels,
    hot_checkpoint,
    options_of,
    override,
    vllm_logprobs,
)
from tests.sglang.compensated_reference import use_compensation
from tests.sglang.engine import run_engine
from tests.sglang.layer_check import check_linear, check_moe
from tests.vllm import reference
from tests.vllm.test_compensation import assert_columns, check_counts
from tests.vllm.test_served_numerics import differences, stored

pytestmark = pytest.mark.sglang

# Cuts prompts into chunks and mixes decodes into them.
SMALL_STEPS = {"chunked_prefill_size": 120, "max_running_requests": 40, "enable_mixed_chunk": True}
CAPTURED = 12  # sequences in the batches that are looked into
ALONE = 12  # sequences that are sent one by one


@pytest.fixture(scope="module")
def hot(tmp_path_factory):
    """arith-moe with its hot channels 32 times as large."""
    return hot_checkpoint(tmp_path_factory.mktemp("hot") / "checkpoint")


@pytest.fixture(scope="module")
def sequences():
    """Held-out problems, as vLLM was given them."""
    return heldout()


@pytest.fixture(scope="module")
def engine(hot, tmp_path_factory):
    """Run probes in an engine with the given options of the method."""

    def run(options, probes, model=hot, **engine_options):
        return run_engine(
            tmp_path_factory.mktemp("engine"),
            model,
            probes,
            quantization="quads_nvfp4",
            json_model_override_args=override(options),
            **engine_options,
        )

    return run


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Where engines save their selections."""
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def spliced(engine, hot, sequences, saved):
    """The engine that is looked into most."""
    fed, others = sequences[PROMPTS : PROMPTS + FED], sequences[PROMPTS + FED :]
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
        ("synced", "synced", [str(hot)]),
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
        ("arith-moe", "synced", [str(ARITH_MOE)]),
        ("vLLM's loaded", "load", [str(VLLM_FILES / "quads_splice.safetensors")]),
        ("vLLM's lists", "lists", []),
        ("logprobs", "logprobs", [sequences[:PROMPTS]]),
    ]
    return engine(options_of("quads_splice"), probes, **SMALL_STEPS)


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


def check_layers(calls, units, rac=True):
    """Every captured call of experts and linears is legal."""
    kinds = {"experts": 0, "linears": 0}
    for call in calls:
        if "w13" in call:
            check_moe(call, *stored(units, call["layer"]), rac)
            kinds["experts"] += 1
        else:
            check_linear(call, linear_weight(units, call["layer"]), rac)
            kinds["linears"] += 1
    return kinds


def linear_weight(units, layer):
    """The [N, K] weight of a linear layer as the engine holds it."""
    from quads_common.format import QuantizedTensor

    found = units[f"{layer}[0]"]
    scale = found["block_scale"].view(torch.float8_e4m3fn)
    return QuantizedTensor(found["packed"], scale, found["global_scale"].reshape(()))


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


# Against vLLM, and the noise floor ---------------------------------------------------------------


@pytest.fixture(scope="module")
def quads(engine, sequences, saved):
    """Starts with ``quads`` from a file of vLLM's, and saves it again."""
    options = options_of("quads", selection_file=str(VLLM_FILES / "quads.safetensors"))
    probes = [
        ("vLLM's lists", "lists", []),
        ("logprobs", "logprobs", [sequences[:PROMPTS]]),
        ("saved", "save", [str(saved / "quads")]),
    ]
    return engine(options, probes, model=ARITH_MOE)


@pytest.fixture(scope="module")
def foursight(engine, hot, sequences, saved):
    """Calibrated, updated, half updated, with vLLM's file; one that starts with the first's."""
    path = str(saved / "foursight")
    prompts = [f"{100 + 7 * i}+{20 + 31 * i}=" for i in range(60)]
    batch, alone = sequences[:CAPTURED], sequences[:ALONE]
    probes = [
        ("units", "inside", ["units"]),
        ("calibrated", "calibrated", [prompts, path]),
        ("waiting", "lists", []),
        ("uncompensated", "alone", [alone]),
        ("updated", "by_tensors", [str(hot)]),
        ("lists", "lists", []),
        ("columns", "columns", []),
        ("alone", "alone", [alone]),
        ("layers, foursight", "layers", [batch]),
        ("fed", "generate", [sequences[PROMPTS : PROMPTS + FED], 5]),
        ("half", "update_without", [str(hot), "experts.3."]),
        ("whole", "update_without", [str(hot), "none is skipped"]),
        ("loaded", "load", [str(VLLM_FILES / "foursight.safetensors")]),
        ("arith-moe", "synced", [str(ARITH_MOE)]),
        ("vLLM's lists", "lists", []),
        ("logprobs", "logprobs", [sequences[:PROMPTS]]),
    ]
    first = engine(options_of("foursight"), probes)
    probes = [("lists", "lists", []), ("columns", "columns", []), ("alone", "alone", [alone])]
    second = engine(options_of("foursight", selection_file=path), probes)
    return first, second


@pytest.fixture(scope="module")
def served(spliced, quads, foursight):
    """Engines that hold vLLM's lists, by preset."""
    return {"quads_splice": spliced, "quads": quads, "foursight": foursight[0]}


PRESETS = ("quads", "quads_splice", "foursight")


@pytest.mark.parametrize("preset", PRESETS)
def test_a_file_of_vllm_is_taken_over(served, preset):
    saved = read_selection_file(VLLM_FILES / f"{preset}.safetensors")
    (lists,) = served[preset]["vLLM's lists"]
    assert lists.keys() == saved.sites.keys()
    for site, found in lists.items():
        for name in ("blocks", "channels"):
            assert found[name] == saved.tensors[f"{site}/selection_{name}"].tolist(), site


def test_a_saved_file_is_vllms(quads, saved):
    """Same sites, options, tensors: what vLLM saved, SGLang loaded and saved, vLLM loads again."""
    ours, theirs = (
        read_selection_file(path) for path in (saved / "quads", VLLM_FILES / "quads.safetensors")
    )
    assert (ours.tp_size, ours.options, ours.sites) == (
        theirs.tp_size,
        theirs.options,
        theirs.sites,
    )
    assert ours.tensors.keys() == theirs.tensors.keys()
    shaping = [name for name in theirs.tensors if "selection_" in name]
    assert shaping and all(torch.equal(ours.tensors[n], theirs.tensors[n]) for n in shaping)


@pytest.fixture(scope="module")
def expected(sequences):
    """Log-probs with a preset's lists from two legal orders of summation, made once each."""
    found = {}

    def of(preset):
        if preset not in found:
            path = VLLM_FILES / f"{preset}.safetensors"
            model = reference.load(ARITH_MOE, torch.bfloat16)
            use_compensation(model, path, reference.plain_matmul)
            other = reference.load(ARITH_MOE, torch.bfloat16, attention="eager")
            reference.reorder_linears(other)
            use_compensation(other, path, reference.split_matmul)
            batch = sequences[:PROMPTS]
            found[preset] = [reference.logprobs(m, batch) for m in (model, other)]
        return found[preset]

    return of


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_end_to_end(served, expected, preset):
    """Within the noise of another order of summation: to transformers, and to vLLM."""
    first, other = expected(preset)
    noise = differences(first, other)
    ours = served[preset]["logprobs"]
    for what, theirs in (("transformers", first), ("vLLM", vllm_logprobs(preset))):
        gap = differences(ours, theirs)
        print(f"{preset}: {what} {gap.mean()=} {noise.mean()=}")
        assert gap.mean() <= 1.5 * noise.mean(), f"{what}: {gap.mean()=} {noise.mean()=}"
        assert gap.quantile(0.99) <= 1.5 * noise.quantile(0.99), (
            f"{what}: {gap.quantile(0.99)=} {noise.quantile(0.99)=}"
        )


# BF16 columns ------------------------------------------------------------------------------------


def test_bf16_columns_wait_for_an_update(foursight, hot):
    first, _ = foursight
    assert not first["calibrated"]["applied"]
    assert first["calibrated"]["sites"] == 8
    assert all(c == [-1] * 16 for site in first["waiting"][0].values() for c in site["channels"])
    for layer, planted in enumerate(hot_channels(hot)):
        site = f"model.layers.{layer}.mlp.experts.w13"
        assert first["lists"][0][site]["channels"] == [sorted(planted)]
    assert_columns(first, hot)
    assert "the refresh takes effect with the next sync" in first["log"]


def test_layers_with_bf16_columns(foursight):
    calls = foursight[0]["layers, foursight"]
    kinds = check_layers(calls, foursight[0]["units"][0], rac=False)
    assert kinds["experts"] >= 4 and not kinds["linears"]


def test_an_engine_starts_with_bf16_columns(foursight, hot):
    """And gives the outputs of the one that saved the file."""
    first, second = foursight
    assert second["lists"] == first["lists"]
    assert_columns(second, hot)
    for a, b in zip(first["alone"], second["alone"], strict=True):
        assert torch.equal(a, b)
    other = zip(first["alone"], first["uncompensated"], strict=True)
    assert not all(torch.equal(a, b) for a, b in other), "the columns change nothing"


def test_half_an_update_changes_no_list(foursight, hot):
    """Lists, codes and columns belong together, whatever came."""
    first, _ = foursight
    assert first["half"]["lists"] == first["lists"]
    assert_columns(first["half"], hot)
    assert "8 inputs keep their hot channels, because the sync did not bring all" in first["log"]
    assert first["whole"]["lists"] != first["lists"], "other sequences changed no list"
    assert_columns(first["whole"], hot)


def test_nothing_to_compensate_stops_the_engine(engine):
    with pytest.raises(RuntimeError, match=r"compensate \['linear'\] with method 'quads' names no"):
        engine({"compensate": ["linear"]}, [])
