"""Set the statistics from prompts before the first step, in process or over HTTP.

    from sglang_quads.calibrate import calibrate
    calibrate(engine, prompts, save="selection.safetensors")

    python -m sglang_quads.calibrate --url http://localhost:30000 --prompts FILE --save FILE

What was counted before is forgotten, once the arguments have been checked and the file can be
written; then each pass runs the prompts with an empty radix cache and refreshes. If anything fails
then, what was counted and chosen before comes back.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
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
from sglang_quads.client import ask, decode

__all__ = ["calibrate", "main", "read_prompts"]

_FLUSH, _CHECK = "/flush_cache", "/weights_checker"
FLUSH_SECONDS = 60.0


def calibrate(
    engine: Any,
    prompts: Iterable[str],
    *,
    max_tokens: int = 1,
    passes: int | None = None,
    save: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Calibrate a ``sglang.Engine`` on texts; see ``run_passes`` for what it returns.

    max_tokens: tokens generated after each prompt; they count too. passes: None is what the method
    needs (2 for splice with RAC). save: write the selection file there.

    Raises:
        ValueError: no list of texts, one that is empty or too long, passes or max_tokens below 1,
            or an engine that compensates nothing.
        RuntimeError: save cannot be written. None of these has forgotten anything; what else fails
            brings back what was forgotten.
    """
    texts = prompt_list(prompts)
    check_count("max_tokens", max_tokens)
    check_texts(texts)
    manager = engine.tokenizer_manager
    if (tokenizer := getattr(manager, "tokenizer", None)) is not None:
        counts = (len(tokenizer.encode(text)) for text in texts)
        check_lengths(counts, max_tokens, manager.context_len)
    params = {"temperature": 1.0, "max_new_tokens": max_tokens}

    def run() -> None:
        _until_flushed(lambda: bool(getattr(answer := engine.flush_cache(), "success", answer)))
        engine.generate(texts, params)

    return run_passes(lambda name, *args: ask(engine, name, *args), run, passes, save)


def _until_flushed(flush: Callable[[], bool]) -> None:
    """A request that was answered may not be drained yet.

    Raises:
        RuntimeError: other requests run all the time.
    """
    deadline = time.monotonic() + FLUSH_SECONDS
    while not flush():
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"the radix cache could not be flushed in {FLUSH_SECONDS:.0f} s: other requests run"
            )
        time.sleep(0.05)


class _Server(common.Server):
    """An SGLang server's HTTP endpoints."""

    missing_hint = ((_CHECK,), " (this SGLang has no such endpoint)")

    def __init__(self, url: str, model: str | None, key: str | None) -> None:
        super().__init__(url, key)

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """One of ``actions`` on all ranks."""
        action = " ".join([method, *args])
        return decode(action, self.post(_CHECK, {"action": action}))

    def check(self, prompts: list[str], max_tokens: int) -> None:
        """Lengths; see ``check_lengths``."""
        self.check_lengths("default", prompts, max_tokens)

    def complete(self, prompts: list[str], max_tokens: int, batch: int = 256) -> None:
        """Run prompts with an empty radix cache; the answers are thrown away."""
        _until_flushed(lambda: self._flush())
        params = {"temperature": 1.0, "max_new_tokens": max_tokens}
        for start in range(0, len(prompts), batch):
            self.post(
                "/generate", {"text": prompts[start : start + batch], "sampling_params": params}
            )

    def _flush(self) -> bool:
        try:
            self.post(_FLUSH, {})
        except ValueError as error:
            if "HTTP Error 400" in str(error):  # requests run
                return False
            raise
        return True

    def decoded(self, text: bytes) -> Any:
        """JSON, or the text that ``/flush_cache`` answers with."""
        try:
            return json.loads(text) if text else None
        except ValueError:
            if text.startswith(b"Cache flushed"):
                return None
            raise


def main() -> int:
    """Calibrate a server; returns 1 with one line if that fails."""
    description = (__doc__ or "").splitlines()[0]
    return common.main(_Server, description, "http://localhost:30000", names_model=False)


if __name__ == "__main__":
    sys.exit(main())
