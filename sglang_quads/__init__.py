"""SGLang plugin: quantization method ``quads_nvfp4``. Importing it loads no engine."""

__all__ = ["register"]

_registered = False


def register() -> None:
    """Entry point ``sglang.srt.plugins``: runs once in every SGLang process, idempotent.

    SGLang calls it through ``sglang.srt.plugins.load_plugins()``, which then applies the hooks that
    are registered here. A process that builds ``ServerArgs`` on its own must call ``load_plugins``
    before that (``import sglang_quads.preload`` does).
    """
    global _registered
    if _registered:
        return
    from quads_common.options import QUANT_METHOD
    from sglang_quads import compat, hooks
    from sglang_quads.config import QuadsNvfp4Config

    compat.warn_of_untested_version()
    compat.add_quantization_method(QUANT_METHOD, QuadsNvfp4Config)
    hooks.register()
    _registered = True
