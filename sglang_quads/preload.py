"""Import this in a process that builds ``ServerArgs`` itself, before it does.

SGLang loads plugins in ``Engine``, ``launch_server`` and its scheduler processes, which is too late
for a trainer that calls ``ServerArgs(quantization="quads_nvfp4")`` or SGLang's argument parser on
its own. verl imports it everywhere with ``VERL_USE_EXTERNAL_MODULES=sglang_quads.preload``.
"""

from sglang.srt.plugins import load_plugins

__all__: list[str] = []

load_plugins()
