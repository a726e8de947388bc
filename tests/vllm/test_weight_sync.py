"""After a sync by any path the engine holds exactly what a fresh engine would, at the same place.

One engine per model and mode runs every path with every order. The eager engine starts on the first
weights and the compiled one on the second, so each is the other's fresh engine.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request

import pytest
import torch
from safetensors.torch import load_file

from quads_common.fingerprint import combine_ranks, fingerprint
from quads_common.quantize import quantize
from tests.vllm.engine import free_port, run_engine

pytestmark = pytest.mark.engine

TRANSFER = {"weight_transfer_config": {"backend": "test_file"}}
SYNCS = 20


@pytest.fixture(scope="module")
def runs(arith_moe, second_checkpoint, dense, second_dense, tmp_path_factory):
    """Results of the four engines, each started when first asked for."""
    pairs = {"moe": (arith_moe, second_checkpoint), "dense": (dense, second_dense)}
    found = {}

    def results(model, mode):
        if (model, mode) not in found:
            first, second = (str(p) for p in pairs[model])
            if mode == "compiled":
                first, second = second, first
            probes = [("matrix", "sync_matrix", [first, second, model == "moe"])]
            if (model, mode) == ("moe", "eager"):
                probes += [
                    ("interrupted", "interrupted", [first, second]),
                    ("started again", "started_again", [first, second]),
                    ("bad", "bad_weights", [second]),
                    ("lost", "lost", [first]),
                    ("memory", "memory", [first, second, SYNCS]),
                ]
            found[model, mode] = run_engine(
                tmp_path_factory.mktemp(f"{model}_{mode}"),
                pairs[model][mode == "compiled"],
                probes,
                quantization="quads_nvfp4",
                enforce_eager=mode == "eager",
                **TRANSFER,
            )
        return found[model, mode]

    return results


@pytest.fixture(scope="module")
def eager_moe(runs):
    """The eager engine on arith-moe."""
    return runs("moe", "eager")


MODES = [(model, mode) for model in ("moe", "dense") for mode in ("eager", "compiled")]


@pytest.mark.parametrize("model, mode", MODES, ids=[f"{a}-{b}" for a, b in MODES])
def test_every_path_and_order(runs, model, mode):
    """W1, W1, W2, W1: bytes of a fresh engine, addresses unchanged, last output as the first."""
    matrix = runs(model, mode)["matrix"]
    (start,) = matrix["start"]
    cases = {case: observed for case, observed in matrix.items() if case != "start"}
    (other,) = runs(model, "compiled" if mode == "eager" else "eager")["matrix"].get(
        "start", [None]
    )
    assert len(cases) == (16 if model == "moe" else 12)
    for case, (first, again, second, last) in cases.items():
        assert first["state"] == again["state"] == last["state"] == start["state"], case
        assert second["state"].keys() == start["state"].keys(), case
        assert all(second["state"][k] != v for k, v in start["state"].items()), case
        if other is not None:
            assert second["state"] == other["state"], f"{case}: not a fresh engine on W2"
        for seen in (first, again, second, last):
            assert seen["addresses"] == start["addresses"], case
        assert first["tokens"] == last["tokens"] == start["tokens"], case


def test_states_are_the_trainers(eager_moe, checkpoint, second_checkpoint):
    """The fingerprints in those states are those of the shared quantizer on the checkpoints."""
    for position, weights in (
        (0, checkpoint),
        (2, load_file(second_checkpoint / "model.safetensors")),
    ):
        state = eager_moe["matrix"]["one by one, split"][position]["state"]
        for layer in range(4):
            for e in range(16):
                name = f"model.layers.{layer}.mlp.experts.{e}"
                pair = [weights[f"{name}.{n}_proj.weight"] for n in ("gate", "up")]
                assert state[f"{name}.w13"] == fingerprint(quantize(torch.cat(pair)))
                down = weights[f"{name}.down_proj.weight"]
                assert state[f"{name}.w2"] == fingerprint(quantize(down))


def test_dense_states_are_the_trainers(runs, dense):
    weights = load_file(dense / "model.safetensors")
    (start,) = runs("dense", "eager")["matrix"]["start"]
    for layer in range(2):
        for parent, names in (("self_attn", "qkv"), ("mlp", ("gate", "up"))):
            group = {n: weights[f"model.layers.{layer}.{parent}.{n}_proj.weight"] for n in names}
            amax = torch.stack([w.abs().amax() for w in group.values()]).amax().float()
            for n, weight in group.items():
                expected = fingerprint(quantize(weight, amax=amax))
                assert start["state"][f"model.layers.{layer}.{parent}.{n}_proj"] == expected
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            full = f"model.layers.{layer}.{name}"
            assert start["state"][full] == fingerprint(quantize(weights[f"{full}.weight"]))


def test_interrupted_syncs(eager_moe):
    """Units are whole, old or new; what was incomplete is reported and freed."""
    results = eager_moe["interrupted"]
    matrix = eager_moe["matrix"]
    w1 = matrix["start"][0]["state"]
    w2 = matrix["reload, checkpoint"][2]["state"]
    assert results["half of W2, then W1 backwards"] == w1
    half = results["half of the tensors"]
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
    assert eager_moe["started again"] == {"state": w1, "open": 0}


BAD = {
    "nan": r"ValueError: model\.layers\.1\.mlp\.experts\.3\.w3: NaN or Inf",
    "inf": r"ValueError: model\.layers\.1\.mlp\.experts\.3\.w3: NaN or Inf",
    "shape": r"ValueError: model\.layers\.1\.mlp\.experts\.3\.w3: expected shape \[64, 256\]",
    "transposed": r"expected shape \[64, 256\], got \[256, 64\]",
    "float64": r"TypeError: model\.layers\.1\.mlp\.experts\.3\.w3: .* got torch\.float64",
    "int8": r"TypeError: .*experts\.3\.w3: .* got torch\.int8",
    "unknown expert": r"ValueError: model\.layers\.1\.mlp\.experts\.99\.up_proj\.weight: no expert",
    "stack": r"experts\.gate_up_proj: expected 16 experts, got shape \[15, 128, 256\]",
    "unknown name": r"ValueError: model\.layers\.1\.mlp\.experts\.3\.extra\.weight: no expert",
    "scales": r"ValueError: the checkpoint holds quantization scales",
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_weights(eager_moe, case):
    """The sync fails and names the tensor; the engine goes on with the weights it had."""
    import re

    result = eager_moe["bad"][case]
    assert re.search(BAD[case], result["error"]), result["error"]
    assert result["unchanged"]
    assert result["tokens"] == eager_moe["matrix"]["start"][0]["tokens"]


def test_lost_weights(eager_moe):
    """After sleep level 2 nothing runs before every unit came again."""
    lost = eager_moe["lost"]
    assert lost["all lost"].startswith("WeightsLostError: no weights since sleep level 2")
    assert lost["half came"].startswith("WeightsLostError")
    assert lost["after"] == lost["before"]


def test_memory_is_flat(eager_moe):
    """Live tensors after each of 20 syncs, and what was staged while they ran."""
    after, peak = eager_moe["memory"]["after"], eager_moe["memory"]["peak"]
    assert len(after) == SYNCS
    assert len(set(after[1:])) == 1, f"{after=}"
    unit = 2 * 64 * 256 * 2
    in_order = [p for i, p in enumerate(peak) if i % 4 != 3]
    assert max(in_order) <= 2 * unit, f"{in_order=}"
    every_gate_first = max(peak)
    assert every_gate_first <= 4 * 16 * unit, f"{every_gate_first=}: never more than the open units"


def test_updates_over_http(arith_moe, second_checkpoint, tmp_path):
    """A real server: fingerprints, start/update/finish and answers over its HTTP endpoints."""
    port = free_port()
    command = [
        os.path.join(os.path.dirname(sys.executable), "vllm"),
        *["serve", str(arith_moe), "--quantization=quads_nvfp4", "--enforce-eager"],
        *["--max-model-len=128", "--gpu-memory-utilization=0.2", f"--port={port}"],
        *["--host=127.0.0.1", "--worker-extension-cls=tests.vllm.transfer.Registered"],
        *["--weight-transfer-config", '{"backend": "test_file"}'],
        *["--additional-config", '{"quads": {"sampling_rate": 1, "min_tokens": 8}}'],
    ]
    env = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": os.getcwd()}
    log = tmp_path / "log.txt"
    with log.open("w") as sink:
        server = subprocess.Popen(
            command, stdout=sink, stderr=sink, env=env, start_new_session=True
        )
    try:
        wait_for(port, server, log)
        first = prints(port)
        file = str(second_checkpoint / "model.safetensors")
        post(port, "/init_weight_transfer_engine", {"init_info": {}})
        post(port, "/pause?mode=keep")
        post(port, "/start_weight_update", {})
        post(port, "/update_weights", {"update_info": {"path": file}})
        post(port, "/finish_weight_update", {})
        post(port, "/resume")
        second = prints(port)
        assert first.keys() == second.keys()
        assert all(first[name] != second[name] for name in first)
        post(
            port,
            "/collective_rpc",
            {"method": "reload_weights", "kwargs": {"weights_path": str(arith_moe)}},
        )
        assert prints(port) == first
        request = {"model": str(arith_moe), "prompt": "347+589=", "temperature": 0, "max_tokens": 6}
        assert post(port, "/v1/completions", request)["choices"][0]["text"] == "936"
        check_compensation(port, tmp_path)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)


def check_compensation(port, folder):
    """Calibrate the server from a prompt file, save, load, and read its metrics endpoint."""
    prompts, path = folder / "prompts.jsonl", folder / "selection.safetensors"
    lines = [json.dumps({"prompt": f"{100 + 3 * i}+{200 + 7 * i}="}) for i in range(30)]
    prompts.write_text("\n".join(lines))
    command = [sys.executable, "-m", "vllm_quads.calibrate", f"--url=http://127.0.0.1:{port}"]
    command += [f"--prompts={prompts}", f"--save={path}", "--max-tokens=4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["applied"], found["sites"]) == (True, 8)
    assert found["tokens"] >= 30 * 8
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
        metrics = response.read().decode()
    site = "model.layers.0.mlp.experts.w13"
    assert f'vllm:quads_blocks_selected{{site="{site}"}} 0.5' in metrics
    assert f'vllm:quads_refreshes{{site="{site}"}}' in metrics
    body = {"method": "quads_load_selection", "args": [str(path)]}
    assert post(port, "/collective_rpc", body)["results"] == [{"applied": True}]
    done = subprocess.run([*command, "--prompts=/nowhere"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("calibrate: error: ")
    check_failed_calibration(port, command, path.with_suffix(".txt"))


def check_failed_calibration(port, command, prompts):
    """A prompt that is too long is noticed first; what fails later brings back what was counted."""

    def ask(method):
        return post(port, "/collective_rpc", {"method": method})["results"]

    before = ask("quads_selection_state")
    prompts.write_text("1+1=\n" + "1" * 5000 + "\n")
    done = subprocess.run([*command, f"--prompts={prompts}"], capture_output=True, text=True)
    assert done.returncode == 1 and "prompt 2 has 500" in done.stderr, done.stderr
    assert ask("quads_selection_state") == before
    (kept,) = ask("quads_metrics")
    ask("quads_begin_calibration")
    (forgotten,) = ask("quads_refresh")
    assert not any(site["tokens"] for site in forgotten["metrics"])
    # vLLM answers with text where a result is neither a list nor an object.
    assert ask("quads_undo_calibration") == ["True"] and ask("quads_metrics") == [kept]
    (again,) = ask("quads_refresh")
    assert [m["tokens"] for m in again["metrics"]] == [m["tokens"] for m in kept]
    assert ask("quads_selection_state")[0]["shared"] == before[0]["shared"]


def prints(port):
    """Digests of the server's weights."""
    results = post(port, "/collective_rpc", {"method": "quads_fingerprints"})["results"]
    return combine_ranks(results)


def post(port, path, body=None):
    """POST JSON, return what came back (None if nothing)."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=json.dumps(body or {}).encode(),
        headers={"Content-Type": "application/json"},
        method="POST",
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        text = response.read()
    return json.loads(text) if text else None


def wait_for(port, server, log):
    """Until the server answers; fails with its log."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()[-4000:]
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
            return
        except OSError:
            time.sleep(1)
    raise AssertionError("no answer in 240 s:\n" + log.read_text()[-4000:])
