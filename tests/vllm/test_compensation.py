"""Compensation in a running engine: statistics, refreshes, files, BF16 columns, metrics.

One engine runs ``quads_splice`` on every layer of arith-moe with planted hot channels, one starts
from the selection it saved, one is compiled and caches prefixes, two run ``foursight``.
"""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from tests.vllm.engine import run_engine

pytestmark = pytest.mark.engine

SPLICE = {
    "method": "quads_splice",
    "targets": "all",
    "sampling_rate": 1,
    "min_tokens": 8,
    **{f"splice_count_{kind}": 16 for kind in ("w13", "w2", "linear")},
}
FOURSIGHT = {**SPLICE, "method": "foursight", "targets": "auto"}
SMALL_STEPS = {"max_num_batched_tokens": 120, "max_num_seqs": 40}  # cuts prompts into chunks
ALL_COUNTED = {"max_num_batched_tokens": 256, "max_num_seqs": 40}  # as many as wait at once
OTHERS = 1000


@pytest.fixture(scope="module")
def hot(variant):
    """arith-moe with its hot channels 32 times as large."""
    return variant("--scale", "32")


@pytest.fixture(scope="module")
def sequences(arith_moe, problems):
    """Token ids of held-out problems, and one long sequence made of them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arith_moe)
    texts = [prompt + answer for prompt, answer in problems.heldout(OTHERS + 40, seed=5)]
    found = [tokenizer(text)["input_ids"] for text in texts]
    return [*found[:30], [token for ids in found[:30] for token in ids][:200], *found[40:]]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """Run probes in an engine with the given options of the method."""

    def run(model, options, probes, **engine_options):
        folder = tmp_path_factory.mktemp("engine")
        found = run_engine(
            folder,
            model,
            probes,
            quantization="quads_nvfp4",
            additional_config={"quads": options},
            **engine_options,
        )
        return {**found, "log": (folder / "log.txt").read_text()}

    return run


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Where the first engine saves its selection."""
    return tmp_path_factory.mktemp("saved") / "selection.safetensors"


@pytest.fixture(scope="module")
def spliced(engine, hot, sequences, saved):
    """The engine that is looked into most."""
    batch, others = sequences[:31], sequences[31:]
    probes = [
        ("first lists", "lists", []),
        ("first logprobs", "logprobs", [batch]),
        ("fed", "generate", [batch, 5]),
        ("refreshed", "refresh", []),
        ("lists", "lists", []),
        ("metrics", "metrics", []),
        ("frozen", "frozen", [batch[0], others]),
        ("saved", "save", [str(saved)]),
        ("logprobs", "logprobs", [batch]),
        ("errors", "errors_of_load", [str(saved), str(saved.parent)]),
        ("synced", "synced", [str(hot)]),
        ("raw, reset_prefix_cache", "raw_sync", [str(hot), "reset_prefix_cache"]),
        ("raw, wake_up", "raw_sync", [str(hot), "wake_up"]),
        ("loaded", "load", [str(saved)]),
        ("logprobs of the file", "logprobs", [batch]),
        ("calibrated", "calibrated", [["347+589=", "12-345="] * 4]),
        ("counted", "counted", [batch, 8]),
        ("buffers", "buffers", []),
    ]
    return engine(hot, SPLICE, probes, **SMALL_STEPS)


@pytest.fixture(scope="module")
def restarted(engine, hot, sequences, saved, spliced):
    """Another engine that starts with what the first one saved, and refreshes every third sync."""
    options = {**SPLICE, "selection_file": str(saved), "refresh_interval": 3}
    probes = [
        ("logprobs", "logprobs", [sequences[:31]]),
        ("lists", "lists", []),
        ("survives", "survives", [str(hot)]),
    ]
    return engine(hot, options, probes, **SMALL_STEPS)


def hot_channels(model):
    """The planted channels of each layer."""
    return json.loads((model / "config.json").read_text())["arith_moe"]["hot_channels"]


def check_counts(result, hidden_sites, expert_sites, top_k=4):
    """Statistics equal the recomputation, and every token was counted once where it should be."""
    assert not result["wrong"], result["wrong"]
    assert set(result["worst"]) == {"mean", "m2", "plain_energy"}
    assert max(result["worst"].values()) <= 1e-5, result["worst"]
    tokens = result["tokens"]
    assert result["offered"] == [tokens]
    found = {"hidden": 0, "experts": 0}
    for site, counts in result["counts"].items():
        if site.endswith(".w2"):
            found["experts"] += 1
            assert len(counts) < 16 or sum(counts) == top_k * tokens, site
        else:
            found["hidden"] += 1
            assert counts == [tokens], site
    assert found == {"hidden": hidden_sites, "experts": expert_sites}


def test_statistics_equal_the_rows_that_were_served(spliced):
    """Chunked prefill, mixed decode, forwards padded to 8 rows of 1e4."""
    (result,) = spliced["counted"]
    check_counts(result, hidden_sites=4 + 4 + 4, expert_sites=4)
    padded = [rows - real for real, rows in result["forwards"]]
    assert max(padded) > 0 and min(padded) == 0, "padding was not exercised"
    assert {rows % 8 for _, rows in result["forwards"]} == {0}
    assert max(real for real, _ in result["forwards"]) == 120, "no prompt was cut"


def test_planted_channels_are_found(spliced, hot):
    (before,), (after,) = spliced["first lists"], spliced["lists"]
    for layer, planted in enumerate(hot_channels(hot)):
        site = f"model.layers.{layer}.mlp.experts.w13"
        assert before[site]["channels"] == [[-1] * 16]
        assert before[site]["blocks"] == [list(range(16))]
        assert after[site]["channels"] == [sorted(planted)]
        assert sum(b >= 0 for b in after[site]["blocks"][0]) == 8


def test_refresh_reports(spliced):
    (result,) = spliced["refreshed"]
    assert result["applied"] and result["changed"]
    assert {m["name"] for m in result["metrics"]} == set(spliced["lists"][0])
    for site in result["metrics"]:
        assert 0 < site["residual_energy_after"] < 0.1 * site["residual_energy_before"], site
    assert spliced["log"].count("selections refreshed: 16 inputs, residual energy ") >= 4


def test_metrics_reach_prometheus(spliced):
    (reported,), shown = spliced["metrics"]["workers"], spliced["metrics"]["prometheus"]
    assert {m["name"] for m in reported} == {site for _, site in shown}
    for site in reported:
        for key in ("residual_energy_before", "blocks_overlap", "tokens", "refreshes"):
            assert shown[f"vllm:quads_{key}", site["name"]] == site[key]


def test_nothing_moves_between_two_boundaries(spliced):
    frozen = spliced["frozen"]
    assert frozen["same lists"]
    assert torch.equal(frozen["before"], frozen["after"])


def test_a_sync_moves_only_the_selection(spliced):
    before, after = spliced["synced"]["before"], spliced["synced"]["after"]
    assert before["prints"] == after["prints"]
    assert before["buffers"] == after["buffers"]
    assert before["lists"] != after["lists"], "1000 other requests changed no list"


@pytest.mark.parametrize("boundary", ["reset_prefix_cache", "wake_up"])
def test_the_first_boundary_after_raw_loads_refreshes(spliced, boundary):
    start, loaded, first, second = spliced[f"raw, {boundary}"]["refreshes"]
    assert (loaded - start, first - loaded, second - first) == (0, 1, 0)


def test_state_is_owned_by_the_model(spliced):
    """As buffers, which sleep level 2 saves, but in no checkpoint."""
    (found,) = spliced["buffers"]
    assert found["not owned"] == []
    assert found["persistent"] == []
    assert found["addresses"] == spliced["synced"]["before"]["buffers"][0]["addresses"]


def test_a_selection_file_brings_the_outputs_back(spliced):
    same = zip(spliced["logprobs"], spliced["logprobs of the file"], strict=True)
    assert all(torch.equal(a, b) for a, b in same)
    other = zip(spliced["logprobs"], spliced["first logprobs"], strict=True)
    assert not all(torch.equal(a, b) for a, b in other), "the selection changes nothing"
    assert [saved["inputs"] for saved in spliced["saved"]] == [16]


def test_a_restarted_engine_gives_the_same_outputs(spliced, restarted):
    assert restarted["lists"] == spliced["lists"]
    for a, b in zip(spliced["logprobs"], restarted["logprobs"], strict=True):
        assert torch.equal(a, b)
    assert f"quads_nvfp4: selections of {'/'}" in restarted["log"]


def test_statistics_survive_a_sync_that_is_not_due(restarted):
    before, after = restarted["survives"]["before"], restarted["survives"]["after"]
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert any(int(t.sum()) for name, t in before.items() if name.endswith("statistics_count"))


def test_files_that_do_not_fit(spliced):
    errors = spliced["errors"]
    assert re.search(r"ValueError: .*tp_size 8, this engine has 1", errors["tp_size"])
    assert re.search(r"ValueError: .*contract_version 99, this is 1", errors["contract_version"])
    assert "is not a selection file" in errors["no file"]
    assert errors["missing"]
    assert errors["changed"] == ""


def test_calibration_runs_twice_for_splice_and_rac(spliced):
    result = spliced["calibrated"]
    assert result["applied"]
    assert result["sites"] == 16
    tokens = 4 * (len("347+589=") + len("12-345=")) + 8 * 4 - 8
    assert result["tokens"] >= 2 * tokens


def test_compiled(engine, arith_moe, sequences):
    """Dynamo, Inductor, a prefix cache, which a changed selection resets, and unequal ratios."""
    options = {"targets": "all", "sampling_rate": 1, "min_tokens": 8, "adaptive": True}
    probes = [
        ("counted", "counted", [sequences[:31]]),
        ("cached, refresh", "prefix_cache", [sequences[30], "refresh"]),
        ("lists", "lists", []),
        ("cached, nothing", "prefix_cache", [sequences[30], "nothing"]),
        ("buffers", "buffers", []),
        ("refreshed while running", "refresh_while_running", [sequences[30], sequences[29]]),
    ]
    found = engine(
        arith_moe,
        options,
        probes,
        enforce_eager=False,
        enable_prefix_caching=True,
        block_size=32,
        **ALL_COUNTED,
    )
    (result,) = found["counted"]
    check_counts(result, hidden_sites=12, expert_sites=4)
    second, third = found["cached, refresh"]
    assert second > 0 and third == 0
    second, third = found["cached, nothing"]
    assert second == third > 0
    running = found["refreshed while running"]
    assert running["hits"] > 0, "the prompt was not cached"
    assert running["kept"] > 0, "a request ran"
    assert running["after"] == 0, "results of the former lists were found again"
    assert found["log"].count("the selection changed while requests were running") == 1
    assert "method quads, act nvfp4, targets all" in found["log"]
    (lists,) = found["lists"]
    blocks = [sum(b >= 0 for b in what["blocks"][0]) for s, what in lists.items() if ".w13" in s]
    assert sum(blocks) == 4 * 8 and len(set(blocks)) > 1, f"{blocks=}: adaptive, in total a half"


@pytest.fixture(scope="module")
def foursight(engine, hot, sequences, tmp_path_factory):
    """Calibrated, synced, half synced; and an engine that starts with the file of the first."""
    path = str(tmp_path_factory.mktemp("foursight") / "selection.safetensors")
    prompts = [f"{100 + 7 * i}+{20 + 31 * i}=" for i in range(60)]
    probes = [
        ("calibrated", "calibrated", [prompts, path]),
        ("waiting", "lists", []),
        ("uncompensated", "logprobs", [sequences[:20]]),
        ("reloaded", "reload", [str(hot)]),
        ("lists", "lists", []),
        ("columns", "columns", []),
        ("logprobs", "logprobs", [sequences[:20]]),
        ("fed", "generate", [sequences[31:80], 5]),
        ("half", "sync_without", [str(hot), "experts.3."]),
        ("whole", "sync_without", [str(hot), "none is skipped"]),
    ]
    first = engine(hot, FOURSIGHT, probes)
    probes = [("lists", "lists", []), ("columns", "columns", []), probes[6]]
    second = engine(hot, {**FOURSIGHT, "selection_file": path}, probes)
    return first, second


def expected_columns(model, lists):
    """Columns of the BF16 checkpoint that belong to the lists, by site."""
    weights, found = load_file(model / "model.safetensors"), {}
    for site, what in lists.items():
        name, _, kind = site.rpartition(".")
        columns = []
        for expert in range(16):
            parts = ("gate", "up") if kind == "w13" else ("down",)
            matrix = torch.cat([weights[f"{name}.{expert}.{p}_proj.weight"] for p in parts])
            channels = torch.tensor(what["channels"][expert if kind == "w2" else 0])
            picked = matrix[:, channels.clamp(min=0)]
            columns.append(torch.where(channels >= 0, picked, 0))
        found[site] = torch.stack(columns)
    return found


def assert_columns(found, model):
    (lists,), (columns,) = found["lists"], found["columns"]
    expected = expected_columns(model, lists)
    assert columns.keys() == expected.keys()
    assert all(torch.equal(columns[site], expected[site]) for site in expected)


def test_bf16_columns_wait_for_a_sync(foursight, hot):
    first, _ = foursight
    assert not first["calibrated"]["applied"]
    assert first["calibrated"]["sites"] == 8
    assert all(c == [-1] * 16 for site in first["waiting"][0].values() for c in site["channels"])
    for layer, planted in enumerate(hot_channels(hot)):
        site = f"model.layers.{layer}.mlp.experts.w13"
        assert first["lists"][0][site]["channels"] == [sorted(planted)]
    assert_columns(first, hot)
    assert "the refresh takes effect with the next sync" in first["log"]


def test_an_engine_starts_with_bf16_columns(foursight, hot):
    first, second = foursight
    assert second["lists"] == first["lists"]
    assert_columns(second, hot)
    for a, b in zip(first["logprobs"], second["logprobs"], strict=True):
        assert torch.equal(a, b)
    other = zip(first["logprobs"], first["uncompensated"], strict=True)
    assert not all(torch.equal(a, b) for a, b in other), "the columns change nothing"


def test_half_a_sync_changes_no_list(foursight, hot):
    """Lists, codes and columns belong together, whatever came."""
    first, _ = foursight
    assert first["half"]["lists"] == first["lists"]
    assert_columns(first["half"], hot)
    assert "8 inputs keep their hot channels, because the sync did not bring all" in first["log"]
    assert first["whole"]["lists"] != first["lists"], "49 other sequences changed no list"
    assert_columns(first["whole"], hot)


def test_nothing_to_compensate_stops_the_engine(engine, arith_moe):
    with pytest.raises(RuntimeError, match=r"compensate \['linear'\] with method 'quads' names no"):
        engine(arith_moe, {"compensate": ["linear"]}, [])
