"""Switch the rollout method on where a trainer passes no engine options through.

The vLLM plugin reads ``VLLM_QUADS_CONFIG`` in every engine that is started with it.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from quads_common.options import QuadsOptions, read_environment_options

__all__ = ["VARIABLE", "check_enabled", "environment_options", "rollout_method"]

VARIABLE = "VLLM_QUADS_CONFIG"
_SWITCHES = ("enable", "model")  # what the variable holds besides options


def environment_options() -> dict[str, Any]:
    """The method's options in the variable, without its switches; empty if it is not set."""
    raw = read_environment_options(VARIABLE, os.environ.get(VARIABLE))
    return {key: value for key, value in raw.items() if key not in _SWITCHES}


def check_enabled() -> None:
    """Refuse a variable that is set but switches nothing on.

    Raises:
        ValueError: not JSON, or without ``"enable": true``.
    """
    raw = read_environment_options(VARIABLE, os.environ.get(VARIABLE))
    if raw.get("enable") is not True:
        raise ValueError(
            f"{VARIABLE} has enable={raw.get('enable', False)!r}, so the engine would stay BF16: "
            'add "enable": true, or unset it'
        )


@contextlib.contextmanager
def rollout_method(options: Mapping[str, Any]) -> Iterator[None]:
    """Engines that are started inside the block quantize with ``options``.

    Whatever their model: vLLM may replace a hub id by a path before it asks.

    Raises:
        ValueError: bad options, or the variable is set already (then it alone decides).
    """
    before = os.environ.get(VARIABLE)
    if before:
        raise ValueError(f"{VARIABLE} is set already: give the options there or here, not in both")
    QuadsOptions.from_dict(options, "quads")
    os.environ[VARIABLE] = json.dumps({"enable": True, **options})
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
