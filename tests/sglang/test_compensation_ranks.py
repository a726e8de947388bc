"""Compensation over two ranks, tensor and expert parallel: statistics, lists, selection files."""

import pytest
import torch

from quads_common.compensation import read_selection_file
from tests.sglang.compensated import heldout, hot_channels, hot_checkpoint, options_of, override
from tests.sglang.engine import run_engine
from tests.vllm.test_compensation import check_counts

pytestmark = pytest.mark.sglang

RANKS = {"tensor parallel": 1, "expert parallel": 2}


@pytest.fixture(scope="module", params=RANKS.values(), ids=RANKS.keys())
def run(request, tmp_path_factory):
    """An engine on two ranks; its results, and the file that it saved."""
    sequences = heldout(40)
    path = str(tmp_path_factory.mktemp("saved") / "selection.safetensors")
    probes = [
        ("counted", "counted", [sequences, 8]),
        ("refreshed", "refresh", []),
        ("lists", "lists", []),
        ("saved", "save", [path]),
        ("calibrated", "calibrated", [["347+589=", "12-345="] * 4]),
        ("other lists", "lists", []),
        ("cached, load", "radix_cache", [sequences[0] * 4, "nothing"]),
        ("loaded", "load", [path]),
        ("cached then", "cached_tokens", [sequences[0] * 4]),
        ("lists again", "lists", []),
        ("unwritable", "error_of", ["quads_save_selection", "/nowhere/file"]),
    ]
    hot = hot_checkpoint(tmp_path_factory.mktemp("hot") / "checkpoint")
    found = run_engine(
        tmp_path_factory.mktemp("engine"),
        hot,
        probes,
        quantization="quads_nvfp4",
        json_model_override_args=override(options_of("quads_splice")),
        chunked_prefill_size=56,
        max_running_requests=16,
        tp_size=2,
        ep_size=request.param,
        variables={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
    )
    return {**found, "file": read_selection_file(path), "hot": hot_channels(hot)}


def test_statistics_of_each_rank(run):
    for result in run["counted"]:
        check_counts(result, hidden_sites=12, expert_sites=4)
    first, second = run["counted"]
    for site, counts in first["counts"].items():
        if len(counts) == 8:  # expert parallel: each rank counts for its own
            assert sum(counts) + sum(second["counts"][site]) == 4 * first["tokens"]


def test_ranks_agree_where_they_share_an_input(run):
    first, second = run["lists"]
    for layer, planted in enumerate(run["hot"]):
        site = f"model.layers.{layer}.mlp.experts.w13"
        assert first[site] == second[site]
        assert first[site]["channels"] == [sorted(planted)]
        w2 = f"model.layers.{layer}.mlp.experts.w2"
        assert first[w2] != second[w2]
    assert [r["applied"] for r in run["refreshed"]] == [True, True]


def test_the_file_has_the_lists_of_the_whole_model(run):
    """Global channel ids: experts side by side, or shards of each expert side by side."""
    saved = run["file"]
    assert (saved.tp_size, run["saved"]["inputs"]) == (2, 16)
    site = "model.layers.0.mlp.experts.w2"
    whole = saved.tensors[f"{site}/selection_channels"]
    ranks = [r[site] for r in run["lists"]]
    if len(ranks[0]["groups"]) == 8:
        expected = torch.zeros(16, 16, dtype=torch.int32)
        for rank in ranks:
            expected[rank["groups"]] = torch.tensor(rank["channels"], dtype=torch.int32)
    else:
        shards = [torch.tensor(r["channels"], dtype=torch.int32) for r in ranks]
        shards[1] = torch.where(shards[1] < 0, -1, shards[1] + 32)
        expected = torch.cat(shards, dim=1)
    assert torch.equal(whole, expected)


def test_loading_it_brings_the_lists_back(run):
    assert run["other lists"] != run["lists"]
    assert run["lists again"] == run["lists"]


def test_the_radix_caches_of_all_ranks_are_flushed(run):
    """Ranks whose caches differed would hang or answer for other prompts."""
    second, third = run["cached, load"]
    assert second == third > 0
    assert run["cached then"] == 0


def test_an_error_of_one_rank_is_told(run):
    """Only the first rank writes the file."""
    assert "No such file" in run["unwritable"] or "does not exist" in run["unwritable"]
