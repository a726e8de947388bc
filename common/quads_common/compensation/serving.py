"""What starts compensation in an engine; the engine says its sizes and where it logs."""

from collections.abc import Callable

from quads_common.activation import Activation
from quads_common.backend import moe_backend
from quads_common.compensation.controller import Compensator, Log
from quads_common.compensation.files import check_selection_file
from quads_common.compensation.layers import Runtime
from quads_common.compensation.metrics import SiteMetrics
from quads_common.compensation.selection import channel_count
from quads_common.options import QuadsOptions

__all__ = [
    "ROWS_ARE_NO_TOKENS",
    "check_start_file",
    "choose_moe_backend",
    "loaded",
    "new_runtime",
]

# Linear layers that MLA multiplies cached latents with, which are not the tokens of the forward.
ROWS_ARE_NO_TOKENS = ("kv_b_proj",)


def check_start_file(options: QuadsOptions, tp_size: int) -> None:
    """Refuse a selection file that cannot fit before weights are loaded.

    Raises:
        ValueError: naming the option, the file and what does not fit.
    """
    if options.selection_file is None:
        return
    try:
        check_selection_file(options.selection_file, tp_size=tp_size, options=options.compensation)
    except (OSError, ValueError) as error:
        raise ValueError(f"selection_file cannot be used: {error}") from None


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
