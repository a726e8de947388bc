"""``prepare_qat``: make a trainer's model compute with the weights that the rollout will hold."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from quads_common.format import INPUT_DTYPES, GlobalScaleRule, check_block_aligned
from quads_common.options import QuadsOptions
from quads_common.placement import ModelFacts
from quads_common.qat.effective import check_amax
from quads_common.qat.modules import EXPERT_STACKS, is_expert_stack, restore, swap
from quads_common.qat.names import FUSED_SIBLINGS, checkpoint_name, fused_groups
from quads_common.qat.ops import matrix_amax
from quads_common.qat.weight import QatWeight, prepared_weights

__all__ = ["check_finite", "prepare_qat", "unprepare"]

logger = logging.getLogger(__name__)

# Model types whose modules transformers names otherwise than the checkpoint does (its weight
# conversions rename them), among those with experts or linears that would be quantized.
RENAMED_MODEL_TYPES = frozenset(
    {
        "deepseek_v4",
        "granitemoe",
        "granitemoehybrid",
        "granitemoeshared",
        "minimax",
        "minimax_m2",
        "mixtral",
        "nemotron_h",
        "phimoe",
    }
)
_CHECK_HOOK = "_quads_qat_check"  # attribute of a prepared model: handle of its forward hook
# Their weights are no matrix that an engine multiplies activations with, or no linear's.
_OTHER_WEIGHTS = (nn.Embedding, nn.EmbeddingBag, nn.modules.conv._ConvNd)


def prepare_qat(
    model: nn.Module,
    config: QuadsOptions | Mapping[str, Any] | None = None,
    *,
    fused: Sequence[Sequence[str]] = FUSED_SIBLINGS,
) -> nn.Module:
    """Fake-quantize the weights that ``config`` places, in place; return the model.

    config: the engine's options (or their JSON object). ``targets`` and ``ignore`` choose modules,
        ``global_scale_rule`` the scale; what concerns activations does not apply to a trainer.
    fused: children that the engine fuses, so that they share one scale (vLLM's
        ``packed_modules_mapping``).

    Call it on the bare model, before ``fully_shard``, DDP and ``torch.compile``. Parameters, names
    and the state dict stay as they are. Every forward quantizes anew (see ``cached_quantization``).
    After a forward of ``model`` itself, not compiled, one device read checks for NaN and Inf. Where
    that does not happen bad weights give NaN results: call ``check_finite`` now and then.

    The effective weights live until backward: without activation checkpointing that is one more
    copy of all prepared weights, which ``fully_shard`` does not shard.

    Raises:
        ValueError: bad options; nothing to quantize; siblings placed unlike; K cuts a block of 16;
            the model is prepared already.
        TypeError: ``config`` is no options; a weight of another dtype than bf16, fp16, fp32.
        NotImplementedError: a chosen module has a layout or a forward of its own, or the model has
            LoRA or tensor parallel weights. Nothing is skipped in silence.
    """
    options = _as_options(config)
    if prepared_weights(model):
        raise ValueError("the model is prepared for QAT already: call unprepare first")
    _refuse_unsupported(model)
    plan = _Plan(model, options, fused)
    if not plan.stacks and not plan.linears:
        raise ValueError(
            f"targets {list(options.targets)} with ignore {list(options.ignore)} choose no module "
            f"of {type(model).__name__}"
        )
    _refuse_other_names(model, [*plan.stacks, *plan.linears])
    for pattern in options.placement.unmatched("targets", plan.names):
        raise ValueError(f"targets: {pattern!r} matches no module of {type(model).__name__}")
    for pattern in options.placement.unmatched("ignore", plan.names):
        logger.warning("QAT: ignore: %r matches no module of %s", pattern, type(model).__name__)
    weights = plan.weights(options.global_scale_rule)
    for module, by_attribute in weights:
        swap(module, by_attribute)
    setattr(model, _CHECK_HOOK, model.register_forward_hook(_check_after_forward))
    logger.info(
        "QAT: %d expert modules and %d linear layers are fake-quantized (rule %s); %d linear "
        "layers are kept",
        len(plan.stacks),
        len(plan.linears),
        options.global_scale_rule,
        plan.kept,
    )
    return model


def unprepare(model: nn.Module) -> nn.Module:
    """Undo ``prepare_qat`` in place; return the model. No effect on one that is not prepared."""
    for module in model.modules():
        restore(module)
    handle = model.__dict__.pop(_CHECK_HOOK, None)
    if handle is not None:
        handle.remove()
    return model


def check_finite(model: nn.Module) -> None:
    """Check the weights under QAT as they are now, with one device read.

    Under ``fully_shard`` each rank checks, and numbers, the matrices of its own shards.

    Raises:
        ValueError: names the parameters that hold NaN or Inf.
    """
    weights = prepared_weights(model)
    local = [getattr(p, "to_local", lambda p=p: p)() for p in (w.parameter() for w in weights)]
    check_amax([matrix_amax(p) for p in local], [weight.parameter_name for weight in weights])


def _check_after_forward(model: nn.Module, args: Any, output: Any) -> None:
    """Check the maxima that the forward left behind."""
    if torch.compiler.is_compiling():
        return
    seen = [(w.amax, w.parameter_name) for w in prepared_weights(model) if w.amax is not None]
    for weight in prepared_weights(model):
        weight.amax = None
    check_amax([amax for amax, _ in seen], [name for _, name in seen])


def _as_options(config: QuadsOptions | Mapping[str, Any] | None) -> QuadsOptions:
    if config is None:
        return QuadsOptions()
    if isinstance(config, QuadsOptions):
        return config
    if isinstance(config, Mapping):
        return QuadsOptions.from_dict(config, "prepare_qat")
    raise TypeError(
        f"config must be QuadsOptions or their JSON object, got {type(config).__name__}"
    )


def _refuse_other_names(model: nn.Module, names: Sequence[str]) -> None:
    """Refuse models whose modules are not called what the checkpoint, and so the engine, says."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type in RENAMED_MODEL_TYPES:
        raise NotImplementedError(
            f"transformers' modules of {model_type!r} have other names than its checkpoints: "
            "fingerprints and patterns would not mean what the engine's do"
        )
    for name in names:
        if name.startswith("layers.") or "language_model" in name.split("."):
            raise NotImplementedError(
                f"{name!r} is not a checkpoint name: prepare the whole causal language model, not "
                "its base model or one inside a multimodal model"
            )


def _refuse_unsupported(model: nn.Module) -> None:
    if (getattr(model, "_tp_size", None) or 1) > 1:
        raise NotImplementedError(
            "tensor parallel weights of transformers are not supported: use fully_shard"
        )
    for name, module in model.named_modules():
        if getattr(module, "_is_expert_parallel", False):
            raise NotImplementedError(
                f"{name} holds the experts of one rank only, which transformers numbers from 0: "
                "use fully_shard"
            )
        if hasattr(module, "lora_A"):
            raise NotImplementedError(
                f"{name} has LoRA weights: quantizing the base weight is not what a rollout of the "
                "merged weight computes; merge it first"
            )


class _Plan:
    """Which modules of a model are quantized, checked, before anything is changed.

    linears, stacks: checkpoint name -> module. kept: number of other linears.
    """

    def __init__(
        self, model: nn.Module, options: QuadsOptions, fused: Sequence[Sequence[str]]
    ) -> None:
        modules = {checkpoint_name(name): module for name, module in model.named_modules()}
        all_stacks = {name: m for name, m in modules.items() if is_expert_stack(m)}
        all_linears = {name: m for name, m in modules.items() if isinstance(m, nn.Linear)}
        facts = _facts(model, any("experts" in name.split(".") for name in modules))
        placement = options.placement
        self.names = list(modules)
        self.groups = [
            group
            for group in fused_groups(list(all_linears), fused)
            if placement.decide_group(group, facts)
        ]
        self.linears = {name: all_linears[name] for group in self.groups for name in group}
        self.stacks = {n: m for n, m in all_stacks.items() if placement.decide(n, facts)}
        self.kept = len(all_linears) - len(self.linears)
        for name, module in modules.items():
            known = name in all_stacks or name in all_linears
            if not known and _has_matrices(module) and placement.decide(name, facts):
                raise NotImplementedError(
                    f"{name} ({type(module).__name__}) is to be quantized, but is neither "
                    "nn.Linear nor stacked experts of transformers 5: add it to ignore, for the "
                    "engine too"
                )
        for name, module in (self.linears | self.stacks).items():
            _check_forward(name, module)
            parent = modules.get(name.rpartition(".")[0])
            if parent is not None and "A_log" in parent._parameters:
                raise NotImplementedError(
                    f"{name}: {type(parent).__name__} hands its linears' raw weights to a kernel, "
                    "which would bypass QAT: add it to ignore, for the engine too"
                )

    def weights(self, rule: GlobalScaleRule) -> list[tuple[nn.Module, dict[str, QatWeight]]]:
        """The records that make each module a prepared one."""
        planned: list[tuple[nn.Module, dict[str, QatWeight]]] = []
        for group in self.groups:
            members = tuple(self.linears[name] for name in group)
            for name, module in zip(group, members, strict=True):
                weight = QatWeight(name, module, "weight", members, rule)
                planned.append((module, {"weight": weight}))
        for name, module in self.stacks.items():
            stacks = {
                a: QatWeight(name, module, a, (module,), rule, bool(module.is_transposed))
                for attributes in EXPERT_STACKS
                for a in attributes
                if a in module._parameters
            }
            planned.append((module, stacks))
        for _, by_attribute in planned:
            for weight in by_attribute.values():
                _check_parameter(weight)
        return planned


def _facts(model: nn.Module, has_experts: bool) -> ModelFacts:
    config = getattr(model, "config", None)
    return ModelFacts(has_experts) if config is None else ModelFacts.from_hf_config(config)


def _has_matrices(module: nn.Module) -> bool:
    if isinstance(module, _OTHER_WEIGHTS):
        return False
    own = module._parameters.values()
    return any(p is not None and p.ndim >= 2 and p.is_floating_point() for p in own)


def _check_forward(name: str, module: nn.Module) -> None:
    """Refuse a module whose forward would not read the effective weight."""
    if "forward" in vars(module):
        raise NotImplementedError(
            f"{name}: its forward is replaced on the instance, which would bypass QAT: prepare the "
            "model before hooks that do so"
        )
    if isinstance(module, nn.Linear):
        if type(module).forward is not nn.Linear.forward:
            raise NotImplementedError(
                f"{name}: {type(module).__name__} has a forward of its own, which would bypass QAT"
            )
    elif not hasattr(module, "is_transposed") or (
        # Before transformers said so, only untransposed stacks were all [gate | up].
        module.is_transposed and not hasattr(module, "is_concatenated")
    ):
        raise NotImplementedError(
            f"{name}: {type(module).__name__} does not say how its experts lie in memory "
            "(use_experts_implementation of a newer transformers does)"
        )


def _check_parameter(weight: QatWeight) -> None:
    parameter = weight.parameter()
    if parameter.dtype not in INPUT_DTYPES:
        raise TypeError(f"{weight.parameter_name}: cannot quantize {parameter.dtype}")
    k = parameter.shape[-2 if weight.transposed else -1]
    check_block_aligned(k, f"{weight.parameter_name} {list(parameter.shape)}")
