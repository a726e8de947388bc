"""After an update by any method the engine holds exactly what a fresh engine would, in place.

One engine on each model runs every method. A third starts on the second weights, and so is the
fresh engine that the others are compared with.
"""

import re

import pytest
import torch
from safetensors.torch import load_file

from quads_common.fingerprint import differing, fingerprint
from quads_common.quantize import quantize
from tests.sglang.engine import run_engine

pytestmark = pytest.mark.sglang

UPDATES = 20
# Faster to emulate; updates of compensated engines are in ``test_compensation*``.
PLAIN = {
    "quantization": "quads_nvfp4",
    "json_model_override_args": '{"quantization_config": {"method": "nvfp4"}}',
}


@pytest.fixture(scope="module")
def moe(arith_moe, second_checkpoint, tmp_path_factory):
    """The engine on arith-moe that every update is sent to."""
    first, second = str(arith_moe), str(second_checkpoint)
    probes = [
        ("matrix", "matrix", [first, second, True]),
        ("without quantizing", "without_quantizing", [second]),
        ("interrupted", "interrupted", [first, second]),
        ("bad", "bad_weights", [first, second]),
        ("names", "wrong_names", [second]),
        ("left half", "left_half", [first, second]),
        ("unreadable", "unreadable", []),
        ("after a failure", "after_a_failure", [first, second]),
        ("memory", "memory", [first, second, UPDATES]),
        ("release", "release", [first, second]),
    ]
    return run_engine(tmp_path_factory.mktemp("moe"), arith_moe, probes, **PLAIN)


@pytest.fixture(scope="module")
def fresh(second_checkpoint, tmp_path_factory):
    """State of an engine that starts on the second weights.

    Its ``ServerArgs`` are built before any plugin is loaded, and the environment switches the
    method on: the way of trainers that pass no engine options through.
    """
    return run_engine(
        tmp_path_factory.mktemp("fresh"),
        second_checkpoint,
        [("report", "report", []), ("state", "observe", [])],
        how="server args",
        variables={"SGLANG_QUADS_CONFIG": '{"enable": true, "model": "*second*"}'},
    )


@pytest.fixture(scope="module")
def linears(dense, second_dense, tmp_path_factory):
    """The engine on the dense model."""
    probes = [
        ("matrix", "matrix", [str(dense), str(second_dense), False]),
        ("names", "names_inside_linears", [str(second_dense)]),
    ]
    return run_engine(tmp_path_factory.mktemp("dense"), dense, probes, **PLAIN)


def check_matrix(matrix, cases):
    """W1, W1, W2, W1: bytes, addresses and tokens; returns the state on W2."""
    (start,) = matrix.pop("start")
    assert len(matrix) == cases
    states = []
    for case, (first, again, second, last) in matrix.items():
        assert first["state"] == again["state"] == last["state"] == start["state"], case
        assert second["state"].keys() == start["state"].keys(), case
        assert all(second["state"][k] != v for k, v in start["state"].items()), case
        for seen in (first, again, second, last):
            assert seen["addresses"] == start["addresses"], case
        assert first["tokens"] == last["tokens"] == start["tokens"], case
        states.append(second["state"])
    assert all(state == states[0] for state in states)
    return states[0]


def test_every_method_and_order(moe, fresh):
    """Of a model with experts, against a fresh engine on W2."""
    state = check_matrix(dict(moe["matrix"]), cases=12)
    assert state == fresh["state"]["state"], "not a fresh engine on W2"


def test_every_method_on_linears(linears):
    check_matrix(dict(linears["matrix"]), cases=5)


def expected_prints(weights):
    """What the trainer's quantizer gives for arith-moe's experts."""
    expected = {}
    for layer in range(4):
        for e in range(16):
            name = f"model.layers.{layer}.mlp.experts.{e}"
            gate, up, down = (weights[f"{name}.{n}_proj.weight"] for n in ("gate", "up", "down"))
            expected[f"{name}.w13"] = fingerprint(quantize(torch.cat([gate, up])))
            expected[f"{name}.w2"] = fingerprint(quantize(down))
    return expected


def quantized_part(state):
    """The fingerprints in a state."""
    return {name: digest for name, digest in state.items() if ".experts." in name}


def test_states_are_the_trainers(moe, arith_moe, second_checkpoint):
    for position, path in ((0, arith_moe), (2, second_checkpoint)):
        state = moe["matrix"]["one by one, split"][position]["state"]
        expected = expected_prints(load_file(path / "model.safetensors"))
        assert not differing(expected, quantized_part(state))


def test_dense_states_are_the_trainers(linears, dense):
    weights = load_file(dense / "model.safetensors")
    (start,) = linears["matrix"]["start"]
    for layer in range(2):
        for parent, names in (("self_attn", "qkv"), ("mlp", ("gate", "up"))):
            prefix = f"model.layers.{layer}.{parent}"
            group = {n: weights[f"{prefix}.{n}_proj.weight"] for n in names}
            amax = torch.stack([w.abs().amax() for w in group.values()]).amax().float()
            for n, weight in group.items():
                digest = fingerprint(quantize(weight, amax=amax))
                assert start["state"][f"{prefix}.{n}_proj"] == digest
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            full = f"model.layers.{layer}.{name}"
            digest = fingerprint(quantize(weights[f"{full}.weight"]))
            assert start["state"][full] == digest


def test_missing_quantization_is_noticed(moe, second_checkpoint):
    """What this suite would see without re-quantization: outputs change, bytes do not."""
    before, after = (moe["without quantizing"][k] for k in ("before", "after"))
    assert after["tokens"] != before["tokens"], "embeddings, norms and router moved"
    expected = expected_prints(load_file(second_checkpoint / "model.safetensors"))
    assert len(differing(expected, quantized_part(after["state"]))) == len(expected)
    assert quantized_part(after["state"]) == quantized_part(before["state"])


def test_interrupted_updates(moe):
    results = moe["interrupted"]
    w1 = moe["matrix"]["start"][0]["state"]
    w2 = moe["matrix"]["tensor, checkpoint"][2]["state"]
    assert results["half of W2, then W1 backwards"] == w1
    half = quantized_part(results["half of the tensors"])
    assert {k for k, v in half.items() if v == w2[k]} != set(), "nothing arrived"
    assert {k for k, v in half.items() if v == w1[k]} != set(), "everything arrived"
    mixed = [k for k, v in half.items() if v not in (w1[k], w2[k])]
    assert not mixed, f"neither old nor new: {mixed}"
    assert results["only gates: open"] == 64
    reported = results["only gates: reported"]
    assert len(reported) == 64
    assert "w13[0]: got ['model.layers.0.mlp.experts.0.w1'], never got ['w3']" in reported[0]
    assert results["only gates: state"] == w1
    assert results["gates of W2, ups of W1: state"] == w1
    assert results["every tensor twice"] == w1
    assert results["open at the end"] == 0


def test_no_half_pairs_with_another_updates(moe, second_checkpoint):
    """Experts stay whole whatever order follows an update that left half of one."""
    results = moe["left half"]
    for case in ("given_up", "from_disk", "of_a_failed_call"):
        assert (results[case]["error"], results[case]["changed"]) == ("", []), case
    missing = results["from_disk_without_it"]
    assert "no complete weights for model.layers.1.mlp.experts.w13[3];" in missing["error"]
    assert missing["changed"] == []
    assert results["of_an_earlier_call"]["error"] == "", "what came before the failed call counts"
    expected = expected_prints(load_file(second_checkpoint / "model.safetensors"))
    assert not differing(expected, quantized_part(results["then"]))


def test_unreadable_tensors(moe):
    """The server lives."""
    assert moe["unreadable"]["error"], "it was accepted"
    assert moe["unreadable"]["changed"] == []


def test_the_radix_cache_after_a_failed_update(moe):
    """Experts before the wrong one are new, so what was cached is of another model."""
    found = moe["after a failure"]
    assert "NaN or Inf" in found["error"]
    assert found["before"][1] > 0, "nothing was cached"
    assert found["after"] == found["flushed"]
    assert found["after"][0] != found["before"][0], "nothing changed"
    assert found["after"][1] == 0


def test_names_inside_linears(linears):
    for name, result in linears["names"].items():
        assert f"_proj.{name}" in result["error"], "by us, or by SGLang's model"
        assert result["changed"] == [], name


BAD = {
    "nan": r"ValueError: model\.layers\.1\.mlp\.experts\.3\.w3: NaN or Inf",
    "inf": r"ValueError: model\.layers\.1\.mlp\.experts\.3\.w3: NaN or Inf",
    "shape": r"ValueError: model\.layers\.1\.mlp\.experts\.3\.w3: expected shape \[64, 256\]",
    "transposed": r"expected shape \[64, 256\], got \[256, 64\]",
    "float64": r"TypeError: model\.layers\.1\.mlp\.experts\.3\.w3: .* got torch\.float64",
    "unknown expert": r"no quantized layer has such a weight: .*experts\.99\.up_proj\.weight",
    "stack": r"experts\.gate_up_proj: expected 16 experts, got shape \[15, 128, 256\]",
    "unknown name": r"no quantized layer has such a weight: .*experts\.3\.extra\.weight",
    "scales": r"ValueError: the checkpoint holds quantization scales",
    "direct": r'does not support load_format "direct"',
    "flash_rl": r"does not support load format 'flash_rl': use one of",
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_weights(moe, case):
    """The update fails and names the tensor; the server lives and serves what it had."""
    result = moe["bad"][case]
    assert re.search(BAD[case], result["error"]), result["error"]
    assert result["changed"] == []


QUANTIZED = "no quantized layer has such a weight: "
NO_NAME = "ValueError: no parameter of the model has such a name: "
WRONG_NAMES = {
    "module": r"module\.model\.",
    "no model": r"layers\.\d+\.mlp\.experts\.|embed_tokens\.weight",
    "orig_mod": r"layers\.\d+\._orig_mod\.mlp\.",
    "module, whole": f"{QUANTIZED}module\\.model\\.layers\\.0\\.mlp\\.experts.* more",
    "no model, whole": f"{QUANTIZED}layers\\.0\\.mlp\\.experts.* more",
    "orig_mod, whole": f"{QUANTIZED}model\\.layers\\.0\\._orig_mod\\.mlp\\.experts.* more",
    "norm": f"{NO_NAME}module.model.norm.weight; nothing was loaded",
    "bare norm": f"{NO_NAME}norm.weight; nothing was loaded",
    "wrapped norm": f"{NO_NAME}model.norm._orig_mod.weight; nothing was loaded",
}


@pytest.mark.parametrize("case", WRONG_NAMES)
def test_wrong_names(moe, case):
    """Names that only a wrapper of the trainer's explains, which SGLang skips in silence."""
    result = moe["names"][case]
    assert re.search(WRONG_NAMES[case], result["error"]), result["error"]
    assert result["changed"] == []


def test_names_that_are_rightly_skipped(moe):
    for case in ("beside a known one", "rotary", "kv scale", "draft layer"):
        assert moe["names"][case]["error"] == "", case
    assert "no parameter of the model has such a name: module.norm.weight; SGLang" in moe["log"]


def test_wrong_weights_on_disk(moe, second_checkpoint):
    """Only the wrong tensor's unit keeps its old values for certain; SGLang's own rollback, which
    reads the same files again, does not end the server."""
    result = moe["bad"]["nan on disk"]
    assert re.search(BAD["nan"], result["error"]), result["error"]
    assert "model.layers.1.mlp.experts.3.w13" not in result["changed"]


def test_incomplete_checkpoints_on_disk(moe):
    """An update from disk is a whole one: what did not come is named and keeps its weights."""
    names = moe["bad"]["half on disk"]["changed"] + ["model.layers.1.mlp.experts.3.w13"]
    assert len(names) == len(set(names)) == 128
    for case, units in (
        ("half on disk", "model.layers.1.mlp.experts.w13[3]"),
        ("missing on disk", "model.layers.1.mlp.experts.w13[3], model.layers.1.mlp.experts.w2[3]"),
    ):
        result = moe["bad"][case]
        assert f"no complete weights for {units}; they keep their previous" in result["error"]
    left = set(names) - set(moe["bad"]["missing on disk"]["changed"])
    assert left == {f"model.layers.1.mlp.experts.3.{w}" for w in ("w13", "w2")}


def test_memory_is_flat(moe):
    """Live tensors after each of 20 updates, and what was staged while they ran."""
    found = moe["memory"]
    assert len(found) == UPDATES
    assert len({entry["live"] for entry in found[1:]}) == 1, found
    assert all(entry["staged"] == 0 for entry in found)
    unit = 2 * 64 * 256 * 2
    in_order = [entry["half-way"] for i, entry in enumerate(found) if i % 4 != 3]
    assert max(in_order) <= unit, in_order
    every_gate_first = [entry["half-way"] for i, entry in enumerate(found) if i % 4 == 3]
    assert 0 < max(every_gate_first) <= 4 * 16 * unit, "never more than the open units"


def test_release_and_resume(moe):
    """Weights survive where memory does; where they do not, nothing runs before all came."""
    results = moe["release"]
    assert results["resumed"] == results["before"]
    assert results["W2"]["state"] == moe["matrix"]["tensor, checkpoint"][2]["state"]
    assert results["all lost"].startswith("WeightsLostError: no weights since release_memory")
    assert results["half came"].startswith("WeightsLostError")
    assert results["all came"] == ""
    assert results["after"] == results["before"]


def test_switched_on_by_the_environment(fresh):
    (report,) = fresh["report"]
    assert (report["method"], report["layers_quantized"]) == ("quads", 4)
    assert "SGLANG_QUADS_CONFIG switches on quads_nvfp4 for" in fresh["log"]
