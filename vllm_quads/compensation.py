"""How compensation meets vLLM: what the layers of a model share, and where rows are not known."""

from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger

from quads_common.compensation import serving
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
    return serving.new_runtime(
        options,
        tp_size=parallel.tensor_parallel_size,
        first_rank=get_tensor_model_parallel_rank() == 0,
        max_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        log=logger,
        rows_unknown=rows_unknown(vllm_config, facts),
        replicas=parallel.data_parallel_size > 1,
        on_refresh=metrics.write,
    )


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
