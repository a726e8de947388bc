"""Weight sync seen from outside: fingerprints and boundaries."""

from typing import Any

from quads_common.compensation.layers import Runtime
from quads_common.layer_weights import all_units, partial_fingerprints
from vllm_quads.loading import report_and_drop

__all__ = ["quads_end_sync", "quads_fingerprints", "runtime_of"]


def quads_fingerprints(worker: Any) -> dict[str, list[dict[str, Any]]]:
    """Worker method: this rank's partial fingerprints by checkpoint tensor name.

    ``quads_common.fingerprint.combine_ranks`` makes digests of what all workers return; names and
    digests equal those of ``quads_common.qat.fingerprints`` on the trainer's model.
    """
    return partial_fingerprints(worker.model_runner.get_model())


def quads_end_sync(worker: Any) -> list[str]:
    """Worker method: end whatever sync is going on; returns what was incomplete and dropped.

    Raises:
        ValueError: weights with NaN or Inf, by name; after the lists were dealt with.
    """
    try:
        return report_and_drop(all_units(worker.model_runner.get_model()))
    finally:
        runtime = runtime_of(worker)
        if runtime is not None:
            runtime.compensator.end_sync()


def runtime_of(worker: Any) -> Runtime | None:
    """What the compensated layers of a worker share; None without any, or another method's."""
    return getattr(worker.vllm_config.quant_config, "runtime", None)
