"""Compensation over two ranks, tensor and expert parallel: statistics, lists, selection files."""

import pytest
import torch

from quads_common.compensation import read_selection_file
from tests.vllm.engine import run_engine
from tests.vllm.test_compensation import SPLICE, check_counts, hot_channels
from tests.vllm.test_sharding import TWO_RANKS

pytestmark = pytest.mark.engine

RANKS = {"tensor parallel": {}, "expert parallel": {"enable_expert_parallel": True}}


@pytest.fixture(scope="module", params=RANKS.values(), ids=RANKS.keys())
def run(request, variant, problems, arith_moe, tmp_path_factory):
    """An engine on two ranks; its results, and the file that it saved."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arith_moe)
    texts = [prompt + answer for prompt, answer in problems.heldout(40, seed=5)]
    sequences = [tokenizer(text)["input_ids"] for text in texts]
    path = str(tmp_path_factory.mktemp("saved") / "selection.safetensors")
    probes = [
        ("counted", "counted", [sequences, 8]),
        ("refreshed", "refresh", []),
        ("lists", "lists", []),
        ("saved", "save", [path]),
        ("changed", "calibrated", [["347+589=", "12-345="] * 4]),
        ("other lists", "lists", []),
        ("loaded", "load", [path]),
        ("lists again", "lists", []),
    ]
    hot = variant("--scale", "32")
    found = run_engine(
        tmp_path_factory.mktemp("engine"),
        hot,
        probes,
        quantization="quads_nvfp4",
        additional_config={"quads": SPLICE},
        max_num_batched_tokens=56,
        max_num_seqs=16,
        **request.param,
        **TWO_RANKS,
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
        assert (
            first[f"model.layers.{layer}.mlp.experts.w2"]
            != second[f"model.layers.{layer}.mlp.experts.w2"]
        )
    assert [r["applied"] for r in run["refreshed"]] == [True, True]


def test_the_file_has_the_lists_of_the_whole_model(run):
    """Global channel ids: experts side by side, or shards of each expert side by side."""
    saved = run["file"]
    assert saved.tp_size == 2
    first, second = run["saved"]
    assert (first["inputs"], second) == (16, None)
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
