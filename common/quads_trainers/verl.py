"""verl's plug-in: entry point ``quads_nvfp4`` of the group ``verl.plugins``.

verl imports this module in every process, right after ``import verl``, and that is all it does:
nothing is called. So importing it installs the patches, each for when verl loads its module.
Errors here would be swallowed (verl logs them at DEBUG level); then ``rollout_rs=seq_tim`` and
``qat.mode=quads_nvfp4`` are unknown and verl refuses them. Tried with verl 0.9.1.
"""

from importlib.metadata import entry_points
from types import ModuleType

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
    patch_when_imported("sglang.srt.layers.quantization", register_in_sglang)


def register_in_sglang(_: ModuleType) -> None:
    """Run the SGLang plug-in of this distribution, if it has one."""
    for entry_point in entry_points(group="sglang.srt.plugins", name="quads_nvfp4"):
        entry_point.load()()


install()
