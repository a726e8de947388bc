"""Exact-match accuracy of arith-moe in BF16, W4A16 and W4A4, plain and with outlier channels.

    python benchmarks/accuracy_arith_moe.py [--count 500]

One vLLM engine per quantized precision; the variants are loaded into it by weight sync. BF16 gets
a fresh engine each: vLLM 0.32's CPU backend answers at random after ``reload_weights`` of an
unquantized MoE. Then the relative RMS error of the two global scale rules on the model's own
weights. Needs the CPU environment, or a GPU.
"""

import argparse
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from quads_common import dequantize, quantize
from tests.vllm.engine import run_engine

MODEL = Path(__file__).parents[1] / "examples/models/arith-moe"
VARIANTS = {
    "plain": None,
    "hot x 8": ("--scale", "8"),
    "hot x 16": ("--scale", "16"),
    "hot x 32": ("--scale", "32"),
    "live x 32": ("--scale", "32", "--mode", "live"),
}
PRECISIONS = {
    "BF16": {},
    "W4A16": {"quantization": "quads_nvfp4", "additional_config": {"quads": {"act": "bf16"}}},
    "W4A4": {
        "quantization": "quads_nvfp4",
        "additional_config": {"quads": {"method": "nvfp4"}},
    },
}


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=500, help="held-out problems")
    count = parser.parse_args().count
    with tempfile.TemporaryDirectory() as folder:
        print_accuracies(Path(folder), count)
    print_rule_errors()


def print_accuracies(folder: Path, count: int) -> None:
    """One line per precision, one column per variant."""
    problems = heldout(count)
    prompts = [prompt for prompt, _ in problems]
    paths = {name: make_variant(folder / str(i), VARIANTS[name]) for i, name in enumerate(VARIANTS)}
    print(f"accuracy on {count} held-out problems")
    print(f"{'':8}" + "".join(f"{name:>12}" for name in VARIANTS))
    for precision, options in PRECISIONS.items():
        if options:
            results = run_engine(folder / precision, MODEL, reloads(paths, prompts), **options)
        else:
            results = {
                name: run_engine(folder / name, path, [(name, "answers", [prompts])])[name]
                for name, path in paths.items()
            }
        shares = [
            sum(text == answer for text, (_, answer) in zip(results[name], problems, strict=True))
            / count
            for name in VARIANTS
        ]
        print(f"{precision:8}" + "".join(f"{share:12.1%}" for share in shares), flush=True)


def reloads(paths: dict[str, Path], prompts: list[str]) -> list[tuple[str, str, list]]:
    """Probes that load each variant into the running engine and ask it."""
    probes: list[tuple[str, str, list]] = []
    for name, path in paths.items():
        if path != MODEL:
            probes.append((f"{name} loaded", "reload", [str(path)]))
        probes.append((name, "answers", [prompts]))
    return probes


def heldout(count: int) -> list[tuple[str, str]]:
    """Held-out problems of the model's own generator."""
    spec = importlib.util.spec_from_file_location("problems", MODEL / "problems.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.heldout(count, seed=7)


def make_variant(target: Path, arguments: tuple[str, ...] | None) -> Path:
    """The checkpoint itself, or a variant written to ``target``."""
    if arguments is None:
        return MODEL
    command = [sys.executable, str(MODEL / "make_outliers.py"), str(MODEL), str(target)]
    subprocess.run([*command, *arguments], check=True, stdout=subprocess.DEVNULL)
    return target


def print_rule_errors() -> None:
    """Relative RMS error of the decoded expert weights under either rule, all experts together."""
    weights = load_file(MODEL / "model.safetensors")
    groups = {
        "w13": lambda e: torch.cat(
            [weights[f"{e}.gate_proj.weight"], weights[f"{e}.up_proj.weight"]]
        ),
        "w2": lambda e: weights[f"{e}.down_proj.weight"],
    }
    experts = sorted({name.rsplit(".", 2)[0] for name in weights if ".experts." in name})
    print(f"\nrelative RMS error of {len(experts)} experts' weights")
    for which, weight_of in groups.items():
        for rule in ("pow2", "te"):
            error = total = 0.0
            for expert in experts:
                weight = weight_of(expert).double()
                q = quantize(weight_of(expert), global_scale_rule=rule)
                error += (dequantize(q, torch.float64) - weight).square().sum().item()
                total += weight.square().sum().item()
            print(f"{which:4} {rule:5} {(error / total) ** 0.5:.5f}")


if __name__ == "__main__":
    main()
