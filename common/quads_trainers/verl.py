"""verl's plug-in: entry point ``quads_nvfp4`` of the group ``verl.plugins``.

verl imports this module in every process, right after ``import verl``, and that is all it does:
nothing is called. So importing it installs the patches, each for when verl loads its module.
Errors here would be swallowed (verl logs them at DEBUG level); then ``rollout_rs=seq_tim`` and
``qat.mode=quads_nvfp4`` are unknown and verl refuses them. Tried with verl 0.9.1.
"""

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from quads_trainers.late_patches import patch_when_imported
from quads_trainers.verl_filter import patch_rollout_correction
from quads_trainers.verl_qat import patch_fsdp_engine, patch_megatron_engine, patch_vllm_server

__all__ = ["install"]

_installed = False


def install() -> None:
    """Register all patches; does nothing the second time."""
    global _installed
    if _installed:
        return
    _installed = True
    patch_when_imported("verl.trainer.ppo.rollout_corr_helper", patch_rollout_correction)
    patch_when_imported("verl.workers.engine.fsdp.transformer_impl", patch_fsdp_engine)
    patch_when_imported("verl.workers.engine.megatron.transformer_impl", patch_megatron_engine)
    patch_when_imported("verl.workers.rollout.vllm_rollout.vllm_async_server", patch_vllm_server)
    # verl builds SGLang's ServerArgs before SGLang has loaded its plug-ins.
    patch_when_imported("sglang.srt.server_args", load_sglang_plugins_first)


def load_sglang_plugins_first(server_args: ModuleType) -> None:
    """Make ``ServerArgs`` load SGLang's plug-ins before it is built or its options are parsed.

    Not when the module is imported: SGLang's modules import each other in circles.
    """

    def first(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            try:
                plugins = importlib.import_module("sglang.srt.plugins")
            except ModuleNotFoundError as error:
                # An SGLang without plug-ins: then quads_nvfp4 is a name that it refuses itself.
                if error.name != "sglang.srt.plugins":
                    raise
            else:
                plugins.load_plugins()
            return function(*args, **kwargs)

        return wrapper

    arguments = server_args.ServerArgs
    arguments.__init__ = first(arguments.__init__)
    arguments.add_cli_args = staticmethod(first(arguments.add_cli_args))


install()
