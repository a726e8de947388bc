"""Set the statistics from prompts before the first step, in process or over HTTP.

    from vllm_quads.calibrate import calibrate
    calibrate(llm, prompts, save="selection.safetensors")

    python -m vllm_quads.calibrate --url http://localhost:8000 --prompts prompts.jsonl --save FILE

The server must run with ``VLLM_SERVER_DEV_MODE=1``, which gives it ``/collective_rpc``. What was
counted before is forgotten, once the arguments have been checked and FILE can be written; then each
pass runs the prompts with an empty prefix cache and refreshes. If anything fails then, what was
counted and chosen before comes back.
"""

import os
import sys
from collections.abc import Iterable
from typing import Any

from quads_common.compensation import calibrate as common
from quads_common.compensation.calibrate import (
    check_count,
    check_lengths,
    check_texts,
    prompt_list,
    read_prompts,
    run_passes,
)

__all__ = ["calibrate", "main", "read_prompts"]

_RESET = "/reset_prefix_cache"


def calibrate(
    llm: Any,
    prompts: Iterable[Any],
    *,
    max_tokens: int = 1,
    passes: int | None = None,
    save: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Calibrate an ``LLM`` on prompts, as it takes them; see ``run_passes`` for what it returns.

    max_tokens: tokens generated after each prompt; they count too. passes: None is what the method
    needs (2 for splice with RAC). save: write the selection file there.

    Raises:
        ValueError: no list of prompts, one that is empty or too long, passes or max_tokens below 1,
            or an engine that compensates nothing.
        OSError: save cannot be written. None of these has forgotten anything; what else fails
            brings back what was forgotten.
    """
    from vllm import SamplingParams

    given = prompt_list(prompts)
    check_count("max_tokens", max_tokens)
    _check_prompts(llm, given)
    params = SamplingParams(temperature=1.0, max_tokens=max_tokens)

    def run() -> None:
        llm.reset_prefix_cache()
        llm.generate(given, params, use_tqdm=False)

    return run_passes(
        lambda method, *args: llm.collective_rpc(method, args=args), run, passes, save
    )


def _check_prompts(llm: Any, prompts: list[Any]) -> None:
    """Texts and lists of token ids; what else a prompt can be is vLLM's to judge."""
    check_texts(["ids" if isinstance(prompt, dict | list) else prompt for prompt in prompts])
    tokenizer = None if llm.model_config.skip_tokenizer_init else llm.get_tokenizer()

    def tokens(i: int, prompt: Any) -> int:
        if isinstance(prompt, list) and not prompt:
            raise ValueError(f"prompt {i} [] is not allowed: token ids, at least one")
        if isinstance(prompt, dict):
            prompt = prompt.get("prompt_token_ids") or prompt.get("prompt") or []
        if isinstance(prompt, str):
            return len(tokenizer.encode(prompt)) if tokenizer is not None else 0
        return len(prompt)

    # vLLM generates fewer tokens where the context ends, but needs place for one.
    counts = (tokens(i, prompt) for i, prompt in enumerate(prompts, 1))
    check_lengths(counts, 1, llm.model_config.max_model_len)


class _Server(common.Server):
    """A vLLM server's HTTP endpoints."""

    missing_hint = (
        ("/collective_rpc", _RESET),
        " (a server has this with VLLM_SERVER_DEV_MODE=1 only)",
    )

    def __init__(self, url: str, model: str | None, key: str | None) -> None:
        super().__init__(url, key)
        self.model = model or self._first_model()

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """``collective_rpc``."""
        return self.post("/collective_rpc", {"method": method, "args": list(args)})["results"]

    def check(self, prompts: list[str], max_tokens: int) -> None:
        """Lengths; see ``check_lengths``."""
        self.check_lengths(self.model, prompts, max_tokens)

    def complete(self, prompts: list[str], max_tokens: int, batch: int = 256) -> None:
        """Run prompts with an empty prefix cache; the answers are thrown away."""
        self.post(_RESET, {})
        for start in range(0, len(prompts), batch):
            body = {"model": self.model, "prompt": prompts[start : start + batch]}
            self.post("/v1/completions", {**body, "max_tokens": max_tokens})

    def _first_model(self) -> str:
        path = "/v1/models"
        found = self.get(path)
        try:
            return found["data"][0]["id"]
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"{self.url}{path} names no model: {found!r:.200}") from None


def main() -> int:
    """Calibrate a server; returns 1 with one line if that fails."""
    description = (__doc__ or "").splitlines()[0]
    return common.main(_Server, description, "http://localhost:8000", names_model=True)


if __name__ == "__main__":
    sys.exit(main())
