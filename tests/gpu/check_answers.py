"""arith-moe in a vLLM engine on a GPU, as vLLM sets it up: torch.compile and CUDA graphs.

    python tests/gpu/check_answers.py

Needs vLLM, this package with its entry points, and one GPU. W4A4 without compensation: of 500
held-out problems, as they are and with the hot channels scaled by 32, as many are answered right as
on the CPU (docs/results.md: all and 76.6%), within three standard errors of the difference of two
shares. Sums are made in another order there, which turns codes and now and then an answer.
"""

import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from sync_engine import MODEL, ROOT, engine, sync, worker_of

sys.path.insert(0, str(ROOT))

from benchmarks.accuracy_arith_moe import heldout, make_variant

COUNT, CPU_PLAIN, CPU_HOT = 500, 1.0, 0.766


def right(llm: Any, problems: list[tuple[str, str]]) -> float:
    """Share of right answers."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=8)
    found = llm.generate([prompt for prompt, _ in problems], params, use_tqdm=False)
    answers = [o.outputs[0].text.strip() for o in found]
    return sum(a == want for a, (_, want) in zip(answers, problems, strict=True)) / len(problems)


def three_errors(a: float, b: float) -> float:
    """Three standard errors of the difference of two shares of COUNT.

    Of one true share: the mean with one more right and one more wrong, so that 0 and 1 are not
    certain (Agresti and Caffo).
    """
    pooled = ((a + b) * COUNT + 1) / (2 * COUNT + 2)
    return 3 * math.sqrt(2 * pooled * (1 - pooled) / COUNT)


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # weights go to the worker in this process
    problems = heldout(COUNT)
    llm = engine(
        MODEL,
        quantization="quads_nvfp4",
        additional_config={"quads": {"method": "nvfp4"}},
        max_num_seqs=256,
        gpu_memory_utilization=0.05,  # only asked for at the start, as the cache's size is given
    )
    config = worker_of(llm).vllm_config.compilation_config
    print(f"compilation mode {config.mode}, CUDA graphs {config.cudagraph_mode}")
    plain = right(llm, problems)
    with tempfile.TemporaryDirectory() as folder:
        hot_model = make_variant(Path(folder) / "hot", ("--scale", "32"))
        weights = {
            name: tensor.cuda()
            for file in hot_model.glob("*.safetensors")
            for name, tensor in load_file(file).items()
        }
    sync(llm, weights, "reload")
    torch.cuda.synchronize()
    hot = right(llm, problems)
    good = True
    for what, here, on_cpu in (("plain", plain, CPU_PLAIN), ("hot x 32", hot, CPU_HOT)):
        bound = three_errors(here, on_cpu)
        good &= abs(here - on_cpu) <= bound
        print(f"{what} {here:.1%} right, on the CPU {on_cpu:.1%}, {bound:.1%} apart at most")
    print("ok" if good else "FAILED")
    sys.exit(not good)


if __name__ == "__main__":
    main()
