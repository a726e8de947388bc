"""The presets ``quads`` and ``foursight`` in running engines, beside vLLM, and BF16 columns.

One engine starts with ``quads`` from a file of vLLM's, two run ``foursight``, the second from what
the first saved. ``vllm_files`` holds selections that vLLM saved on arith-moe as it is, and its
log-probs with them.
"""

import pytest
import torch

from quads_common.compensation import read_selection_file
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
from tests.sglang.layer_check import check_layers
from tests.vllm.test_compensation import assert_columns

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def sequences():
    """Held-out problems, as vLLM was given them."""
    return heldout()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Where engines save their selections."""
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def quads(compensated, sequences, saved):
    """Starts with ``quads`` from a file of vLLM's, and saves it again."""
    options = options_of("quads", selection_file=str(VLLM_FILES / "quads.safetensors"))
    probes = [
        ("vLLM's lists", "lists", []),
        ("logprobs", "in_groups", [sequences[SCORED], GROUP]),
        ("saved", "save", [str(saved / "quads")]),
    ]
    return compensated(options, probes, model=ARITH_MOE)


@pytest.fixture(scope="module")
def foursight(compensated, hot, sequences, saved):
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
        ("fed", "generate", [sequences[FED], 5]),
        ("half", "update_without", [str(hot), "experts.3."]),
        ("whole", "update_without", [str(hot), "none is skipped"]),
        ("loaded", "load", [str(VLLM_FILES / "foursight.safetensors")]),
        ("arith-moe", "from_disk", [str(ARITH_MOE)]),
        ("vLLM's lists", "lists", []),
        ("logprobs", "in_groups", [sequences[SCORED], GROUP]),
    ]
    first = compensated(options_of("foursight"), probes)
    probes = [("lists", "lists", []), ("columns", "columns", []), ("alone", "alone", [alone])]
    second = compensated(options_of("foursight", selection_file=path), probes)
    return first, second


@pytest.fixture(scope="module")
def served(quads, foursight):
    """Engines that hold vLLM's lists, by preset."""
    return {"quads": quads, "foursight": foursight[0]}


@pytest.mark.parametrize("preset", ["quads", "foursight"])
def test_a_file_of_vllm_is_taken_over(served, preset):
    check_lists(preset, served[preset]["vLLM's lists"][0])


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


@pytest.mark.parametrize("preset", ["quads", "foursight"])
def test_end_to_end(served, preset):
    """Within the noise of another order of summation: to transformers, and to vLLM."""
    check_logprobs(preset, served[preset]["logprobs"])


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
