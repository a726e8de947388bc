"""Which tensor names a model knows, and which look like a quantized layer's but are none's.

SGLang's models skip names that they do not know, some of them for good reason: rotary caches, a
tied ``lm_head``, scales of a KV cache, layers of a draft model. An update whose names all carry a
wrapper's prefix (``module.``, ``_orig_mod.``) would change nothing and report success.
"""

import re
from collections.abc import Iterable

from torch import nn

__all__ = ["ModelNames"]

# Parts of names that models skip, or map in ways of their own; what trainers leave in names.
SKIPPED = ("rotary_emb", "_scale", "zero_point", "mtp")
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class ModelNames:
    """Asked about names of tensors that are not a quantized layer's.

    A name is looked up in a table, and looked at only the first time. What the first load brings
    is the model's own checkpoint, so its names are known ones.
    """

    def __init__(self, model: nn.Module, linears: Iterable[str]) -> None:
        """linears: names of quantized linear layers' checkpoint tensors."""
        config = getattr(model, "config", None)
        self.depth = getattr(config, "num_hidden_layers", None)
        self.tied = bool(getattr(config, "tie_word_embeddings", False))
        # Such models rename much, and a tower's names may end like the language model's. There
        # only experts' names are judged, by whether a loader is called.
        self.renames = hasattr(config, "vision_config") or hasattr(config, "audio_config")
        self.modules = {name for name, _ in model.named_modules() if name}
        self.modules |= model.quads_config.seen
        self.found = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self.endings = {ending(name) for name in linears}
        self.quantized = [m for m in model.modules() if hasattr(m, "quads_units")]

    def known(self, name: str) -> bool:
        """Whether a parameter takes it, or SGLang skips it rightly."""
        if name in self.found:
            return True
        serving = any(getattr(m, "quads_serving", False) for m in self.quantized)
        if serving and not self._fits(name):
            return False
        self.found.add(name)
        return True

    def like_quantized(self, name: str) -> bool:
        """Whether an unknown name ends as a quantized layer's tensors do."""
        return ".experts." in f".{name}" or ending(name) in self.endings

    def _fits(self, name: str) -> bool:
        if any(part in name for part in SKIPPED) or (self.tied and name == "lm_head.weight"):
            return True
        layer = LAYER.search(name)
        if layer is not None and self.depth is not None and int(layer[1]) >= self.depth:
            return True  # a draft model's
        path = name.split(".")
        if not WRAPPERS.isdisjoint(path):
            return False
        if "experts" in path[1:-1]:
            return name[: name.index(".experts.") + len(".experts")] in self.modules
        # Its layer, or (where SGLang fuses several) what holds it, is in the model.
        return self.renames or any(".".join(path[:-n]) in self.modules for n in (1, 2))


def ending(name: str) -> str:
    """The last three components: "self_attn.q_proj.weight"."""
    return ".".join(name.split(".")[-3:])
