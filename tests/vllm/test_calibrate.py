"""Calibration without an engine: prompts, arguments, and a server that answers oddly."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest

from vllm_quads.calibrate import calibrate, main, read_prompts


@pytest.fixture
def prompts(tmp_path):
    """A file with the given text."""

    def write(text, name="a.jsonl"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_prompts_of_a_file(prompts):
    text = prompts("one\n\n two \x0cthree\u2028four\x85five\r\n\n", "a.txt")
    assert read_prompts(text) == ["one", " two \x0cthree\u2028four\x85five"]
    lines = prompts('{"prompt": "one"}\n\n{"prompt": "t\u2028wo", "answer": 1}\n')
    assert read_prompts(lines) == ["one", "t\u2028wo"]


BAD_LINES = {
    "no prompt": '{"question": "two"}',
    "no string": '{"prompt": 1}',
    "list": '["two"]',
    "string": '"two"',
    "null": "null",
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_lines_without_a_prompt(prompts, case):
    """The number is the editor's, blank lines included."""
    path = prompts(f'\n{{"prompt": "one"}}\n\n{BAD_LINES[case]}\n')
    with pytest.raises(ValueError, match=r'a.jsonl: line 4 has no "prompt"'):
        read_prompts(path)


def test_files_without_prompts(prompts):
    with pytest.raises(ValueError, match=r"a.jsonl: line 2 is not valid JSON: .*column 2"):
        read_prompts(prompts('{"prompt": "one"}\n{bad\n'))
    for name in ("a.txt", "a.jsonl"):
        with pytest.raises(ValueError, match="holds no prompt"):
            read_prompts(prompts("\n  \n", name))
        with pytest.raises(ValueError, match=f"{name} is not UTF-8 text"):
            read_prompts(prompts(b"\xff\xfe\n", name))


class Model:
    """An ``LLM`` that notes what it is asked, and cannot save to ``nowhere``."""

    model_config = SimpleNamespace(max_model_len=16, skip_tokenizer_init=False)

    def __init__(self, fails=None):
        self.calls = []
        self.fails = fails

    def get_tokenizer(self):
        return SimpleNamespace(encode=lambda text: [0, *text.encode()])

    def collective_rpc(self, method, args=()):
        self.calls.append(method)
        if method == self.fails:
            raise RuntimeError(f"{method} went wrong")
        if args == ("nowhere",):
            raise OSError("nowhere cannot be written")
        found = {
            "quads_selection_state": {"calibration_passes": 2},
            "quads_refresh": {"applied": True, "metrics": []},
        }
        return [found.get(method)]

    def reset_prefix_cache(self):
        pass

    def generate(self, prompts, params, use_tqdm):
        self.calls.append("run")
        if self.fails == "run":
            raise RuntimeError("run went wrong")


@pytest.mark.parametrize("passes, runs", [(None, 2), (1, 1), (3, 3)])
def test_passes(passes, runs):
    model = Model()
    calibrate(model, ["a"], passes=passes, save="somewhere")
    asked = ["quads_selection_state", "quads_probe_selection", "quads_begin_calibration"]
    done = ["quads_save_selection", "quads_end_calibration"]
    assert model.calls == asked + ["run", "quads_refresh"] * runs + done


@pytest.mark.parametrize("fails", ["run", "quads_refresh", "quads_save_selection"])
def test_what_fails_later_brings_back_what_was_forgotten(fails):
    model = Model(fails)
    with pytest.raises(RuntimeError, match=f"^{fails} went wrong$"):
        calibrate(model, ["a"], save="somewhere")
    assert model.calls[-1] == "quads_undo_calibration"
    assert "quads_end_calibration" not in model.calls


def test_prompts_as_the_engine_takes_them():
    """Whatever can be iterated, of texts and token ids; all that fits."""
    model = Model()
    calibrate(model, iter(["a" * 14, [1] * 15, {"prompt": "a"}, {"prompt_token_ids": [1]}]))
    assert "run" in model.calls


@pytest.mark.parametrize(
    "change, message",
    [
        ({"passes": 0}, "passes 0 is not allowed: an integer from 1"),
        ({"passes": -1}, "passes -1 is not allowed"),
        ({"passes": 1.5}, "passes 1.5 is not allowed"),
        ({"max_tokens": 0}, "max_tokens 0 is not allowed"),
        ({"prompts": []}, "prompts is empty"),
        ({"prompts": "a text"}, "prompts 'a text' is not allowed: a list of prompts"),
        ({"prompts": {"prompt": "a"}}, "prompts {'prompt': 'a'} is not allowed: a list"),
        ({"prompts": 5}, "prompts 5 is not allowed: a list of prompts"),
        ({"prompts": ["a", ""]}, "prompt 2 '' is not allowed: a text, not empty"),
        ({"prompts": [[1], 5]}, "prompt 2 5 is not allowed: a text"),
        ({"prompts": ["a", []]}, r"prompt 2 \[\] is not allowed: token ids"),
        ({"prompts": ["a", "a" * 15]}, "prompt 2 has 16 tokens: .* context length of 16"),
        ({"prompts": [[1] * 16]}, "prompt 1 has 16 tokens"),
        ({"prompts": [{"prompt_token_ids": [1] * 16}]}, "prompt 1 has 16 tokens"),
        ({"save": "nowhere"}, "nowhere cannot be written"),
    ],
    ids=str,
)
def test_what_cannot_work_forgets_nothing(change, message):
    model = Model()
    arguments = {"prompts": ["a"], **change}
    with pytest.raises((ValueError, OSError), match=message):
        calibrate(model, **arguments)
    assert "quads_begin_calibration" not in model.calls and "run" not in model.calls


class Handler(BaseHTTPRequestHandler):
    """Answers with what the test put into ``server.answers`` by path; else 404."""

    def do_GET(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append((self.path, body))
        code, text = self.server.answers.get(self.path, (404, '{"detail":\n "Not Found"}'))
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    do_POST = do_GET

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    """A server on this machine."""
    found = HTTPServer(("127.0.0.1", 0), Handler)
    found.asked = []
    found.answers = {"/v1/models": (200, '{"data": [{"id": "m"}]}')}
    thread = threading.Thread(target=found.serve_forever)
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


@pytest.fixture
def run(monkeypatch, capsys, prompts):
    """The command line; returns its status and what it writes to both streams."""

    def call(url, *arguments):
        path = prompts("one\n", "a.txt")
        command = ["calibrate", "--url", url, "--prompts", str(path), *arguments]
        monkeypatch.setattr(sys, "argv", command)
        status = main()
        return SimpleNamespace(status=status, **capsys.readouterr()._asdict())

    return call


def assert_one_line(found, *parts):
    assert found.status == 1 and not found.out
    assert found.err.startswith("calibrate: error: ") and found.err.count("\n") == 1, found.err
    for part in parts:
        assert part in found.err


def test_the_command_line(run, server):
    url = f"http://127.0.0.1:{server.server_port}"
    found = run(url)
    assert_one_line(found, "/collective_rpc", "404", "VLLM_SERVER_DEV_MODE=1", '"Not Found"')
    for arguments in (["--passes", "-1"], ["--passes", "0"], ["--max-tokens", "0"]):
        before = len(server.asked)
        assert_one_line(run(url, *arguments), f"{arguments[0]} {arguments[1]} is not allowed")
        assert len(server.asked) == before
    server.answers["/collective_rpc"] = (200, '{"results": [{}]}')
    server.answers["/reset_prefix_cache"] = (200, "")
    found = run(url, "--model", "another")
    assert_one_line(found, "/v1/completions", "404")
    assert "DEV_MODE" not in found.err
    server.answers["/v1/models"] = (200, '{"data": []}')
    assert_one_line(run(url), "names no model")
    server.answers["/v1/models"] = (200, "no JSON")
    assert_one_line(run(url), "/v1/models: JSONDecodeError")
    server.answers["/collective_rpc"] = (500, "line\nline")
    assert_one_line(run(url, "--model", "m"), "500", "line line")
    assert_one_line(run("http://127.0.0.1:1"), "127.0.0.1:1", "refused")
    reply = {"results": [{"applied": True, "metrics": [], "calibration_passes": 1}]}
    server.answers |= {
        "/collective_rpc": (200, json.dumps(reply)),
        "/reset_prefix_cache": (200, ""),
        "/v1/completions": (200, "{}"),
    }
    server.asked.clear()
    found = run(url, "--model", "m", "--save", "s")
    assert found.status == 0 and json.loads(found.out)["applied"]
    methods = [json.loads(body)["method"] for path, body in server.asked if "rpc" in path]
    assert methods == [
        f"quads_{what}"
        for what in (
            "selection_state", "probe_selection", "begin_calibration", "refresh", "save_selection",
            "end_calibration",
        )
    ]  # fmt: skip


def test_the_command_line_asks_for_lengths(run, server, prompts):
    """Of texts whose bytes may be too many tokens, where the server tells the context."""
    url = f"http://127.0.0.1:{server.server_port}"
    server.answers["/collective_rpc"] = (500, "no")
    # SGLang's max_model_len there is the tokenizer's, and may be anything.
    server.answers["/tokenize"] = (200, '{"count": 4, "max_model_len": -1}')
    for context, asked, refused in ((4, 1, True), (5, 1, False), (20, 0, False), (None, 0, False)):
        server.asked.clear()
        models = {"data": [{"id": "m", "max_model_len": context}]}
        server.answers["/v1/models"] = (200, json.dumps(models))
        found = run(url)
        paths = [path for path, _ in server.asked]
        assert paths.count("/tokenize") == asked and ("/collective_rpc" in paths) != refused
        if refused:
            assert_one_line(found, "prompt 1 has 4 tokens: with 1 generated", "length of 4")
        else:
            assert_one_line(found, "/collective_rpc")


def test_the_command_line_brings_back_what_was_forgotten(run, server):
    url = f"http://127.0.0.1:{server.server_port}"
    server.answers |= {
        "/collective_rpc": (200, '{"results": [{"calibration_passes": 1}]}'),
        "/reset_prefix_cache": (200, ""),
        "/v1/completions": (400, "too long"),
    }
    assert_one_line(run(url), "too long")
    assert json.loads(server.asked[-1][1])["method"] == "quads_undo_calibration"
