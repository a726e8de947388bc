"""How compensation meets SGLang: what layers share, which rows are tokens, the radix cache.

The host half (``Runtime.begin``) runs around ``ModelRunner.forward``, so before a replay of a CUDA
graph and never while one is captured or SGLang warms up: those call the model itself. There the
batch has its true number of tokens; whatever pads it does so later, behind them.

A refresh happens on the stream that schedules, the model may run on another one (SGLang's overlap
scheduler): whatever reads or replaces statistics or lists waits for the device first, and SGLang
lets each forward wait for the stream that schedules.
"""

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from torch import nn

from quads_common.compensation import serving
from quads_common.compensation.layers import LayerInput, Runtime
from quads_common.compensation.ranks import check_alike
from quads_common.options import QuadsOptions
from sglang_quads.metrics import publish

__all__ = [
    "WARM_UP",
    "FlushState",
    "new_runtime",
    "next_batch",
    "note_changes",
    "real_tokens",
    "rows_unknown",
    "sample_map",
]

logger = logging.getLogger(__name__)

# How the ids of requests begin that are no user's: SGLang's health checks, and, named by us, what
# its HTTP server sends itself before it is up.
WARM_UP = "quads-warm-up"
NOT_COUNTED = ("HEALTH_CHECK", WARM_UP)
MOST_HELD = 16  # rounds, should something else than requests keep a scheduler from being idle
MOST_REQUESTS = 4096  # SGLang's own limit, unless it is given one


def new_runtime(options: QuadsOptions, args: Any, context: int) -> Runtime:
    """For a model that is compensated; args: ``ServerArgs``, context: its longest sequence."""
    runtime = serving.new_runtime(
        options,
        tp_size=args.tp_size,
        first_rank=get_tp_group().rank_in_group == 0,
        max_tokens=most_tokens(args, context),
        log=logger,
        rows_unknown=rows_unknown(args),
        replicas=args.dp_size > 1,
        on_refresh=publish if args.enable_metrics else None,
    )
    runtime.compensator.count_staged = functools.partial(_count_settled, runtime)
    return runtime


def most_tokens(args: Any, context: int) -> int:
    """Of a forward: a prefill's, and decodes mixed into it. Larger ones are not counted."""
    chunk = args.chunked_prefill_size or 0
    prefill = chunk if chunk > 0 else max(args.max_prefill_tokens or 0, context)
    return prefill + (args.max_running_requests or MOST_REQUESTS)


def rows_unknown(args: Any) -> str | None:
    """Why a layer cannot know which of its rows are tokens of the scheduler's; None if it can."""

    def above_one(*fields: str) -> bool:
        return any((getattr(args, name, None) or 1) > 1 for name in fields)

    def given(*fields: str) -> bool:
        return any(getattr(args, name, None) for name in fields)

    reasons = {
        "data parallel attention (--enable-dp-attention)": given("enable_dp_attention"),
        "context parallelism": above_one("attn_cp_size", "dcp_size", "moe_dp_size")
        or given(
            "enable_prefill_cp",
            "enable_prefill_context_parallel",
            "enable_nsa_prefill_context_parallel",
            "enable_dsa_prefill_context_parallel",
        ),
        "scattered inputs (--enable-attn-tp-input-scattered)": given(
            "enable_attn_tp_input_scattered"
        ),
        "prefill and decode at the same time (--enable-pdmux)": given("enable_pdmux"),
        "diffusion language models (--dllm-algorithm)": given("dllm_algorithm"),
    }
    return next((reason for reason, present in reasons.items() if present), None)


def real_tokens(batch: Any, most: int) -> int:
    """Tokens of a ``ForwardBatch``, before it is padded, that statistics may count.

    None of idle ones, of health checks and warm-up (whatever else is in the batch), and of more
    than ``most``.
    """
    if batch.forward_mode.is_idle() or batch.input_ids is None:
        return 0
    if any(str(rid).startswith(NOT_COUNTED) for rid in batch.rids or ()):
        return 0
    tokens = batch.input_ids.shape[0]
    return tokens if tokens <= most else 0


def sample_map(
    given: LayerInput, layer: nn.Module, x: torch.Tensor, runtime: Runtime | None
) -> torch.Tensor | None:
    """``LayerInput.sample_map`` of an input; None where its rows are no list of tokens."""
    if runtime is None or x.ndim != 2 or x.shape[0] > runtime.max_tokens:
        return None
    return given.sample_map(layer, x.shape[0])


def _count_settled(runtime: Runtime) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    runtime.count_staged()


@dataclass
class FlushState:
    """The radix cache of one model's scheduler.

    seen: versions of all ranks' lists, as last compared. due: what made it stale, "" if nothing.
    told: that the flush waits. held: rounds in which new requests waited for it.
    """

    seen: list[int] = field(default_factory=list)
    due: str = ""
    told: bool = False
    held: int = 0

    def ask(self, why: str) -> None:
        """A flush has to come; why: what happened."""
        self.due, self.told, self.held = why, False, 0


def note_changes(runtime: Runtime, state: FlushState) -> None:
    """Where lists may have changed, on all tensor-parallel ranks: whether a flush is due.

    Each rank has a radix cache of its own, which must stay like the others', while with expert
    parallelism lists may change on one rank only.

    Raises:
        SelectionsDifferError: the ranks' sums of the same layer would not belong together.
    """
    group = get_tp_group()
    states: Sequence[Any] = [runtime.compensator.state()]
    if group.world_size > 1:
        states = [None] * group.world_size
        mine = runtime.compensator.state()
        torch.distributed.all_gather_object(states, mine, group=group.cpu_group)
    check_alike(states)
    versions = [found["version"] for found in states]
    if versions != (state.seen or [found["start_version"] for found in states]):
        state.ask("the selection changed")
    state.seen = versions


def next_batch(original: Any, scheduler: Any, state: FlushState, *args: Any, **kwargs: Any) -> Any:
    """``get_next_batch_to_run``, which looks prefixes up, with a flush before it if that is due.

    SGLang can flush when no request runs. One that was answered may not be drained for a round or
    two of its loop; new ones wait that long. While requests run, new ones are taken in as always; a
    WARNING says what they find.
    """
    if not state.due:
        return original(scheduler, *args, **kwargs)
    waiting, scheduler.waiting_queue = scheduler.waiting_queue, []
    try:
        if not nothing_runs(scheduler):
            _tell(scheduler, state)
        elif scheduler.is_fully_idle():
            scheduler.flush_cache()  # the hook on it notes the success
        elif state.held < MOST_HELD:
            state.held += 1
            return original(scheduler, *args, **kwargs)
    finally:
        scheduler.waiting_queue = waiting + scheduler.waiting_queue
    return original(scheduler, *args, **kwargs)


def nothing_runs(scheduler: Any) -> bool:
    """Whether all requests that the scheduler took in have ended, be they drained or not."""
    names = ("running_batch", "last_batch", "cur_batch")
    batches = [getattr(scheduler, name, None) for name in names]
    requests = [request for batch in batches if batch is not None for request in batch.reqs or ()]
    return scheduler.chunked_req is None and all(request.finished() for request in requests)


def _tell(scheduler: Any, state: FlushState) -> None:
    if not state.told and not scheduler.server_args.disable_radix_cache:
        logger.warning(
            "quads_nvfp4: %s while requests were running: they go on with keys and values that "
            "were computed before, and until none runs new requests find those in the radix cache "
            "too; then it is flushed",
            state.due,
        )
    state.told = True
