"""verl: QAT and the rollout method from one setting.

    actor_rollout_ref.actor.fsdp_config.qat.enable=True
    actor_rollout_ref.actor.fsdp_config.qat.mode=quads_nvfp4
    actor_rollout_ref.actor.fsdp_config.qat.quantization_config_path=quads.json

The last holds the method's options and may be left out. verl's own NVFP4 QAT swaps ``nn.Linear``
only: with transformers 5 the experts of an MoE model are 3-D parameters, so its trainer
fake-quantizes none of them while its exporter packs them all. Under this mode the trainer's model
goes through ``prepare_qat`` instead, weights travel as they are, and the vLLM engine quantizes them
with the same quantizer. Other modes are left to verl.
"""

import functools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from quads_common.options import QUANT_METHOD, QuadsOptions
from quads_common.qat import prepare_qat

__all__ = ["MODE", "patch_fsdp_engine", "patch_megatron_engine", "patch_vllm_server", "qat_options"]

MODE = QUANT_METHOD  # of verl's qat.mode
VERL_IGNORE = ["lm_head", "embed_tokens", "re:.*mlp.gate$"]  # verl's default ignore_patterns


def qat_options(config: Any) -> dict[str, Any]:
    """The method's options as JSON, from verl's qat section (an object or a mapping).

    Raises:
        ValueError: a bad file or option; settings of the section that this mode does not read.
    """
    get = config.get if isinstance(config, Mapping) else functools.partial(_attribute, config)
    ignore = get("ignore_patterns")
    if ignore is not None and list(ignore) != VERL_IGNORE:
        raise ValueError(
            f"qat.ignore_patterns {list(ignore)!r} is not read with qat.mode={MODE}: put 'ignore' "
            "into the file of qat.quantization_config_path"
        )
    for key, default in (("group_size", 16), ("activation_observer", "static_minmax")):
        value = get(key)
        if value is not None and value != default:
            raise ValueError(f"qat.{key}={value!r} is not read with qat.mode={MODE}: leave it out")
    path, options = get("quantization_config_path"), {}
    if path:
        try:
            options = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"qat.quantization_config_path {path!r}: {error}") from None
        if not isinstance(options, dict):
            raise ValueError(f"qat.quantization_config_path {path!r} must hold a JSON object")
    QuadsOptions.from_dict(options, path or "qat")
    return {key: value for key, value in options.items() if key != "quant_method"}


def patch_fsdp_engine(module: ModuleType) -> None:
    """``FSDPEngine`` of ``verl.workers.engine.fsdp.transformer_impl``."""
    engine = module.FSDPEngine
    apply_qat, get_parameters = engine._apply_qat, engine.get_per_tensor_param

    @functools.wraps(apply_qat)
    def _apply_qat(self: Any, model: Any) -> Any:
        if self._qat_config.mode != MODE:
            return apply_qat(self, model)
        if self.engine_config.strategy != "fsdp2":
            raise NotImplementedError(
                f"qat.mode={MODE} needs actor.strategy=fsdp2, got {self.engine_config.strategy!r}"
            )
        return prepare_qat(model, qat_options(self._qat_config))

    @functools.wraps(get_parameters)
    def get_per_tensor_param(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._qat_enabled or self._qat_config.mode != MODE:
            return get_parameters(self, *args, **kwargs)
        with _without_verls_exporter(self):
            return get_parameters(self, *args, **kwargs)

    engine._apply_qat = _apply_qat
    engine.get_per_tensor_param = get_per_tensor_param


def patch_megatron_engine(module: ModuleType) -> None:
    """``MegatronEngine``: refuse the mode, which verl would hand to ModelOpt."""
    engine = module.MegatronEngine
    initialize = engine.__init__

    @functools.wraps(initialize)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        if self._qat_enabled and self._qat_config.mode == MODE:
            raise NotImplementedError(
                f"qat.mode={MODE} works with FSDP2 only: a Megatron model has to call "
                "quads_common.qat.fake_quantize_experts in its own MoE layer"
            )

    engine.__init__ = __init__


def patch_vllm_server(module: ModuleType) -> None:
    """``vLLMHttpServer``: the rollout inherits the actor's qat section."""
    server = module.vLLMHttpServer
    apply_quantization = server._apply_quantization

    @functools.wraps(apply_quantization)
    def _apply_quantization(self: Any) -> tuple[str | None, dict[str, Any]]:
        section = getattr(self.config, "qat", None) or {}
        if not section.get("enable", False) or section.get("mode") != MODE:
            return apply_quantization(self)
        if self.config.quantization is not None:
            raise ValueError(
                f"rollout.quantization={self.config.quantization!r} contradicts qat.mode={MODE}"
            )
        options = {"quant_method": QUANT_METHOD, **qat_options(section)}
        return QUANT_METHOD, {"quantization_config": options}

    server._apply_quantization = _apply_quantization


@contextmanager
def _without_verls_exporter(engine: Any) -> Iterator[None]:
    """verl decides with this flag, when the call is made, whether to pack the stream itself."""
    engine._qat_enabled = False
    try:
        yield
    finally:
        engine._qat_enabled = True


def _attribute(config: Any, name: str) -> Any:
    return getattr(config, name, None)
