"""arith-moe in a vLLM engine on a GPU, as vLLM sets it up: torch.compile and CUDA graphs.

    python tests/gpu/check_answers.py

Needs vLLM, this package with its entry points, and one GPU. W4A4 without compensation: the answers
to 500 held-out problems are those of the CPU (all right), and with the hot channels scaled by 32 as
many are right as on the CPU (docs/results.md: 76.6%), within three standard errors of the
difference of two such shares.
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

COUNT, CPU_HOT = 500, 0.766


def right(llm: Any, problems: list[tuple[str, str]]) -> float:
    """Share of right answers."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=8)
    found = llm.generate([prompt for prompt, _ in problems], params, use_tqdm=False)
    answers = [o.outputs[0].text.strip() for o in found]
    return sum(a == want for a, (_, want) in zip(answers, problems, strict=True)) / len(problems)


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
    bound = 3 * math.sqrt(2 * CPU_HOT * (1 - CPU_HOT) / COUNT)
    good = plain == 1 and abs(hot - CPU_HOT) <= bound
    print(
        f"plain {plain:.1%} right (CPU 100%), hot x 32 {hot:.1%} (CPU {CPU_HOT:.1%} +- {bound:.1%})"
    )
    print("ok" if good else "FAILED")
    sys.exit(not good)


if __name__ == "__main__":
    main()
