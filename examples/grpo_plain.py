"""GRPO with NVFP4 rollouts in plain PyTorch and vLLM: the whole method in one loop.

    python examples/grpo_plain.py                              # CPU, a minute or two
    python examples/grpo_plain.py --sleep --graphs             # GPU: CUDA graphs and sleep level 2

1. The engine quantizes with ``quads_nvfp4``. 2. The trainer computes with the same NVFP4 weights
(QAT). 3. After every sync, fingerprints of all quantized weights are equal. 4. Sequences whose
log-probs drifted too far are left out, the rest are corrected by truncated importance sampling.
"""

import argparse
import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine in this process

import torch
from arithmetic import MODEL, draw_problems, forgetful_model, reward
from phases import Phases
from torch.nn.utils.rnn import pad_sequence
from vllm import LLM, SamplingParams

from quads_common.mismatch import FilterOptions, gap_report, select_sequences, sequence_statistics
from quads_common.qat import prepare_qat
from quads_trainers.sync_check import check_in_sync

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default=str(MODEL))
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--prompts", type=int, default=16, help="a step")
parser.add_argument("--group", type=int, default=8, help="completions for each prompt")
parser.add_argument("--lr", type=float, default=3e-5)
parser.add_argument("--forget", type=float, default=0.3, help="noise on the weights at the start")
parser.add_argument("--act", choices=("nvfp4", "bf16"), default="nvfp4", help="W4A4 or W4A16")
parser.add_argument("--method", default="nvfp4", help="compensation preset of the engine")
parser.add_argument("--graphs", action="store_true", help="compile, and capture CUDA graphs")
parser.add_argument("--sleep", action="store_true", help="free the engine's memory while training")
parser.add_argument("--memory", type=float, default=0.2, help="vLLM's share of the memory")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
# Answers have five tokens, so that one token decides the mean: a higher limit than the default.
limits = FilterOptions(k3=0.1)
quads, phases = {"method": args.method, "act": args.act}, Phases()
llm = LLM(
    args.model,
    quantization="quads_nvfp4",
    additional_config={"quads": quads},
    dtype="bfloat16",
    enforce_eager=not args.graphs,
    enable_sleep_mode=args.sleep,
    gpu_memory_utilization=args.memory,
    max_model_len=256,
    max_num_seqs=args.prompts * args.group,
    seed=0,
)
if args.sleep:
    llm.sleep(level=2)
sampling = SamplingParams(n=args.group, temperature=1.0, max_tokens=8, logprobs=0)
model = forgetful_model(args.model, args.forget).to(device)
prepare_qat(model, quads)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)


def logprobs(ids: torch.Tensor, prompt: int) -> torch.Tensor:
    """Log-probs [B, T] of the response tokens, those from position ``prompt`` on."""
    with torch.autocast(device, torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits[:, prompt - 1 : -1]
    return logits.float().log_softmax(-1).gather(-1, ids[:, prompt:, None]).squeeze(-1)


def padded(rows: list[list[float]]) -> torch.Tensor:
    """Rows of different lengths as one tensor, zeros behind."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(device)


for step in range(args.steps):
    with phases("sync"):
        if args.sleep:
            llm.wake_up(tags=["weights"])
        weights = [(name, p.detach().bfloat16()) for name, p in model.named_parameters()]
        llm.apply_model(lambda engine, weights=weights: bool(engine.load_weights(weights)))
        llm.reset_prefix_cache()
    with phases("check"):
        equal = check_in_sync(model, llm)
    with phases("generate"):
        if args.sleep:
            llm.wake_up(tags=["kv_cache"])
        problems = draw_problems(args.prompts, seed=step)
        outputs = llm.generate([prompt for prompt, _ in problems], sampling, use_tqdm=False)
        if args.sleep:
            llm.sleep(level=2)
    with phases("log-probs"):
        prompt = len(outputs[0].prompt_token_ids)  # the same for all: operands of three digits
        pairs = [(o, s) for o in outputs for s in o.outputs]
        ids = padded([[*o.prompt_token_ids, *s.token_ids] for o, s in pairs])
        mask = padded([[1.0] * len(s.token_ids) for _, s in pairs])
        sampled = [zip(s.logprobs, s.token_ids, strict=True) for _, s in pairs]
        rollout = padded([[at[i].logprob for at, i in tokens] for tokens in sampled])
        with torch.no_grad():
            delta = logprobs(ids, prompt) - rollout
    with phases("update"):
        answers = [answer for _, answer in problems for _ in range(args.group)]
        rewards = padded([[reward(s.text, a) for (_, s), a in zip(pairs, answers, strict=True)]])
        # Advantages over all samples first, then the filter, then the mean over what remains.
        grouped = rewards.view(-1, args.group)
        advantages = (grouped - grouped.mean(1, True)) / (grouped.std(1, keepdim=True) + 1e-4)
        groups = torch.arange(len(pairs), device=device) // args.group
        statistics = sequence_statistics(delta, mask)
        keep = select_sequences(statistics, limits, groups=groups).keep[:, None]
        weight = delta.exp().clamp(max=2.0) * mask * keep  # truncated importance sampling
        current = logprobs(ids, prompt)
        ratio = (current - current.detach()).exp()  # one update a batch: the old policy is this one
        loss = -(ratio * advantages.view(-1, 1) * weight).sum() / (mask * keep).sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    gap = gap_report(delta, mask)
    print(
        f"step {step:3d}  reward {rewards.mean():.3f}  loss {loss.item():+.4f}  {equal} tensors "
        f"equal  gap mean {gap.mean:.4f} max {gap.max:.3f}  dropped {int((~keep).sum())}",
        flush=True,
    )
print(f"\n{phases}")
