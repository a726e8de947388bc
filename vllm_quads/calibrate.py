"""Set the statistics from prompts before the first step, in process or over HTTP.

    from vllm_quads.calibrate import calibrate
    calibrate(llm, prompts, save="selection.safetensors")

    python -m vllm_quads.calibrate --url http://localhost:8000 --prompts prompts.jsonl --save FILE

The server must run with ``VLLM_SERVER_DEV_MODE=1``, which gives it ``/collective_rpc``. What was
counted before is forgotten; then each pass runs the prompts with an empty prefix cache and
refreshes.
"""

import argparse
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["calibrate", "read_prompts"]

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
    """
    from vllm import SamplingParams

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
        ValueError: a line without a prompt, or none at all.
    """
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in lines]
        bad = [i for i, row in enumerate(rows, 1) if not isinstance(row.get("prompt"), str)]
        if bad:
            raise ValueError(f'{path}: line {bad[0]} has no "prompt"')
        lines = [row["prompt"] for row in rows]
    if not lines:
        raise ValueError(f"{path} holds no prompt")
    return lines


def _calibrate(
    rpc: Rpc, run: Callable[[], None], passes: int | None, save: str | None
) -> dict[str, Any]:
    """Returns applied, sites, tokens (rows counted at most) and lists_ready (share)."""
    state = rpc("quads_selection_state")[0]
    rpc("quads_forget")
    result: dict[str, Any] = {}
    for _ in range(passes or (state or {}).get("calibration_passes", 1)):
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
        self.model = model or self._get("/v1/models")["data"][0]["id"]

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """``collective_rpc``."""
        return self._post("/collective_rpc", {"method": method, "args": list(args)})["results"]

    def complete(self, prompts: list[str], max_tokens: int, batch: int = 256) -> None:
        """Run prompts with an empty prefix cache; the answers are thrown away."""
        self._post("/reset_prefix_cache", {})
        for start in range(0, len(prompts), batch):
            body = {"model": self.model, "prompt": prompts[start : start + batch]}
            self._post("/v1/completions", {**body, "max_tokens": max_tokens})

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=60) as response:
            return json.loads(response.read())

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=3600) as response:
            text = response.read()
        return json.loads(text) if text else None


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
        prompts = read_prompts(args.prompts)
        server = _Server(args.url, args.model)
        found = _calibrate(
            server.rpc, lambda: server.complete(prompts, args.max_tokens), args.passes, args.save
        )
    except (OSError, ValueError) as error:
        details = error.read().decode() if isinstance(error, urllib.error.HTTPError) else ""
        print(f"calibrate: error: {error} {details}".rstrip(), file=sys.stderr)
        return 1
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
