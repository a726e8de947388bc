"""Metrics of compensation on vLLM's Prometheus endpoint.

A refresh happens in a worker, the endpoint is in the API server. vLLM has no channel between them
that a plugin could use, so the first rank writes its metrics to a file of its own in the temporary
folder and a collector in the server reads it when it is asked. With several API servers
(``--api-server-count``) vLLM replaces its registry; then use ``quads_metrics``.
"""

import atexit
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quads_common.compensation import SiteMetrics
from quads_common.compensation.metrics import HELP

__all__ = ["MetricsFile", "publish"]

PREFIX = "vllm:quads_"


class MetricsFile:
    """The metrics of one engine's first rank. engine_id: the same in all of its processes."""

    def __init__(self, engine_id: str) -> None:
        self.path = Path(tempfile.gettempdir()) / f"quads-metrics-{engine_id}.json"

    def write(self, metrics: Sequence[SiteMetrics]) -> None:
        """Replace the content; readers see the old or the new."""
        temporary = self.path.with_suffix(f".{os.getpid()}")
        try:
            temporary.write_text(json.dumps([site.to_json() for site in metrics]))
            os.replace(temporary, self.path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def read(self) -> list[dict[str, Any]]:
        """The content; nothing before the first refresh."""
        try:
            return json.loads(self.path.read_text())
        except FileNotFoundError:
            return []

    def remove(self) -> None:
        """The engine ends."""
        self.path.unlink(missing_ok=True)


class _Collector(Collector):
    """Gauges ``vllm:quads_...`` with label ``site``."""

    def __init__(self, file: MetricsFile) -> None:
        self.file = file

    def collect(self) -> Iterator[Metric]:
        """What the file says now."""
        rows = self.file.read()
        for key, text in HELP.items():
            family = GaugeMetricFamily(PREFIX + key, text, labels=["site"])
            for row in (r for r in rows if r[key] is not None):
                family.add_metric([row["name"]], row[key])
            if rows:
                yield family


_published: list[_Collector] = []


def publish(engine_id: str) -> None:
    """Show an engine's metrics on this process' endpoint; of several engines, the last one's."""
    for collector in _published:
        REGISTRY.unregister(collector)
    _published[:] = [_Collector(MetricsFile(engine_id))]
    REGISTRY.register(_published[0])
    atexit.register(_published[0].file.remove)
