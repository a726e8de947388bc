"""The set-up hook in real Ray actors: stand-ins of OpenRLHF 0.11.2's modules.

``python tests/trainers/run_openrlhf_ray.py OUT.json``. What matters is how Ray ships them: the
actor class by value, with the globals that the driver's module had, the rest by reference.
"""

import importlib
import json
import os
import sys
import tempfile
from pathlib import Path

import ray

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "models" / "arith-moe"

ACTOR = """
import torch
from transformers import AutoModelForCausalLM

class Actor(torch.nn.Module):
    def __init__(self, pretrain_or_model, ds_config=None):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(pretrain_or_model, dtype=torch.bfloat16)
"""
LOSS = "class PolicyLoss: pass"
PPO_ACTOR = """
import ray
from quads_common.qat.weight import prepared_weights
from openrlhf.models.actor import Actor
from openrlhf.models.loss import PolicyLoss

class ActorPPOTrainer:
    def __init__(self, strategy, actor, ema_model=None):
        self.loss = PolicyLoss()

    def training_step(self):
        pass

def facts(actor):
    weights = prepared_weights(actor.model)
    return {"weights": len(weights), "rules": sorted({w.rule for w in weights})}

@ray.remote
class PolicyModelActor:
    def build(self, pretrain, train, evaluate):
        actor, ema = Actor(pretrain, ds_config=train), Actor(pretrain, ds_config=evaluate)
        seen = {"policy": facts(actor), "ema": facts(ema)}
        seen["loss"] = type(ActorPPOTrainer(None, actor).loss).__name__
        for name, action in (
            ("zero_3", lambda: Actor(pretrain, ds_config={
                "zero_optimization": {**train["zero_optimization"], "stage": 3}})),
            ("unprepared", lambda: ActorPPOTrainer(None, ema)),
        ):
            try:
                action()
                seen[name] = ""
            except Exception as error:
                seen[name] = str(error)
        return seen
"""
LAUNCHER = """
import ray
from openrlhf.models.actor import Actor
from openrlhf.trainer.ray.ppo_actor import facts

@ray.remote
class ReferenceModelActor:
    def build(self, pretrain, evaluate):
        return facts(Actor(pretrain, ds_config=evaluate))
"""
# The keys of the two that tell them apart, as get_train_ds_config and get_eval_ds_config have them.
TRAIN = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}}
EVALUATE = {"zero_optimization": {"stage": 0, "offload_param": {"device": "none"}}}


def write_stand_ins(folder: Path) -> None:
    """A package ``openrlhf`` in ``folder``."""
    for name, text in (
        ("models/actor.py", ACTOR),
        ("models/loss.py", LOSS),
        ("trainer/ray/ppo_actor.py", PPO_ACTOR),
        ("trainer/ray/launcher.py", LAUNCHER),
    ):
        path = folder / "openrlhf" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for package in path.relative_to(folder).parents[:-1]:
            (folder / package / "__init__.py").touch()


def main() -> None:
    """Run, and write what was seen."""
    with tempfile.TemporaryDirectory() as folder:
        write_stand_ins(Path(folder))
        sys.path.insert(0, folder)
        variables = {
            "PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]),
            "VLLM_QUADS_CONFIG": json.dumps({"enable": True, "global_scale_rule": "te"}),
            "VLLM_QUADS_TIM": "{}",
        }
        hook = "quads_trainers.openrlhf.setup"
        ray.init(
            num_cpus=1,
            include_dashboard=False,
            object_store_memory=80 * 2**20,
            runtime_env={"worker_process_setup_hook": hook, "env_vars": variables},
        )
        ppo_actor = importlib.import_module("openrlhf.trainer.ray.ppo_actor")
        launcher = importlib.import_module("openrlhf.trainer.ray.launcher")
        policy = ppo_actor.PolicyModelActor.remote()
        seen = ray.get(policy.build.remote(str(MODEL), TRAIN, EVALUATE))
        ray.kill(policy)
        reference = launcher.ReferenceModelActor.remote()
        seen["reference"] = ray.get(reference.build.remote(str(MODEL), EVALUATE))
        ray.shutdown()
    Path(sys.argv[1]).write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
