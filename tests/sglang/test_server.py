"""A real server, as a user starts it: answers, questions, and updates over HTTP."""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from quads_common.fingerprint import combine_ranks
from sglang_quads.client import decode
from tests.sglang.engine import CPU_OPTIONS, environment, stop_group
from tests.vllm.engine import free_port

pytestmark = pytest.mark.sglang

FLAGS = {
    key: value
    for key, value in CPU_OPTIONS.items()
    if key not in ("custom_weight_loader", "disable_cuda_graph", "skip_server_warmup")
}


OPTIONS = {"quantization_config": {"sampling_rate": 1, "min_tokens": 8}}


def command_line(model, port, options=OPTIONS):
    """``sglang.launch_server`` with the options of a CPU."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
    command += ["--quantization", "quads_nvfp4", "--port", str(port), "--host", "127.0.0.1"]
    command += ["--enable-metrics"]
    command += ["--json-model-override-args", json.dumps(options)]
    for key, value in FLAGS.items():
        flag = "--" + key.replace("_", "-")
        command += [flag] if value is True else [flag, str(value)]
    return command


def post(port, path, body=None, answer_of_error=False):
    """POST JSON, return what came back."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=json.dumps(body or {}).encode(),
        headers={"Content-Type": "application/json"},
        method="POST",
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            text = response.read()
    except urllib.error.HTTPError as error:
        if not answer_of_error:
            raise AssertionError(f"{path}: {error} {error.read()[:500]}") from None
        text = error.read()
    try:
        return json.loads(text)
    except ValueError:
        return text.decode()


def wait_for(port, server, log):
    """Until the server answers; fails with its log."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()[-4000:]
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
            return
        except OSError:
            time.sleep(0.5)
    raise AssertionError("no answer in 180 s:\n" + log.read_text()[-4000:])


def prints(port):
    """Digests of the server's weights."""
    action = "quads_fingerprints"
    return combine_ranks(decode(action, post(port, "/weights_checker", {"action": action})))


def complete(port):
    """A greedy completion through the OpenAI API."""
    body = {"model": "default", "prompt": "347+589=", "temperature": 0, "max_tokens": 6}
    return post(port, "/v1/completions", body)["choices"][0]["text"]


def order(port, action):
    """Answers of all ranks."""
    return decode(action, post(port, "/weights_checker", {"action": action}))


def counted(port):
    """Rows that the last refresh, which this is, had seen."""
    (found,) = order(port, "quads_refresh")
    assert found["applied"] and len(found["metrics"]) == 8
    return max(site["tokens"] for site in found["metrics"])


def check_orders(port, folder):
    """Compensation over HTTP: calibration, files, metrics, errors."""
    prompts, file = folder / "prompts.txt", folder / "selection.safetensors"
    prompts.write_text("347+589=\n12-345=\n" * 20)
    command = [sys.executable, "-m", "sglang_quads.calibrate", "--prompts", str(prompts)]
    command += ["--url", f"http://127.0.0.1:{port}", "--save", str(file), "--max-tokens", "8"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["applied"] and found["sites"] == 8 and found["tokens"] > 100
    assert file.exists()
    assert order(port, f"quads_load_selection {file}") == [{"applied": True}]
    wrong = {"action": f"quads_load_selection {prompts}"}
    answer = post(port, "/weights_checker", wrong, answer_of_error=True)
    assert "is not a selection file" in answer["message"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
        shown = response.read().decode()
    (line,) = (
        line
        for line in shown.splitlines()
        if line.startswith("sglang:quads_tokens{") and "layers.0.mlp.experts.w13" in line
    )
    assert float(line.rpartition(" ")[2]) > 0
    before = [site["tokens"] for site in order(port, "quads_metrics")[0]]
    prompts.write_text("1+1=\n" + "1" * 5000 + "\n")
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 1 and "prompt 2 has 500" in done.stderr, done.stderr
    order(port, "quads_begin_calibration")
    assert counted(port) == 0 and order(port, "quads_undo_calibration") == [True]
    assert counted(port) == max(before) > 0, "the failed one has forgotten nothing"
    order(port, "quads_forget")


def test_updates_over_http(arith_moe, second_checkpoint, tmp_path):
    """Answer, report; pause, flush, update, continue; a bad update; back; answer."""
    port = free_port()
    log = tmp_path / "log.txt"
    with log.open("w") as sink:
        server = subprocess.Popen(
            command_line(arith_moe, port),
            stdout=sink,
            stderr=sink,
            env=environment(),
            start_new_session=True,
        )
    try:
        wait_for(port, server, log)
        assert counted(port) == 0, "the server's own warm-up"
        assert complete(port) == "936"
        check_orders(port, tmp_path)
        (report,) = decode(
            "quads_report", post(port, "/weights_checker", {"action": "quads_report"})
        )
        assert report["layers_quantized"] == 4
        first = prints(port)
        for path, expected in ((second_checkpoint, None), (arith_moe, first)):
            post(port, "/pause_generation", {"mode": "abort"})
            post(port, "/flush_cache", {})
            answer = post(port, "/update_weights_from_disk", {"model_path": str(path)})
            assert answer["success"], answer
            post(port, "/continue_generation")
            found = prints(port)
            assert found.keys() == first.keys()
            if expected is None:
                assert all(found[name] != first[name] for name in first)
            else:
                assert found == expected
        wrong = {"model_path": str(second_checkpoint), "load_format": "flash_rl"}
        answer = post(port, "/update_weights_from_disk", wrong, answer_of_error=True)
        assert not answer["success"]
        assert "load format 'flash_rl'" in answer["message"]
        assert prints(port) == first
        assert complete(port) == "936"
        assert "quads_nvfp4: 4 layers quantized, 12 kept" in log.read_text()
    finally:
        stop_group(server)


def test_a_wrong_option_stops_the_start(arith_moe):
    """One line says what is wrong, before a process is started."""
    command = command_line(arith_moe, free_port(), {"quantization_config": {"act": "int4"}})
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last == (
        "ValueError: quantization_config: act 'int4' is not allowed: one of ['nvfp4', 'bf16']"
    )
