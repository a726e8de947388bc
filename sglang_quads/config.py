"""``QuadsNvfp4Config``: SGLang's quantization configuration of the method."""

import logging
import os
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from torch import nn

from quads_common.backend import choose_backend, general_backend
from quads_common.compensation.layers import Runtime
from quads_common.compensation.serving import check_start_file
from quads_common.options import (
    QUANT_METHOD,
    QuadsOptions,
    merge_options,
    read_environment_options,
)
from quads_common.placement import ModelFacts
from sglang_quads import compat
from sglang_quads.compensation import FlushState, new_runtime
from sglang_quads.refusals import check_model_class

__all__ = ["ENVIRONMENT_VARIABLE", "QuadsNvfp4Config", "environment_options", "options_of"]

logger = logging.getLogger(__name__)

ENVIRONMENT_VARIABLE = "SGLANG_QUADS_CONFIG"
SWITCHES = ("enable", "model")  # keys of the environment variable that are no options
# What models fuse unless they say otherwise; names are those of the checkpoint.
FUSED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}


def environment_options() -> dict[str, Any]:
    """What ``SGLANG_QUADS_CONFIG`` holds, with "enable" and "model" if it has them."""
    return read_environment_options(ENVIRONMENT_VARIABLE, os.environ.get(ENVIRONMENT_VARIABLE))


def options_of(quantization_config: dict[str, Any]) -> QuadsOptions:
    """Options of the model's quantization_config and of the environment as one.

    Raises:
        ValueError: an option error, naming the place and the key.
    """
    in_model = {k: v for k, v in quantization_config.items() if k != "packed_modules_mapping"}
    in_environment = {k: v for k, v in environment_options().items() if k not in SWITCHES}
    return merge_options({"quantization_config": in_model, ENVIRONMENT_VARIABLE: in_environment})


class QuadsNvfp4Config(QuantizationConfig):
    """Options of one model. ``prepare`` completes it once SGLang's configuration is known.

    quantization_config: the model's, or what ``--json-model-override-args`` put in its place.
    """

    def __init__(self, quantization_config: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.options = options_of(quantization_config or {})
        self.facts: ModelFacts | None = None
        self.load_format = "auto"
        self.backend = "undecided"
        self.fused = dict(FUSED)
        self.seen: set[str] = set()  # checkpoint names of all modules that were decided on
        self.runtime: Runtime | None = None  # of what is compensated
        self.flush = FlushState()

    def get_name(self) -> str:
        """Name of the method."""
        return QUANT_METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Model dtypes. float16 is refused: GEMM outputs may pass 65504."""
        return [torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """sm_80."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: a BF16 checkpoint needs no configuration file."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "QuadsNvfp4Config":
        """From the model's or ``--json-model-override-args``' quantization_config."""
        return cls(config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None
    ) -> str | None:
        """Claim configurations without a method that the user gave; refuse foreign ones.

        Raises:
            ValueError: ``--quantization quads_nvfp4`` on a quantized checkpoint.
        """
        if user_quant != QUANT_METHOD:
            return None
        foreign = hf_quant_cfg.get("quant_method", QUANT_METHOD)
        if foreign != QUANT_METHOD:
            raise ValueError(
                f"the checkpoint is already quantized (quant_method {foreign!r}) and "
                f"{QUANT_METHOD} takes BF16 checkpoints: give it the BF16 one, or serve this one "
                f'without --quantization {QUANT_METHOD} (or {ENVIRONMENT_VARIABLE}\'s "enable")'
            )
        return QUANT_METHOD

    def get_scaled_act_names(self) -> list[str]:
        """None."""
        return []

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of a layer; unquantized where placement says so."""
        if isinstance(layer, LinearBase):
            from sglang_quads.linear import QuadsLinearMethod

            if not self._decide(prefix):
                return UnquantizedLinearMethod()
            return QuadsLinearMethod(
                self.options,
                prefix,
                self._members(prefix),
                self.load_format,
                general_backend(self.backend),
                self.runtime,
            )
        if isinstance(layer, FusedMoE):
            from sglang_quads.fused_moe import QuadsMoEMethod

            if not self._decide(prefix):
                return None
            return QuadsMoEMethod(
                self.options, prefix, self.load_format, self.backend, self.runtime
            )
        if isinstance(layer, VocabParallelEmbedding) and self._decide(prefix):
            raise ValueError(f"targets names {prefix!r}, but embeddings and lm_head stay BF16")
        return None

    def prepare(
        self, model_config: Any, load_config: Any, model_class: type, server_args: Any
    ) -> None:
        """Facts of the model, load format, backend, compensation, before a layer is made.

        Raises:
            ValueError: a model of Transformers, a backend that cannot run here, a selection file
                that does not fit.
        """
        check_model_class(model_class)
        self.facts = ModelFacts.from_hf_config(model_config.hf_config)
        load_format = load_config.load_format
        self.load_format = str(getattr(load_format, "value", load_format))
        self.fused = {**FUSED, **(getattr(model_class, "packed_modules_mapping", None) or {})}
        device = compat.device_type()
        capability = torch.cuda.get_device_capability() if device == "cuda" else None
        self.backend = choose_backend(self.options.backend, device, capability)
        if self.options.compensates:
            check_start_file(self.options, server_args.tp_size)
            context = model_config.context_len
            self.runtime = new_runtime(self.options, server_args, context)

    def _members(self, prefix: str) -> list[str]:
        """Checkpoint names of what SGLang holds in one layer: q, k, v or gate, up; else itself."""
        parent, _, last = prefix.rpartition(".")
        names = self.fused.get(last, [last])
        return [f"{parent}.{name}" if parent else name for name in names]

    def _decide(self, prefix: str) -> bool:
        """Placement of a layer by SGLang's name, which may be that of a fused group."""
        if self.facts is None:
            raise RuntimeError(
                "quads_nvfp4: SGLang built a model without calling this plugin's hooks; its log "
                "says why they were not applied"
            )
        members = self._members(prefix)
        self.seen.update(members)
        return self.options.placement.decide_group(members, self.facts)
