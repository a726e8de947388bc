"""Set the statistics from prompts before the first step, in process or over HTTP.

    from vllm_quads.calibrate import calibrate
    calibrate(llm, prompts, save="selection.safetensors")

    python -m vllm_quads.calibrate --url http://localhost:8000 --prompts prompts.jsonl --save FILE

The server must run with ``VLLM_SERVER_DEV_MODE=1``, which gives it ``/collective_rpc``. What was
counted before is forgotten, once the arguments have been checked and FILE can be written; then each
pass runs the prompts with an empty prefix cache and refreshes.
"""

import argparse
import http.client
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["calibrate", "read_prompts"]

_RESET = "/reset_prefix_cache"
Rpc = Callable[..., list[Any]]  # method, *arguments -> results of all ranks


def calibrate(
    llm: Any,
    prompts: Sequence[Any],
    *,
    max_tokens: int = 1,
    passes: int | None = None,
    save: str | None = None,
) -> dict[str, Any]:
    """Calibrate an ``LLM`` on prompts, as it takes them; see ``summary`` for what it returns.

    max_tokens: tokens generated after each prompt; they count too. passes: None is what the method
    needs (2 for splice with RAC). save: write the selection file there.

    Raises:
        ValueError: no prompt, or passes or max_tokens below 1.
        OSError: save cannot be written. Neither has forgotten anything.
    """
    from vllm import SamplingParams

    if len(prompts) == 0:
        raise ValueError("prompts is empty: there is nothing to calibrate with")
    _check_count("max_tokens", max_tokens)
    params = SamplingParams(temperature=1.0, max_tokens=max_tokens)

    def run() -> None:
        llm.reset_prefix_cache()
        llm.generate(prompts, params, use_tqdm=False)

    return _calibrate(
        lambda method, *args: llm.collective_rpc(method, args=args), run, passes, save
    )


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


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} {value!r} is not allowed: an integer from 1 on")


def _calibrate(
    rpc: Rpc, run: Callable[[], None], passes: int | None, save: str | None
) -> dict[str, Any]:
    """Returns applied, sites, tokens (rows counted at most) and lists_ready (share)."""
    if passes is not None:
        _check_count("passes", passes)
    state = rpc("quads_selection_state")[0]
    if save is not None:
        rpc("quads_probe_selection", save)
    rpc("quads_forget")
    result: dict[str, Any] = {}
    default = (state or {}).get("calibration_passes", 1)
    for _ in range(default if passes is None else passes):
        run()
        result = rpc("quads_refresh")[0]
    if save is not None:
        rpc("quads_save_selection", save)
    metrics = result["metrics"]
    ready = [m["groups_ready"] for m in metrics]
    return {
        "applied": result["applied"],
        "sites": len(metrics),
        "tokens": max((m["tokens"] for m in metrics), default=0),
        "lists_ready": sum(ready) / len(ready) if ready else 0.0,
    }


class _Server:
    """A vLLM server's HTTP endpoints."""

    def __init__(self, url: str, model: str | None) -> None:
        self.url = url.rstrip("/")
        self.model = model or self._first_model()

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """``collective_rpc``."""
        return self._post("/collective_rpc", {"method": method, "args": list(args)})["results"]

    def complete(self, prompts: list[str], max_tokens: int, batch: int = 256) -> None:
        """Run prompts with an empty prefix cache; the answers are thrown away."""
        self._post(_RESET, {})
        for start in range(0, len(prompts), batch):
            body = {"model": self.model, "prompt": prompts[start : start + batch]}
            self._post("/v1/completions", {**body, "max_tokens": max_tokens})

    def _first_model(self) -> str:
        path = "/v1/models"
        found = self._json(urllib.request.Request(self.url + path), timeout=60)
        try:
            return found["data"][0]["id"]
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"{self.url}{path} names no model: {found!r:.200}") from None

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        return self._json(request, timeout=3600)

    @staticmethod
    def _json(request: urllib.request.Request, timeout: float) -> Any:
        """The answer. Raises ``ValueError`` with one line for whatever is none."""
        url = request.full_url
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                text = response.read()
            return json.loads(text) if text else None
        except urllib.error.HTTPError as error:
            said = " ".join(error.read().decode(errors="replace").split())[:500]
            missing = error.code == 404 and url.endswith(("/collective_rpc", _RESET))
            hint = " (a server has this with VLLM_SERVER_DEV_MODE=1 only)" if missing else ""
            raise ValueError(f"{url}: {error}{hint} {said}".rstrip()) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ValueError(f"{url}: {error!r}") from None


def main() -> int:
    """Calibrate a server; returns 1 with one line if that fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://localhost:8000", help="of the server")
    parser.add_argument("--prompts", type=Path, required=True, help="text or .jsonl, one a line")
    parser.add_argument("--model", help="default: the first that the server names")
    parser.add_argument("--max-tokens", type=int, default=1, help="generated after each prompt")
    parser.add_argument("--passes", type=int, help="default: what the method needs")
    parser.add_argument("--save", help="selection file, on the server's machine")
    args = parser.parse_args()
    try:
        _check_count("--max-tokens", args.max_tokens)
        if args.passes is not None:
            _check_count("--passes", args.passes)
        prompts = read_prompts(args.prompts)
        server = _Server(args.url, args.model)
        found = _calibrate(
            server.rpc, lambda: server.complete(prompts, args.max_tokens), args.passes, args.save
        )
    except (OSError, ValueError) as error:
        print(f"calibrate: error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
