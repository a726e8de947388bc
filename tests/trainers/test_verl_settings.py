"""verl's settings reach the engine, and ``qat.mode=quads_nvfp4`` does what it says or refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("verl", reason="needs verl: make test-trainers")

from verl.workers.config.engine import QATEngineConfig

from quads_trainers import verl_qat
from tests.trainers.running import ROOT, run_python

pytestmark = pytest.mark.engine  # vllm_async_server imports vLLM


@pytest.fixture(scope="module")
def server_class():
    import verl.workers.rollout.vllm_rollout.vllm_async_server as module

    return module.vLLMHttpServer


def quantization_of(server_class, **rollout):
    """What verl's server decides for a rollout section."""
    server = object.__new__(server_class)
    server.config = SimpleNamespace(**({"quantization": None, "qat": None} | rollout))
    server.model_config = SimpleNamespace(hf_config=SimpleNamespace())
    return server._apply_quantization()


def test_the_actors_qat_section_configures_the_rollout(server_class, tmp_path):
    path = tmp_path / "quads.json"
    path.write_text(json.dumps({"method": "nvfp4", "act": "bf16"}))
    section = {"enable": True, "mode": "quads_nvfp4", "quantization_config_path": str(path)}
    method, overrides = quantization_of(server_class, qat=section)
    assert method == "quads_nvfp4"
    expected = {"quant_method": "quads_nvfp4", "method": "nvfp4", "act": "bf16"}
    assert overrides == {"quantization_config": expected}


def test_the_examples_settings_are_verls(server_class, tmp_path):
    """examples/grpo_verl.sh through verl's own configuration, into its dataclasses."""
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass

    environment = {"MODEL": "examples/models/arith-moe", "DATA": str(tmp_path)}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = ["bash", str(ROOT / "examples/grpo_verl.sh"), "--cfg", "job"]
    done = subprocess.run(
        command, env=os.environ | environment | {"PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    config = OmegaConf.create(done.stdout[done.stdout.index("actor_rollout_ref:") :])
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert quantization_of(server_class, qat=rollout.qat)[0] == "quads_nvfp4"
    engine = omega_conf_to_dataclass(config.actor_rollout_ref.actor.fsdp_config)
    assert (engine.qat.enable, engine.qat.mode, engine.strategy) == (True, "quads_nvfp4", "fsdp2")
    assert verl_qat.qat_options(engine.qat) == {}
    correction = config.algorithm.rollout_correction
    assert (correction.rollout_rs, correction.rollout_rs_threshold) == ("seq_tim", 0.01)


def test_other_rollouts_are_left_to_verl(server_class):
    assert quantization_of(server_class) == (None, {})
    with pytest.raises(ValueError, match="quantization_config_path is required"):
        quantization_of(server_class, qat={"enable": True, "mode": "w4a16"})
    with pytest.raises(ValueError, match="contradicts"):
        section = {"enable": True, "mode": "quads_nvfp4"}
        quantization_of(server_class, qat=section, quantization="fp8")


def test_engine_kwargs_reach_vllms_command_line():
    """The way without QAT: docs/trainers.md's keys through verl's own builder to vLLM's parser."""
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.rollout.vllm_rollout.utils import build_cli_args_from_config
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    options = {"quantization_config": {"quant_method": "quads_nvfp4", "act": "bf16"}}
    vllm = {"quantization": "quads_nvfp4", "hf_overrides": options}
    section = {"_target_": "verl.workers.config.RolloutConfig", "name": "vllm"}
    section |= {"engine_kwargs": {"vllm": vllm}}
    rollout = omega_conf_to_dataclass(OmegaConf.create(section))
    defaults = {"quantization": None, "hf_overrides": {}}
    arguments = build_cli_args_from_config(defaults | dict(rollout.engine_kwargs["vllm"]))
    parsed = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(arguments)
    assert parsed.quantization == "quads_nvfp4"
    assert parsed.hf_overrides == options


def test_verls_own_qat_misses_the_experts(tmp_path):
    """The reason for our mode: verl 0.9.1's trainer fake-quantizes no expert of this model."""
    from transformers import AutoModelForCausalLM
    from verl.utils.qat.core import apply_qat
    from verl.utils.qat.linear import QATLinear

    model = AutoModelForCausalLM.from_pretrained("examples/models/arith-moe")
    apply_qat(model, {"enable": True, "mode": "w4a16"})
    swapped = [name for name, module in model.named_modules() if isinstance(module, QATLinear)]
    assert swapped and not [name for name in swapped if ".experts" in name]


def test_settings_that_are_not_read_are_refused(tmp_path):
    assert verl_qat.qat_options(QATEngineConfig(enable=True, mode="quads_nvfp4")) == {}
    with pytest.raises(ValueError, match="ignore_patterns"):
        verl_qat.qat_options(QATEngineConfig(ignore_patterns=["lm_head"]))
    with pytest.raises(ValueError, match=r"qat\.group_size=32 is not read"):
        verl_qat.qat_options(QATEngineConfig(group_size=32))
    with pytest.raises(ValueError, match=r"qat\.activation_observer='memoryless_minmax'"):
        verl_qat.qat_options({"activation_observer": "memoryless_minmax"})
    with pytest.raises(ValueError, match="quantization_config_path"):
        verl_qat.qat_options({"quantization_config_path": str(tmp_path / "no.json")})
    (tmp_path / "bad.json").write_text('{"acts": "bf16"}')
    with pytest.raises(ValueError, match="unknown option 'acts'"):
        verl_qat.qat_options({"quantization_config_path": str(tmp_path / "bad.json")})


def fake_engine(mode, strategy):
    """A class like verl's, to see what the patch does with each setting."""

    class Engine:
        _qat_enabled = True
        _qat_config = QATEngineConfig(enable=True, mode=mode)
        engine_config = SimpleNamespace(strategy=strategy)

        def _apply_qat(self, model):
            return "verl"

        def get_per_tensor_param(self):
            return "packed by verl" if self._qat_enabled else "as they are"

    module = SimpleNamespace(FSDPEngine=Engine)
    verl_qat.patch_fsdp_engine(module)
    return Engine()


def test_fsdp1_is_refused_and_other_modes_are_verls():
    with pytest.raises(NotImplementedError, match=r"actor\.strategy=fsdp2, got 'fsdp'"):
        fake_engine("quads_nvfp4", "fsdp")._apply_qat(None)
    engine = fake_engine("w4a16", "fsdp")
    assert engine._apply_qat(None) == "verl"
    assert engine.get_per_tensor_param() == "packed by verl"


def test_weights_are_not_packed_by_verl():
    engine = fake_engine("quads_nvfp4", "fsdp2")
    assert engine.get_per_tensor_param() == "as they are"
    assert engine._qat_enabled


def test_megatron_is_refused():
    class Engine:
        def __init__(self, mode):
            self._qat_enabled, self._qat_config = True, QATEngineConfig(mode=mode)

    verl_qat.patch_megatron_engine(SimpleNamespace(MegatronEngine=Engine))
    Engine("w4a16")
    with pytest.raises(NotImplementedError, match="works with FSDP2 only"):
        Engine("quads_nvfp4")


def test_the_plugin_is_registered_in_every_process(tmp_path):
    """A fresh process that only imports verl has the option; and it can be switched off."""
    # Imported by name, as verl's trainers do at their top: the patch must come before that.
    code = (
        "import verl; from verl.trainer.ppo.rollout_corr_helper import "
        "SUPPORTED_ROLLOUT_RS_OPTIONS as o, compute_rollout_correction_and_add_to_batch as f\n"
        "print('seq_tim' in o and hasattr(f, '__wrapped__'))"
    )
    assert run_python(tmp_path, "-c", code).split()[-1] == "True"
    off = run_python(tmp_path, "-c", code, VERL_USE_EXTERNAL_PLUGINS="none")
    assert off.split()[-1] == "False"
