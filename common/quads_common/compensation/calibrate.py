"""Calibration of whatever engine: prompts of a file, passes, and an engine's HTTP endpoints.

An engine brings how to call its worker methods and how to run prompts with an empty prefix cache.
"""

import argparse
import http.client
import json
import os
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from quads_common.compensation.paths import path_text

__all__ = [
    "KEY_VARIABLE",
    "Rpc",
    "Server",
    "ServerClass",
    "check_count",
    "check_lengths",
    "check_texts",
    "main",
    "prompt_list",
    "read_prompts",
    "run_passes",
]

KEY_VARIABLE = "OPENAI_API_KEY"  # what both engines' own clients read
_SPECIAL = 16  # tokens that a tokenizer adds to a text, more than any does
Rpc = Callable[..., list[Any]]  # method, *arguments -> results of all ranks


def read_prompts(path: Path) -> list[str]:
    """One prompt a line: text, or JSON objects with "prompt" in a .jsonl file.

    Raises:
        ValueError: not UTF-8, a line without a prompt, or none at all.
    """
    try:
        # Lines end as an editor counts them, not at form feeds or U+2028 as splitlines() has it.
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None
    numbered = [(i, line) for i, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ValueError(f"{path} holds no prompt")
    if path.suffix == ".jsonl":
        return [_prompt_of(f"{path}: line {i}", line) for i, line in numbered]
    return [line for _, line in numbered]


def _prompt_of(where: str, line: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise ValueError(f'{where} has no "prompt"')
    return row["prompt"]


def prompt_list(prompts: object) -> list[Any]:
    """Prompts as a list.

    Raises:
        ValueError: a single text, something else that is no list of prompts, or an empty one.
    """
    single = isinstance(prompts, str | bytes | Mapping)
    if single or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts {_shown(prompts)} is not allowed: a list of prompts")
    if not (found := list(prompts)):
        raise ValueError("prompts is empty: there is nothing to calibrate with")
    return found


def check_texts(prompts: Iterable[object]) -> None:
    """Raise ``ValueError`` unless each prompt, counted from 1, is a text that is not empty."""
    for i, prompt in enumerate(prompts, 1):
        if not isinstance(prompt, str) or not prompt:
            raise ValueError(f"prompt {i} {_shown(prompt)} is not allowed: a text, not empty")


def check_lengths(tokens: Iterable[int], max_tokens: int, context: int) -> None:
    """Raise ``ValueError`` unless each prompt and what is generated fits in the context."""
    for i, count in enumerate(tokens, 1):
        if count + max_tokens > context:
            raise ValueError(
                f"prompt {i} has {count} tokens: with {max_tokens} generated it is longer than the "
                f"model's context length of {context}"
            )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def check_count(name: str, value: object) -> None:
    """Raise ``ValueError`` unless value is an integer from 1 on."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} {value!r} is not allowed: an integer from 1 on")


def run_passes(
    rpc: Rpc, run: Callable[[], None], passes: int | None, save: str | os.PathLike[str] | None
) -> dict[str, Any]:
    """Forget, then ``run`` and refresh as often as needed, then save.

    If any of it fails, or is interrupted, the engine takes back what it had counted and chosen.

    Returns applied, sites, tokens (rows counted at most) and lists_ready (share).

    Raises:
        ValueError: wrong passes, or an engine that compensates nothing; it is asked nothing else.
    """
    if passes is not None:
        check_count("passes", passes)
    file = None if save is None else path_text(save)
    state = rpc("quads_selection_state")[0]
    if state is None:
        raise ValueError(
            "this engine compensates nothing, so there is nothing to calibrate: start it with "
            "quads_nvfp4 and a method other than 'nvfp4'"
        )
    if file is not None:
        rpc("quads_probe_selection", file)
    result: dict[str, Any] = {}
    default = state.get("calibration_passes", 1)
    try:
        rpc("quads_begin_calibration")
        for _ in range(default if passes is None else passes):
            run()
            result = rpc("quads_refresh")[0]
        if file is not None:
            rpc("quads_save_selection", file)
    except BaseException as error:
        _undo(rpc, error)
        raise
    rpc("quads_end_calibration")
    metrics = result["metrics"]
    ready = [m["groups_ready"] for m in metrics]
    return {
        "applied": result["applied"],
        "sites": len(metrics),
        "tokens": max((m["tokens"] for m in metrics), default=0),
        "lists_ready": sum(ready) / len(ready) if ready else 0.0,
    }


def _undo(rpc: Rpc, failure: BaseException) -> None:
    try:
        rpc("quads_undo_calibration")
    except Exception as error:
        raise RuntimeError(
            f"{failure}; what was counted before could not be brought back: {error}"
        ) from failure


class Server:
    """HTTP requests to an engine; each error is one line of a ``ValueError``.

    missing_hint: (paths, what to say where the server has none of them). key: sent as a bearer
    token, but not to where a server redirects.

    Raises:
        ValueError: the key cannot be sent; the message does not show it.
    """

    missing_hint: tuple[tuple[str, ...], str] = ((), "")

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        # http.client's errors of such a key show it.
        if key is not None and not re.fullmatch("[!-~]+", key):
            raise ValueError("the API key is not allowed: printable ASCII, no blanks, not empty")
        self._key = key

    def get(self, path: str) -> Any:
        """The JSON of a GET."""
        return self._json(urllib.request.Request(self.url + path), timeout=60)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON that a POST is answered with; None for an empty answer."""
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        return self._json(request, timeout=3600)

    def _json(self, request: urllib.request.Request, timeout: float) -> Any:
        url = request.full_url
        if self._key is not None:
            request.add_unredirected_header("Authorization", f"Bearer {self._key}")
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                text = response.read()
            return self.decoded(text)
        except urllib.error.HTTPError as error:
            said = " ".join(error.read().decode(errors="replace").split())[:500]
            paths, hint = self.missing_hint
            if error.code == 401:
                hint = f" (the server wants {'an' if self._key is None else 'another'} --api-key)"
            elif error.code != 404 or not url.endswith(paths):
                hint = ""
            raise ValueError(f"{url}: {error}{hint} {said}".rstrip()) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ValueError(f"{url}: {error!r}") from None

    def check_lengths(self, model: str, prompts: list[str], max_tokens: int) -> None:
        """``check_lengths`` by ``/v1/models`` and ``/tokenize``, where the server has both: else
        its answers to the prompts tell."""
        try:
            context = int(self.get("/v1/models")["data"][0]["max_model_len"])
            counts = [self._most_tokens(model, p, context - max_tokens) for p in prompts]
        except (KeyError, IndexError, TypeError, ValueError):
            return
        check_lengths(counts, max_tokens, context)

    def _most_tokens(self, model: str, prompt: str, enough: int) -> int:
        """Of a prompt; not asked for where there can be no more than ``enough``."""
        # A token is a byte at least, but for the few that stand before and after a text.
        if (most := len(prompt.encode()) + _SPECIAL) <= enough:
            return most
        return int(self.post("/tokenize", {"model": model, "prompt": prompt})["count"])

    def decoded(self, text: bytes) -> Any:
        """The JSON of an answer, which may be empty."""
        return json.loads(text) if text else None


class EngineServer(Protocol):
    """What calibration needs of a server."""

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """A worker method on all ranks."""

    def check(self, prompts: list[str], max_tokens: int) -> None:
        """Raise ``ValueError`` for what the engine would not take, as far as it tells."""

    def complete(self, prompts: list[str], max_tokens: int) -> None:
        """Run prompts with an empty prefix cache; the answers are thrown away."""


ServerClass = Callable[[str, str | None, str | None], EngineServer]  # url, model, API key


def main(server_class: ServerClass, description: str, url: str, *, names_model: bool) -> int:
    """Calibrate a server; returns 1 with one line if that fails.

    url: the default. names_model: whether requests name a model.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--url", default=url, help="of the server")
    parser.add_argument("--prompts", type=Path, required=True, help="text or .jsonl, one a line")
    if names_model:
        parser.add_argument("--model", help="default: the first that the server names")
    parser.add_argument("--max-tokens", type=int, default=1, help="generated after each prompt")
    parser.add_argument("--passes", type=int, help="default: what the method needs")
    parser.add_argument("--save", help="selection file, on the server's machine")
    parser.add_argument("--api-key", help=f"of the server; default: ${KEY_VARIABLE}")
    args = parser.parse_args()
    key = args.api_key if args.api_key is not None else os.environ.get(KEY_VARIABLE) or None
    try:
        check_count("--max-tokens", args.max_tokens)
        if args.passes is not None:
            check_count("--passes", args.passes)
        prompts = read_prompts(args.prompts)
        check_texts(prompts)
        server = server_class(args.url, getattr(args, "model", None), key)
        server.check(prompts, args.max_tokens)
        found = run_passes(
            server.rpc, lambda: server.complete(prompts, args.max_tokens), args.passes, args.save
        )
    except (OSError, RuntimeError, ValueError) as error:
        said = str(error).replace(key, "***") if key else str(error)  # servers may repeat it
        print(f"calibrate: error: {said}", file=sys.stderr)
        return 1
    print(json.dumps(found))
    return 0
