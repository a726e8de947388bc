"""What starts compensation in an engine; the engine says its sizes and where it logs."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from quads_common.activation import Activation
from quads_common.backend import general_backend, moe_backend
from quads_common.compensation.controller import Compensator, Log
from quads_common.compensation.files import check_selection_file
from quads_common.compensation.layers import Runtime
from quads_common.compensation.metrics import SiteMetrics
from quads_common.compensation.ops import can_compensate
from quads_common.compensation.selection import channel_count
from quads_common.options import PLAIN_METHOD, QuadsOptions

__all__ = [
    "ROWS_ARE_NO_TOKENS",
    "check_start_file",
    "choose_moe_backend",
    "loaded",
    "new_runtime",
    "runnable_options",
]

# Linear layers that MLA multiplies cached latents with, which are not the tokens of the forward.
ROWS_ARE_NO_TOKENS = ("kv_b_proj",)


class Warn(Protocol):
    """A ``logging.Logger``'s ``warning`` or another function like it."""

    def __call__(self, message: str, *args: Any) -> None:
        """Log a line."""


def runnable_options(options: QuadsOptions, backend: str, warn: Warn) -> QuadsOptions:
    """The options, if the backend has what they need.

    An engine that was started without naming a method is served plainly, with a WARNING.

    Raises:
        ValueError: compensation was asked for by name on a backend that has none.
    """
    if not options.compensates or can_compensate(general_backend(backend)):
        return options
    if options.method is not None or options.knobs or options.selection_file is not None:
        raise ValueError(
            f"method {options.preset!r} is not available on backend {backend!r} in this "
            f"version: use method {PLAIN_METHOD!r} without options of compensation, or backend "
            "'emulated'"
        )
    warn(
        "quads_nvfp4: the default method %r is not available on backend %r in this version: "
        "serving method %r",
        options.preset,
        backend,
        PLAIN_METHOD,
    )
    return dataclasses.replace(options, method=PLAIN_METHOD)


def check_start_file(options: QuadsOptions, tp_size: int) -> None:
    """Refuse a selection file that cannot fit before weights are loaded.

    Raises:
        ValueError: naming the option, the file and what does not fit.
    """
    path = options.selection_file
    if path is None:
        return
    try:
        check_selection_file(path, tp_size=tp_size, options=options.compensation)
    except (OSError, ValueError) as error:
        raise ValueError(f"selection_file {path!r} cannot be used: {error}") from None


def new_runtime(
    options: QuadsOptions,
    *,
    tp_size: int,
    first_rank: bool,
    max_tokens: int,
    log: Log,
    rows_unknown: str | None,
    replicas: bool,
    on_refresh: Callable[[list[SiteMetrics]], object] | None,
) -> Runtime:
    """For a model that is compensated. Warns if its statistics have to stay off.

    max_tokens: of a forward. rows_unknown: why a layer cannot know which of its rows are tokens;
    None if it can. replicas: whether the engine has data parallel ones. on_refresh: for the metrics
    of the first rank.
    """
    compensator = Compensator(
        options.compensation,
        tp_size=tp_size,
        log=log,
        selection_file=options.selection_file,
        first_rank=first_rank,
        on_refresh=on_refresh if first_rank else None,
    )
    if rows_unknown is not None:
        log.warning(
            "quads_nvfp4: statistics are off, because with %s it is not known which rows are real "
            "tokens: the selection stays as it is%s",
            rows_unknown,
            "" if options.selection_file else " (every block, no channel), until one is loaded",
        )
    if replicas:
        log.warning(
            "quads_nvfp4: data parallel replicas choose for themselves and may differ: load one "
            "selection file in all of them (quads_load_selection)"
        )
    period = 0 if rows_unknown is not None else options.compensation.sampling_period
    return Runtime(compensator, options.compensation, period, max_tokens)


def loaded(runtime: Runtime, options: QuadsOptions) -> None:
    """An engine's first load is over.

    Raises:
        ValueError: nothing is compensated, or the selection file to start with does not fit.
    """
    if not runtime.compensator.states:
        kinds = list(options.compensation.compensate)
        raise ValueError(
            f"compensate {kinds} with method {options.preset!r} names no input of the layers that "
            "are quantized, so nothing would be compensated"
        )
    runtime.compensator.loaded()
    runtime.prepare()


def choose_moe_backend(
    backend: str,
    options: QuadsOptions,
    compensated: bool,
    experts: int,
    hidden: int,
    inner: int,
    activation: Activation,
    *,
    shards: int,
) -> tuple[str, str | None]:
    """``moe_backend`` of a layer with these options.

    compensated: whether one of its inputs is. shards: ranks that share the channels of w2's input.
    """
    lists = options.compensation if compensated else None
    rac = lists is not None and lists.ratio("w2") > 0
    splice = lists is not None and lists.splice_count("w2") > 0
    columns = (0, 0)
    if lists is not None and lists.splice_weight == "bf16":
        columns = (
            channel_count(lists.splice_count("w13"), 1, hidden),
            channel_count(lists.splice_count("w2"), shards, inner),
        )
    return moe_backend(
        backend, experts, hidden, inner, activation, options.act, rac, splice, columns
    )
