"""Run a server for as long as a ``with`` block lasts, and leave no process behind.

``vllm serve``, or with ``run`` another one with an OpenAI API. It gets a process group of its own.
Whatever ends the block (its end, an exception, Ctrl-C, SIGTERM, SIGHUP), the whole group is
stopped, engine processes included.
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

START_TIMEOUT_S = 300
STOP_TIMEOUT_S = 5  # a ready server needs 2 s; one that is still starting ignores SIGTERM
REQUEST_TIMEOUT_S = 120
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SERVER_ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the default takes a share of all memory
    "VLLM_SERVER_DEV_MODE": "1",  # serves /collective_rpc, through which the report comes
}
MODEL_NAME = "demo"


class ServerError(Exception):
    """The server failed in a way that one sentence tells."""


class Server:
    """A running ``vllm serve``, its log and its HTTP interface."""

    name = "vllm serve"

    def __init__(self, process: subprocess.Popen, port: int, log: Path):
        self.process, self.log = process, log
        self.url = f"http://127.0.0.1:{port}"
        self.start = time.monotonic()
        # A proxy of the user's must not be asked for a loopback address.
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def request(self, path: str, body: dict | None = None) -> bytes:
        """Send a GET, or a POST where there is a body; return what comes back."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        call = urllib.request.Request(self.url + path, data, headers)
        with self.opener.open(call, timeout=REQUEST_TIMEOUT_S) as response:
            return response.read()

    def wait_until_ready(self) -> None:
        """Return when the server answers; raise when it ended or takes too long."""
        while True:
            if self.process.poll() is not None:
                raise ServerError(f"{self.name} ended with status {self.process.returncode}")
            if time.monotonic() - self.start > START_TIMEOUT_S:
                raise ServerError(f"{self.name} was not ready after {START_TIMEOUT_S} s")
            with contextlib.suppress(OSError):  # not listening yet
                self.request("/health")
                return
            time.sleep(0.5)

    def complete(self, prompt: str, max_tokens: int) -> str:
        """Return the greedy completion of a prompt."""
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        return self.ask("/v1/completions", body)["choices"][0]["text"]

    def report(self) -> list[dict]:
        """Return what the plugin says of the loaded model, one dict for each worker."""
        return self.ask("/collective_rpc", {"method": "quads_report"})["results"]

    def ask(self, path: str, body: dict) -> dict:
        """Send a POST to a server that is ready; return its JSON answer."""
        try:
            return json.loads(self.request(path, body))
        except OSError as error:
            raise ServerError(f"{path} {body} failed: {error}") from error

    @contextlib.contextmanager
    def progress(self) -> Iterator[None]:
        """Show elapsed seconds and the last message of the log while the block runs."""
        done = threading.Event()
        thread = threading.Thread(target=self._show_progress, args=(done,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def last_message(self) -> str:
        """Return the last message of the log without its process, level, time and source."""
        for line in reversed(tail(self.log).splitlines()):
            if found := re.search(r"(?:INFO|WARNING|ERROR) \S+ \S+ \[.*?\] (\S.*)", line):
                return found[1]
        return f"{self.name} is starting"

    def _show_progress(self, done: threading.Event) -> None:
        terminal = sys.stdout.isatty()
        erase = "\r\033[K" if terminal else ""
        while not done.wait(1 if terminal else 5):
            line = f"{time.monotonic() - self.start:4.0f} s  {self.last_message()}"
            line = line[: shutil.get_terminal_size().columns - 1]
            print(f"{erase}{line}", end="" if terminal else "\n", flush=True)
        print(erase, end="", flush=True)


def serve(model: Path, options: list[str]) -> contextlib.AbstractContextManager[Server]:
    """Run ``vllm serve MODEL OPTIONS`` on a free loopback port for the block."""
    return run([vllm_command(), "serve", str(model)], options, SERVER_ENV, Server)


@contextlib.contextmanager
def run(
    command: list[str], options: list[str], environment: dict[str, str], kind: type[Server]
) -> Iterator[Server]:
    """Run a server command on a free loopback port for the block.

    The log is kept, and its end shown, only where the server failed.
    """
    port = free_port()
    command = [*command, "--served-model-name", MODEL_NAME]
    command += ["--host", "127.0.0.1", "--port", str(port), *options]
    print("$", *command, flush=True)
    descriptor, name = tempfile.mkstemp(prefix="quads-serve-", suffix=".log")
    log, keep_log, process = Path(name), False, None
    try:
        with deferred_signals():
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=subprocess.STDOUT,
                env=environment | os.environ,
                start_new_session=True,
            )
        yield kind(process, port, log)
    except ServerError:
        keep_log = True
        print(f"\n{tail(log)}\nThe whole log: {log}", file=sys.stderr)
        raise
    finally:
        with deferred_signals():
            if process is not None:
                stop_group(process)
            os.close(descriptor)
            if not keep_log:
                log.unlink()


def vllm_command() -> str:
    """Find ``vllm`` beside this Python first, so that both use one environment."""
    for path in (str(Path(sys.executable).parent), None):
        if found := shutil.which("vllm", path=path):
            return found
    raise ServerError("no vllm command found; `make setup` installs one for CPU")


def free_port() -> int:
    """Return a port of the loopback interface on which nobody listens.

    Below 55536: SGLang uses the one 10000 above too.
    """
    for port in random.sample(range(20000, 55536), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port from 20000 to 55535")


def stop_group(process: subprocess.Popen) -> None:
    """End the process group: ask first, so that vLLM removes its shared memory, then kill."""
    deadline = time.monotonic() + STOP_TIMEOUT_S
    signal_group(process.pid, signal.SIGTERM)
    while signal_group(process.pid, 0):
        process.poll()  # an ended leader that nobody waited for still counts as alive
        if time.monotonic() > deadline:
            signal_group(process.pid, signal.SIGKILL)
            break
        time.sleep(0.1)
    process.wait()


def signal_group(group: int, number: int) -> bool:
    """Send a signal to a process group (0 sends none); say whether the group exists."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


@contextlib.contextmanager
def deferred_signals() -> Iterator[None]:
    """Hold stop signals back for the block: while a process starts or stops nothing may be lost."""
    received = []
    old = {n: signal.signal(n, lambda number, _: received.append(number)) for n in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    if received:
        signal.raise_signal(received[0])


def tail(log: Path) -> str:
    """Return the end of the log, as text."""
    return log.read_bytes()[-4000:].decode(errors="replace")
