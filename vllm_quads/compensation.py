"""How compensation meets vLLM: what the layers of a model share, and where rows are not known."""

from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger

from quads_common.compensation.controller import Compensator
from quads_common.compensation.layers import Runtime
from quads_common.options import QuadsOptions
from quads_common.placement import ModelFacts
from vllm_quads.metrics import MetricsFile

__all__ = ["new_runtime", "rows_unknown"]

logger = init_logger(f"vllm.{__name__}")  # vLLM configures no logger but its own


def new_runtime(
    options: QuadsOptions, vllm_config: VllmConfig, facts: ModelFacts, metrics: MetricsFile
) -> Runtime:
    """For a model that is compensated. Warns if its statistics have to stay off."""
    parallel = vllm_config.parallel_config
    first_rank = get_tensor_model_parallel_rank() == 0
    compensator = Compensator(
        options.compensation,
        tp_size=parallel.tensor_parallel_size,
        log=logger,
        selection_file=options.selection_file,
        first_rank=first_rank,
        on_refresh=metrics.write if first_rank else None,
    )
    reason = rows_unknown(vllm_config, facts)
    if reason is not None:
        logger.warning(
            "quads_nvfp4: statistics are off, because with %s it is not known which rows are real "
            "tokens: the selection stays as it is%s",
            reason,
            "" if options.selection_file else " (every block, no channel), until one is loaded",
        )
    if parallel.data_parallel_size > 1:
        logger.warning(
            "quads_nvfp4: data parallel replicas choose for themselves and may differ: load one "
            "selection file in all of them (quads_load_selection)"
        )
    period = 0 if reason is not None else options.compensation.sampling_period
    max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
    return Runtime(compensator, options.compensation, period, max_tokens)


def rows_unknown(vllm_config: VllmConfig, facts: ModelFacts) -> str | None:
    """Why a layer cannot know which of its rows are tokens of the scheduler's; None if it can."""
    parallel = vllm_config.parallel_config
    reasons = {
        "data parallel experts": parallel.data_parallel_size > 1 and facts.has_experts,
        "prefill context parallelism": getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        "micro-batches (--enable-dbo)": bool(getattr(parallel, "enable_dbo", False)),
        "the Ray executor": parallel.distributed_executor_backend == "ray",
    }
    return next((reason for reason, present in reasons.items() if present), None)
