"""The committed model, its variants, and one engine per configuration for the whole run."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="the vLLM environment has vllm")

ROOT = Path(__file__).parents[2]
ARITH_MOE = ROOT / "examples/models/arith-moe"


@pytest.fixture(scope="session")
def arith_moe() -> Path:
    """The committed BF16 checkpoint."""
    return ARITH_MOE


@pytest.fixture(scope="session")
def checkpoint(arith_moe):
    """Its tensors by name."""
    from safetensors.torch import load_file

    return load_file(arith_moe / "model.safetensors")


def changed(source: Path, target: Path, seed: int) -> Path:
    """A second checkpoint: experts and linears three times as large, everything a little other."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        values = tensor.float()
        if name.endswith("_proj.weight"):  # so that global scales move too
            values = values * 3
        noise = torch.randn(values.shape, generator=generator)
        weights[name] = (values * (1 + 0.01 * noise)).to(tensor.dtype)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.fixture(scope="session")
def second_checkpoint(arith_moe, tmp_path_factory) -> Path:
    """Other weights for the same model."""
    return changed(arith_moe, tmp_path_factory.mktemp("second"), seed=1)


@pytest.fixture(scope="session")
def dense(arith_moe, tmp_path_factory) -> Path:
    """A small random dense Qwen3 with the same tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    target = tmp_path_factory.mktemp("dense")
    tokenizer = AutoTokenizer.from_pretrained(arith_moe)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.1,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


@pytest.fixture(scope="session")
def second_dense(dense, tmp_path_factory) -> Path:
    """Other weights for it."""
    return changed(dense, tmp_path_factory.mktemp("second_dense"), seed=2)


@pytest.fixture(scope="session")
def problems():
    """The checkpoint's problem generator."""
    spec = importlib.util.spec_from_file_location("problems", ARITH_MOE / "problems.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def variant(tmp_path_factory):
    """Make a variant of the checkpoint with outlier channels; each is made once."""
    made = {}

    def make(*arguments: str) -> Path:
        if arguments not in made:
            target = tmp_path_factory.mktemp("variant") / "checkpoint"
            script = ARITH_MOE / "make_outliers.py"
            command = [sys.executable, str(script), str(ARITH_MOE), str(target), *arguments]
            subprocess.run(command, check=True)
            made[arguments] = target
        return made[arguments]

    return make
