"""Both command lines of calibration against a server that wants an API key."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest

import sglang_quads.calibrate
import vllm_quads.calibrate
from quads_common.compensation.calibrate import KEY_VARIABLE, Server

MAINS = {"vllm": vllm_quads.calibrate.main, "sglang": sglang_quads.calibrate.main}
KEY = "sk-secret"
STATE = {"calibration_passes": 1, "applied": True, "metrics": []}


class Handler(BaseHTTPRequestHandler):
    """Answers as both engines would; 401 with what it was sent for another key than ``KEY``."""

    def do_GET(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        sent = self.headers.get("Authorization")
        self.server.sent.append((self.path, sent))
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/elsewhere")
            self.end_headers()
            return
        code, answer = 200, {"data": [{"id": "m"}], "results": [STATE], "success": True}
        if self.path == "/weights_checker":
            answer["ranks"] = [{"checksums": {body["action"]: json.dumps([STATE])}}]
        if sent != f"Bearer {KEY}":
            code, answer = 401, {"error": f"no {sent}"}
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    do_POST = do_GET

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def listening():
    """A server on this machine."""
    found = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


@pytest.fixture
def server(listening):
    """The same, with nothing sent so far."""
    listening.sent = []
    return listening


@pytest.fixture(params=MAINS)
def run(request, server, monkeypatch, capsys, tmp_path):
    """A command line; variable: what the environment holds."""
    (tmp_path / "prompts.txt").write_text("one\n")

    def call(*arguments, variable=None):
        monkeypatch.delenv(KEY_VARIABLE, raising=False)
        if variable is not None:
            monkeypatch.setenv(KEY_VARIABLE, variable)
        url = f"http://127.0.0.1:{server.server_port}"
        command = ["calibrate", "--url", url, "--prompts", str(tmp_path / "prompts.txt")]
        monkeypatch.setattr(sys, "argv", [*command, *arguments])
        status = MAINS[request.param]()
        return SimpleNamespace(status=status, **capsys.readouterr()._asdict())

    return call


@pytest.mark.parametrize(
    "arguments, variable",
    [(["--api-key", KEY], None), ([], KEY), (["--api-key", KEY], "another")],
    ids=["flag", "variable", "both"],
)
def test_every_request_carries_the_key(run, server, arguments, variable):
    found = run(*arguments, variable=variable)
    assert found.status == 0 and json.loads(found.out)["applied"], found.err
    assert {sent for _, sent in server.sent} == {f"Bearer {KEY}"} and len(server.sent) > 4
    assert KEY not in found.out + found.err


def test_a_server_that_wants_a_key_is_told_so(run, server):
    found = run()
    assert found.status == 1 and "401" in found.err
    assert "(the server wants an --api-key)" in found.err
    found = run(variable="")
    assert "(the server wants an --api-key)" in found.err
    assert {sent for _, sent in server.sent} == {None}


def test_a_wrong_key_is_not_shown_though_the_server_repeats_it(run):
    found = run("--api-key", "sk-wrong")
    assert found.status == 1 and "(the server wants another --api-key)" in found.err
    assert "no Bearer ***" in found.err and "sk-wrong" not in found.out + found.err


@pytest.mark.parametrize("key", ["", "two words", "sk-line\n", "sk-ü", "sk-\x00"], ids=repr)
def test_keys_that_no_header_takes_are_refused_unseen(run, server, key):
    found = run("--api-key", key)
    assert found.status == 1 and not server.sent
    assert found.err == (
        "calibrate: error: the API key is not allowed: printable ASCII, no blanks, not empty\n"
    )


def test_a_redirect_is_not_given_the_key(server):
    with pytest.raises(ValueError, match="401"):
        Server(f"http://127.0.0.1:{server.server_port}", KEY).get("/moved")
    assert server.sent == [("/moved", f"Bearer {KEY}"), ("/elsewhere", None)]
