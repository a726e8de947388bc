"""Train arith-moe, a small Qwen3-MoE that adds and subtracts, and check the saved checkpoint.

    python train.py --out checkpoint            # under a minute on one H200
    python train.py --out /tmp/smoke --smoke    # under a minute on a CPU; learns nothing yet

The same seed gives the same run (up to CUDA kernels without a deterministic form, of which torch
warns). The exit status is 1 if the reloaded BF16 checkpoint is under 95 % on held-out problems.
"""

import argparse
import math
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from arith_model import PAD_ID, build_config, build_trainable, save_checkpoint, zero_hot_columns
from batches import TrainingRows, encode
from evaluate import EVAL_SEED, report_accuracy
from problems import GROUP_SHARES, heldout
from torch import Tensor, nn
from transformers import Qwen3MoeForCausalLM

REQUIRED_ACCURACY = 0.95
HELDOUT_COUNT = 2000
BALANCE_WEIGHT = 0.01
WEIGHT_DECAY = 0.05
PROJECTION_AFTER_SECONDS = 30  # by then start-up no longer distorts the projection
SMOKE = {"steps": 30, "batch": 64, "max_digits": 2, "warmup": 10}


@dataclass
class MoeTap:
    """Keeps what each MoE block saw in the latest forward: its input and its routing."""

    inputs: list[Tensor] = field(default_factory=list)
    router_logits: list[Tensor] = field(default_factory=list)
    chosen: list[Tensor] = field(default_factory=list)

    def attach(self, model: Qwen3MoeForCausalLM) -> None:
        """Start to listen to the model; each forward replaces what the last one left."""
        model.register_forward_pre_hook(lambda *_: self._clear())
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(self._record)

    def _clear(self) -> None:
        for kept in (self.inputs, self.router_logits, self.chosen):
            kept.clear()

    def _record(self, _: nn.Module, args: tuple[Tensor], output: tuple[Tensor, ...]) -> None:
        self.inputs.append(args[0])
        self.router_logits.append(output[0])
        self.chosen.append(output[2])

    def expert_counts(self, real: Tensor) -> Tensor:
        """Return how many of the real tokens each expert got: [layers, experts]."""
        experts = self.router_logits[0].shape[-1]
        return torch.stack(
            [(F.one_hot(c, experts).sum(1) * real.view(-1, 1)).sum(0) for c in self.chosen]
        )

    def balance_loss(self, real: Tensor) -> Tensor:
        """Return the Switch load-balancing loss, averaged over layers; 1 is perfect balance."""
        counts = self.expert_counts(real).float()
        share = counts / counts.sum(1, keepdim=True)
        probability = torch.stack(
            [
                (logits.float().softmax(-1) * real.view(-1, 1)).sum(0) / real.sum()
                for logits in self.router_logits
            ]
        )
        return share.shape[1] * (share * probability).sum(1).mean()


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Return the rate of a step: linear warmup, then a cosine to zero."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    done = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * 0.5 * (1 + math.cos(math.pi * done))


def build_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Return fused AdamW that decays matrices but not norm gains."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    gains = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups, lr=lr, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY, fused=True
    )


def forward(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return FP32 logits of a forward under BF16 autocast.

    Rows are right padded, so the causal mask alone keeps padding out of every real token.
    """
    with torch.autocast(inputs.device.type, dtype=torch.bfloat16):
        return model(input_ids=inputs, use_cache=False).logits.float()


@torch.no_grad()
def teacher_forced_accuracy(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """Return the share of rows whose every answer token is the argmax, as in greedy decoding."""
    right = forward(model, inputs).argmax(-1) == labels
    return (right | (labels == PAD_ID)).all(1).float().mean().item()


def stop_if_too_slow(step: int, started: float, args: argparse.Namespace) -> None:
    """Exit at once if the fixed number of steps cannot end within the time budget."""
    elapsed = time.monotonic() - started
    projected = elapsed / step * args.steps / 60
    if elapsed > PROJECTION_AFTER_SECONDS and projected > args.minutes:
        sys.exit(
            f"train.py: {args.steps} steps would take {projected:.1f} minutes, more than "
            f"--minutes {args.minutes:g}; lower --steps or raise --minutes"
        )


def train(
    model: Qwen3MoeForCausalLM,
    rows: TrainingRows,
    test: tuple[Tensor, Tensor],
    args: argparse.Namespace,
) -> MoeTap:
    """Train the model in place and return the tap attached to it."""
    tap = MoeTap()
    tap.attach(model)
    optimizer = build_optimizer(model, args.lr)
    started = shown = time.monotonic()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        inputs, labels = rows.draw(args.batch)
        logits = forward(model, inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD_ID)
        balance = tap.balance_loss(inputs != PAD_ID)
        (loss + BALANCE_WEIGHT * balance).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        zero_hot_columns(model)
        if time.monotonic() - shown > args.report_seconds or step + 1 == args.steps:
            values = f"loss {loss.item():.4f}  balance {balance.item():.3f}"
            accuracy = teacher_forced_accuracy(model, *test)
            shown = time.monotonic()
            print(
                f"{shown - started:6.1f} s  step {step + 1:6d}  {values}  heldout {accuracy:.2%}",
                flush=True,
            )
            stop_if_too_slow(step + 1, started, args)
    return tap


@torch.no_grad()
def report_layers(model: Qwen3MoeForCausalLM, tap: MoeTap, inputs: Tensor) -> None:
    """Print each layer's expert load, and the RMS of hot and other channels after the norm."""
    forward(model, inputs)
    real = inputs != PAD_ID
    for layer, (counts, values, hot) in enumerate(
        zip(
            tap.expert_counts(real).tolist(),
            tap.inputs,
            model.config.arith_moe["hot_channels"],
            strict=True,
        )
    ):
        power = values[real.flatten()].float().square().mean(0)
        is_hot = torch.zeros_like(power, dtype=torch.bool)
        is_hot[hot] = True
        rms = [power[channels].mean().sqrt().item() for channels in (is_hot, ~is_hot)]
        print(f"layer {layer}: RMS after norm: hot {rms[0]:.3f}, other {rms[1]:.3f}")
        print(f"  tokens per expert: {counts}, least {min(counts) / max(sum(counts), 1):.2%}")


def parse_args() -> argparse.Namespace:
    """Parse the command line; --smoke replaces the size options by tiny ones."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--warmup", type=int, default=150, help="steps of linear warmup")
    parser.add_argument("--minutes", type=float, default=8, help="training time budget")
    parser.add_argument("--report-seconds", type=float, default=5)
    parser.add_argument("--hot-channels", type=int, default=16, help="per layer")
    parser.add_argument("--max-digits", type=int, choices=(2, 3), default=3)
    parser.add_argument("--smoke", action="store_true", help="a few tiny steps, no accuracy bar")
    args = parser.parse_args()
    if args.smoke:
        vars(args).update(SMOKE)
    return args


def main() -> int:
    """Train, save, reload and evaluate; return the exit status."""
    args = parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is then deterministic
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it only costs time here
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shares = {group: s for group, s in GROUP_SHARES.items() if max(group) <= args.max_digits}
    problems = heldout(HELDOUT_COUNT if args.max_digits > 2 else 400, EVAL_SEED, shares)
    rows = TrainingRows(shares, device, args.seed)
    model = build_trainable(build_config(args.hot_channels, args.seed)).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters} parameters, {len(rows)} training problems, on {device}", flush=True)
    inputs, labels = (part.long().to(device) for part in encode(problems))
    tap = train(model, rows, (inputs, labels), args)
    report_layers(model, tap, inputs)
    save_checkpoint(model, args.out)
    accuracy = report_accuracy(args.out, problems, device)
    if args.smoke or accuracy >= REQUIRED_ACCURACY:
        return 0
    print(f"train.py: accuracy is below {REQUIRED_ACCURACY:.0%}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
