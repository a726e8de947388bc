"""Does an engine hold exactly the weights that the trainer computes with? Compare fingerprints."""

import json
import urllib.request
from typing import Any

from torch import distributed, nn

from quads_common.fingerprint import combine_ranks, differing
from quads_common.qat import fingerprints

__all__ = ["WeightsDifferError", "check_in_sync", "check_server_in_sync", "engine_fingerprints"]

HTTP_TIMEOUT_S = 600


class WeightsDifferError(RuntimeError):
    """After a weight sync the engine holds other weights than the trainer computes with."""


def engine_fingerprints(engine: Any) -> dict[str, str]:
    """Digest by tensor name of what an engine serves.

    engine: a ``vllm.LLM`` (or anything with its ``collective_rpc``), or the base URL of a server
    that was started with VLLM_SERVER_DEV_MODE=1.
    """
    if isinstance(engine, str):
        body = json.dumps({"method": "quads_fingerprints"}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{engine}/collective_rpc", body, headers)
        with urllib.request.urlopen(request, timeout=HTTP_TIMEOUT_S) as response:
            return combine_ranks(json.load(response)["results"])
    return combine_ranks(engine.collective_rpc("quads_fingerprints"))


def check_in_sync(model: nn.Module, engine: Any) -> int:
    """Compare a model under ``prepare_qat`` with an engine; return the number of equal tensors.

    Reads every quantized weight on both sides: some milliseconds for each GB.

    Raises:
        WeightsDifferError: names the tensors that differ or that only one side has.
    """
    return _compare(fingerprints(model), engine_fingerprints(engine))


def check_server_in_sync(model: nn.Module, server: str | None) -> int:
    """``check_in_sync`` where several processes train for one server; all of them must call it.

    server: its base URL in one process, the one of rank 0, and None in the others. Sharded weights
        are gathered by all; then rank 0 asks the server, and its verdict is everybody's.

    Raises:
        WeightsDifferError: as ``check_in_sync``, in every process.
        RuntimeError: in the other processes, where rank 0 could not compare.
    """
    trainer = fingerprints(model)
    verdict: list[Any] = [None]
    failure: Exception | None = None
    if server is not None:
        try:
            verdict[0] = _compare(trainer, engine_fingerprints(server))
        except Exception as error:
            failure = error
            verdict[0] = (isinstance(error, WeightsDifferError), str(error))
    if distributed.is_available() and distributed.is_initialized():
        distributed.broadcast_object_list(verdict, src=0)
    if failure is not None:
        raise failure
    if isinstance(verdict[0], int):
        return verdict[0]
    differ, message = verdict[0]
    if differ:
        raise WeightsDifferError(message)
    raise RuntimeError(f"rank 0 could not compare weights with the server: {message}")


def _compare(trainer: dict[str, str], served: dict[str, str]) -> int:
    wrong = differing(trainer, served)
    if wrong:
        shown = ", ".join(wrong[:4]) + (f" and {len(wrong) - 4} more" if len(wrong) > 4 else "")
        raise WeightsDifferError(
            f"{len(wrong)} of {len(trainer | served)} quantized tensors differ after the weight "
            f"sync: {shown}"
        )
    return len(trainer)
