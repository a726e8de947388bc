"""Metrics of compensation on SGLang's Prometheus endpoint (``--enable-metrics``).

SGLang collects those of all its processes in a folder that it names in the environment, so gauges
of a scheduler process reach the HTTP server's endpoint by themselves.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

from quads_common.compensation.metrics import HELP, SiteMetrics

__all__ = ["publish"]

PREFIX = "sglang:quads_"


def publish(metrics: Sequence[SiteMetrics]) -> None:
    """Show what a refresh found; the label ``site`` names the input."""
    for site in metrics:
        values = site.to_json()
        for key in HELP:
            if values[key] is not None:
                _gauge(key).labels(site=values["name"]).set(values[key])


@cache
def _gauge(key: str) -> Any:
    # Not before: SGLang sets the folder that prometheus_client looks for when it is imported.
    from prometheus_client import Gauge

    return Gauge(PREFIX + key, HELP[key], labelnames=["site"], multiprocess_mode="mostrecent")
