"""Set the limits of the sequence filter from a reference: the same model, rolled out in BF16.

    python examples/calibrate_filter.py --out tim.json
    python examples/calibrate_filter.py --quantization quads_nvfp4 --plot gaps.png   # to compare

Samples completions, scores them with the trainer's forward, reports the log-prob gap and writes a
file that every plug-in reads. Use your own prompts and lengths: short answers have wider gaps.
"""

import argparse
import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine in this process

import torch
from arithmetic import MODEL, draw_problems
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

from quads_common.mismatch import calibrate, gap_report, save_options, sequence_statistics
from quads_common.mismatch.plot import plot_gaps
from quads_common.qat import prepare_qat

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default=str(MODEL))
parser.add_argument("--prompts", type=int, default=64)
parser.add_argument("--samples", type=int, default=8, help="for each prompt")
parser.add_argument("--tokens", type=int, default=8, help="at most, in a completion")
parser.add_argument("--quantization", choices=("quads_nvfp4",), help="default: none, BF16")
parser.add_argument("--share", type=float, default=0.995, help="of the reference that must pass")
parser.add_argument("--out", help="JSON file of limits; only from a BF16 rollout")
parser.add_argument("--plot", help="image file; needs matplotlib")
args = parser.parse_args()
if args.out and args.quantization:
    parser.error("limits are calibrated on a BF16 rollout: leave --quantization out")

device = "cuda" if torch.cuda.is_available() else "cpu"
llm = LLM(
    args.model,
    quantization=args.quantization,
    dtype="bfloat16",
    enforce_eager=True,
    gpu_memory_utilization=0.4 if device == "cuda" else 0.2,
    max_model_len=256,
    seed=0,
)
sampling = SamplingParams(n=args.samples, temperature=1.0, max_tokens=args.tokens, logprobs=0)
prompts = [prompt for prompt, _ in draw_problems(args.prompts, seed=0)]
model = AutoModelForCausalLM.from_pretrained(
    args.model, dtype=torch.float32, experts_implementation="eager"
).to(device)
if args.quantization:
    prepare_qat(model)

deltas = []
for output in llm.generate(prompts, sampling, use_tqdm=False):
    for sample in output.outputs:
        ids = torch.tensor([[*output.prompt_token_ids, *sample.token_ids]], device=device)
        first = len(output.prompt_token_ids)
        with torch.no_grad(), torch.autocast(device, torch.bfloat16):
            logits = model(input_ids=ids, use_cache=False).logits[0, first - 1 : -1]
        trained = logits.float().log_softmax(-1).gather(-1, ids[0, first:, None]).squeeze(-1)
        sampled = [at[i].logprob for at, i in zip(sample.logprobs, sample.token_ids, strict=True)]
        deltas.append(trained.cpu() - torch.tensor(sampled))
mask = pad_sequence([torch.ones_like(delta) for delta in deltas], batch_first=True)
delta = pad_sequence(deltas, batch_first=True)

print(gap_report(delta, mask).to_text())
options = calibrate(sequence_statistics(delta, mask), share=args.share)
print(f"limits that {args.share:.1%} of these sequences pass: {options}")
if args.out:
    save_options(options, args.out)
if args.plot:
    plot_gaps({args.quantization or "bf16": (delta, mask)}, args.plot)
