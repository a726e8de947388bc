"""``QuadsNvfp4Config``: vLLM's quantization configuration of the method."""

import json
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform

from quads_common.backend import choose_backend, general_backend
from quads_common.compensation.layers import Runtime
from quads_common.compensation.serving import check_start_file
from quads_common.options import (
    QUANT_METHOD,
    QuadsOptions,
    check_options,
    merge_options,
)
from quads_common.placement import ModelFacts
from vllm_quads.compensation import new_runtime
from vllm_quads.kept import KeptEmbeddingMethod, KeptLinearMethod, refuse_reloads_on_cpu
from vllm_quads.metrics import MetricsFile
from vllm_quads.refusals import check_supported

if TYPE_CHECKING:
    from vllm.model_executor.models.utils import WeightsMapper

__all__ = ["ADDITIONAL_CONFIG_KEY", "ADDITIONAL_SOURCE", "QuadsNvfp4Config"]

logger = init_logger(f"vllm.{__name__}")  # vLLM configures no logger but its own

ADDITIONAL_CONFIG_KEY = "quads"  # --additional-config '{"quads": {...}}'
ADDITIONAL_SOURCE = f"additional_config[{ADDITIONAL_CONFIG_KEY!r}]"  # in messages


class QuadsNvfp4Config(QuantizationConfig):
    """Options of one model. Pickled into every worker, so it holds plain data only.

    raw_options: what the checkpoint's or ``--hf-overrides``' quantization_config says. ``prepare``
    merges in the options of ``--additional-config`` once vLLM's configuration is known.
    """

    def __init__(self, raw_options: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.raw_options = dict(raw_options or {})
        check_options(self.raw_options, "quantization_config")
        self.options = QuadsOptions()
        self._ready = False
        self.facts: ModelFacts | None = None
        self.load_format = "auto"
        self.seen: list[str] = []  # checkpoint names of all modules that were decided on
        self.backend = "undecided"
        self.engine_id = uuid.uuid4().hex  # the same in all processes
        self.runtime: Runtime | None = None  # of this process; never pickled

    def __getstate__(self) -> dict[str, Any]:
        """Plain data: each process makes its own tensors."""
        return {**self.__dict__, "runtime": None}

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
    def get_cache_scale_mapper() -> "WeightsMapper":
        """No renaming, as without quantization: a BF16 checkpoint holds no KV cache scales.

        vLLM's default tries eight regular expressions on each name of every weight sync.
        """
        from vllm.model_executor.models.utils import WeightsMapper

        return WeightsMapper()

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: a BF16 checkpoint needs no configuration file."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "QuadsNvfp4Config":
        """From the model's or ``--hf-overrides``' quantization_config."""
        return cls(config)

    @classmethod
    def from_config_file(cls, path: str) -> "QuadsNvfp4Config":
        """From ``--hf-overrides '{"quantization_config_file": path}'``."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ValueError(f"quantization_config_file {path!r} cannot be read: {error}") from None
        return cls.from_config_dict_json(text)

    @classmethod
    def from_config_dict_json(cls, text: str) -> "QuadsNvfp4Config":
        """From ``--hf-overrides '{"quantization_config_dict_json": text}'``."""
        options = json.loads(text)
        if not isinstance(options, dict):
            raise ValueError(f"quantization_config_dict_json must be an object, got {options!r}")
        return cls(options)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> None:
        """Refuse checkpoints that are already quantized; never claim one.

        Raises:
            ValueError: ``--quantization quads_nvfp4`` on a quantized checkpoint.
        """
        foreign = hf_quant_cfg.get("quant_method")
        if user_quant == QUANT_METHOD and not foreign:
            raise ValueError(
                'the model\'s quantization_config has no "quant_method": add "quant_method": '
                f'"{QUANT_METHOD}" to it'
            )
        if user_quant == QUANT_METHOD and foreign != QUANT_METHOD:
            raise ValueError(
                f"the checkpoint is already quantized (quant_method {foreign!r}) and "
                f"{QUANT_METHOD} takes BF16 checkpoints: give it the BF16 one, or serve this one "
                f'without --quantization {QUANT_METHOD} (or VLLM_QUADS_CONFIG\'s "enable")'
            )

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of a layer; unquantized where placement says so."""
        if not self._ready:
            self.prepare(get_current_vllm_config())
        if isinstance(layer, LinearBase):
            from vllm_quads.linear import QuadsLinearMethod

            if not self._decide(prefix):
                return KeptLinearMethod()
            return QuadsLinearMethod(
                self.options,
                prefix,
                self._members(prefix),
                self.load_format,
                general_backend(self.backend),
                self._runtime(),
            )
        if isinstance(layer, RoutedExperts):
            from vllm_quads.fused_moe import QuadsMoEMethod

            if not self._decide(prefix):
                refuse_reloads_on_cpu(layer, prefix)
                return None
            return QuadsMoEMethod(
                self.options, layer, prefix, self.load_format, self.backend, self._runtime()
            )
        if isinstance(layer, VocabParallelEmbedding):
            if self._decide(prefix):
                raise ValueError(f"targets names {prefix!r}, but embeddings and lm_head stay BF16")
            return KeptEmbeddingMethod()
        return None

    def prepare(self, vllm_config: VllmConfig) -> None:
        """Merge options, refuse features, choose the backend; once, with vLLM's configuration."""
        if self._ready:
            return
        self.options = merge_options(
            {
                "quantization_config": self.raw_options,
                ADDITIONAL_SOURCE: additional_options(vllm_config.additional_config),
            }
        )
        self.facts = ModelFacts.from_hf_config(vllm_config.model_config.hf_config)
        self.load_format = str(vllm_config.load_config.load_format)
        self.backend = choose_backend(
            self.options.backend,
            vllm_config.device_config.device_type,
            current_platform.get_device_capability(),
        )
        check_supported(vllm_config, general_backend(self.backend), self.options.act)
        check_start_file(self.options, vllm_config.parallel_config.tensor_parallel_size)
        logger.info_once(
            "quads_nvfp4: method %s, act %s, targets %s, backend %s",
            self.options.preset,
            self.options.act,
            ",".join(self.options.targets),
            self.backend,
        )
        self._ready = True

    def _runtime(self) -> Runtime | None:
        """What compensated layers share; None if nothing is compensated."""
        if self.runtime is None and self.options.compensates:
            assert self.facts is not None, f"{self.options=}"
            metrics = MetricsFile(self.engine_id)
            self.runtime = new_runtime(self.options, get_current_vllm_config(), self.facts, metrics)
        return self.runtime

    def _members(self, prefix: str) -> list[str]:
        """Checkpoint names of what vLLM holds in one layer: q, k, v or gate, up; else itself."""
        parent, _, last = prefix.rpartition(".")
        names = self.packed_modules_mapping.get(last, [last])
        return [f"{parent}.{name}" if parent else name for name in names]

    def _decide(self, prefix: str) -> bool:
        """Placement of a layer by vLLM's name, which may be that of a fused group."""
        assert self.facts is not None, f"{prefix=}"
        members = self._members(prefix)
        self.seen.extend(members)
        return self.options.placement.decide_group(members, self.facts)


def additional_options(additional_config: object) -> dict[str, Any]:
    """The ``quads`` object of ``--additional-config``.

    Raises:
        ValueError: it is no object.
    """
    section = (
        additional_config.get(ADDITIONAL_CONFIG_KEY, {})
        if isinstance(additional_config, dict)
        else {}
    )
    if not isinstance(section, dict):
        raise ValueError(f"{ADDITIONAL_SOURCE} must be an object, got {section!r}")
    return section
