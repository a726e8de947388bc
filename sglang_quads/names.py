"""Which tensor names a model knows, and which look like a quantized layer's but are none's.

SGLang's models skip names that they do not know, some of them for good reason: rotary caches, a
tied ``lm_head``, scales of a KV cache, layers of a draft model. An update whose names all carry a
wrapper's prefix (``module.``, ``_orig_mod.``) would change nothing and report success.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Literal

from torch import nn

__all__ = ["ModelNames", "Verdict"]

Verdict = Literal["known", "doubtful", "quantized", "unknown"]

# Parts of names that models skip, or map in ways of their own; what trainers leave in names.
SKIPPED = ("rotary_emb", "_scale", "zero_point", "mtp")
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# What follows "experts." of experts that stay as they are.
EXPERT = re.compile(r"(\d+)\.(?:gate_proj|up_proj|down_proj|w1|w2|w3)\.(?:weight|bias)")


class ModelNames:
    """Asked about names of tensors that are not a quantized layer's.

    A name is looked up in a table, and looked at only the first time. What the first load brings
    is the model's own checkpoint, so its names are known ones.
    """

    def __init__(
        self, model: nn.Module, linears: Iterable[str], kept_experts: Mapping[str, int]
    ) -> None:
        """linears: names of quantized linear layers' checkpoint tensors. kept_experts: how many
        experts a module has that stays as it is, by its name."""
        self.kept_experts = kept_experts
        config = getattr(model, "config", None)
        self.depth = getattr(config, "num_hidden_layers", None)
        self.tied = bool(getattr(config, "tie_word_embeddings", False))
        # Such models rename much, and a tower's names may end like the language model's. There
        # only experts' names are judged, by whether a loader is called.
        self.renames = hasattr(config, "vision_config") or hasattr(config, "audio_config")
        self.modules = {name for name, _ in model.named_modules() if name}
        self.modules |= model.quads_config.seen
        self.found = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self.learned = False  # from a checkpoint
        self.endings = {ending(name) for name in linears}
        self.owners = {name.removesuffix(".weight") for name in linears}
        # As SGLang fuses them.
        self.owners |= {name for name, m in model.named_modules() if hasattr(m, "quads_names")}
        self.quantized = [m for m in model.modules() if hasattr(m, "quads_units")]

    def judge(self, name: str) -> Verdict:
        """What a tensor of this name is to the model.

        "known": a parameter takes it, or SGLang skips it rightly. "doubtful": it lies in a module
        of the model, but neither parameters nor the checkpoint have it. "quantized": nothing takes
        it, though it looks like a quantized layer's or an expert's. "unknown": nothing takes it.
        """
        if name in self.found:
            return "known"
        if not self._serving():
            self.found.add(name)
            self.learned = True
            return "known"
        verdict = self._look(name)
        if verdict == "known":
            self.found.add(name)
        return verdict

    def takes_experts_alone(self, experts: str) -> bool:
        """Whether a module's experts may come as ``<id>.gate_proj`` and so on."""
        named_so = f"{experts}.0.gate_proj.weight" in self.found
        return named_so or not (self.learned and self._serving())

    def _serving(self) -> bool:
        return any(getattr(m, "quads_serving", False) for m in self.quantized)

    def _look(self, name: str) -> Verdict:
        if any(part in name for part in SKIPPED) or (self.tied and name == "lm_head.weight"):
            return "known"
        layer = LAYER.search(name)
        if layer is not None and self.depth is not None and int(layer[1]) >= self.depth:
            return "known"  # a draft model's
        path = name.split(".")
        owned = any(".".join(path[:n]) in self.owners for n in range(1, len(path) + 1))
        like = owned or ".experts." in f".{name}" or ending(name) in self.endings
        nothing: Verdict = "quantized" if like else "unknown"
        if not WRAPPERS.isdisjoint(path):
            return nothing
        if "experts" in path[1:-1]:
            experts = name[: name.index(".experts.") + len(".experts")]
            if experts not in self.kept_experts:  # of a class that is not SGLang's usual one
                return "known" if experts in self.modules else nothing
            found = EXPERT.fullmatch(name[len(experts) + 1 :])
            inside = found is not None and int(found[1]) < self.kept_experts[experts]
            return "known" if inside else nothing
        if self.renames:
            return "known"
        if owned:  # a bias lies in the module that holds the weight
            return "known" if ".".join(path[:-1]) in self.owners and path[-1] == "bias" else nothing
        # Its layer, or (where SGLang fuses several) what holds it, is in the model.
        if any(".".join(path[:-n]) in self.modules for n in (1, 2)):
            return "doubtful" if self.learned else "known"
        return nothing


def ending(name: str) -> str:
    """The last three components: "self_attn.q_proj.weight"."""
    return ".".join(name.split(".")[-3:])
