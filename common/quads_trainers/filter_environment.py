"""Limits of the sequence filter where a trainer has no setting for them: ``VLLM_QUADS_TIM``.

A JSON object of ``FilterOptions`` or the path of a file of ``save_options``. The prefix VLLM_ makes
vLLM's Ray executor carry it along.
"""

import os

from quads_common.mismatch import FilterOptions, load_options
from quads_common.options import read_environment_options

__all__ = ["FILTER_VARIABLE", "filter_options"]

FILTER_VARIABLE = "VLLM_QUADS_TIM"


def filter_options() -> FilterOptions | None:
    """The options in the variable; None where it is not set.

    Raises:
        ValueError: neither JSON nor a file; an unknown key or a bad value.
    """
    value = os.environ.get(FILTER_VARIABLE, "").strip()
    if not value:
        return None
    if not value.startswith("{"):
        return load_options(value)
    return FilterOptions.from_dict(
        read_environment_options(FILTER_VARIABLE, value), FILTER_VARIABLE
    )
