"""vLLM plugin: quantization method ``quads_nvfp4``. Importing it loads no engine."""

__all__ = ["register"]

_registered = False


def register() -> None:
    """Entry point ``vllm.general_plugins``: runs once in every vLLM process, cheap, idempotent."""
    global _registered
    if _registered:
        return
    from vllm.model_executor.layers.quantization import register_quantization_config

    from quads_common.options import QUANT_METHOD
    from vllm_quads import patches
    from vllm_quads.config import QuadsNvfp4Config

    register_quantization_config(QUANT_METHOD)(QuadsNvfp4Config)
    patches.apply()
    _registered = True
