"""Switch the rollout method on where a trainer passes no engine options through.

The vLLM plugin reads ``VLLM_QUADS_CONFIG`` in every engine that is started with it.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from quads_common.options import QuadsOptions, read_environment_options

__all__ = ["VARIABLE", "environment_options", "rollout_method"]

VARIABLE = "VLLM_QUADS_CONFIG"
_SWITCHES = ("enable", "model")  # what the variable holds besides options


def environment_options() -> dict[str, Any]:
    """The method's options in the variable, without its switches; empty if it is not set."""
    raw = read_environment_options(VARIABLE, os.environ.get(VARIABLE))
    return {key: value for key, value in raw.items() if key not in _SWITCHES}


@contextlib.contextmanager
def rollout_method(options: Mapping[str, Any], model: str) -> Iterator[None]:
    """Engines for ``model`` that are started inside the block quantize with ``options``.

    Raises:
        ValueError: bad options, or the variable is set already (then it alone decides).
    """
    if os.environ.get(VARIABLE):
        raise ValueError(f"{VARIABLE} is set already: give the options there or here, not in both")
    QuadsOptions.from_dict(options, "quads")
    # A path may hold characters that a pattern gives a meaning.
    pattern = "".join(f"[{c}]" if c in "*?[" else c for c in model)
    os.environ[VARIABLE] = json.dumps({"enable": True, "model": pattern, **options})
    try:
        yield
    finally:
        del os.environ[VARIABLE]
