"""Overhead of QAT in a training step, at the layer shapes of Qwen3-30B-A3B.

    PYTHONPATH=common python benchmarks/bench_qat_step.py            # one GPU, about two minutes

Two tables. "quantizer": amax and fake quantization of a layer's expert stacks alone, in bytes per
second over the least traffic a two-pass quantizer can have (read, read, write), and as a share of
a device copy's bandwidth. "step": forward, backward and AdamW of a few decoder layers, in BF16 and
with QAT, with and without activation checkpointing (which quantizes twice), and with two
micro-batches under ``cached_quantization``. Times are medians; clocks are not locked. Results are
checked before anything is timed.
"""

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable

import torch
import transformers
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from quads_common import fake_quantize
from quads_common.qat import cached_quantization, prepare_qat, unprepare
from quads_common.qat.ops import effective_weight, matrix_amax

SHAPES = {
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
QUICK_SHAPES = {
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
VOCABULARY = 1024
SEQUENCE = 1024  # tokens of one row


def median_ms(run: Callable[[], object], device: str, repeats: int) -> float:
    """Median duration of ``run`` in milliseconds, after two runs to warm up."""
    times = []
    for _ in range(repeats + 2):
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            begin = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[2:])


def build(args: argparse.Namespace) -> nn.Module:
    """A BF16 model of ``args.layers`` decoder layers."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **(QUICK_SHAPES if args.quick else SHAPES),
        vocab_size=VOCABULARY,
        num_hidden_layers=args.layers,
        max_position_embeddings=SEQUENCE,
        tie_word_embeddings=False,
    )
    with torch.device(args.device):
        torch.set_default_dtype(torch.bfloat16)
        model = Qwen3MoeForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    return model.train()


def check(model: nn.Module, batch: torch.Tensor) -> None:
    """Raise unless the kernels give the reference's bits and the model uses them."""
    experts = model.model.layers[0].mlp.experts
    for stack in (experts.gate_up_proj.detach(), experts.down_proj.detach()):
        if not torch.equal(effective_weight(stack, matrix_amax(stack)), fake_quantize(stack)):
            raise AssertionError("the quantizer's kernels differ from the reference")
    with torch.no_grad():
        plain = model(input_ids=batch, use_cache=False).logits
        quantized = prepare_qat(model)(input_ids=batch, use_cache=False).logits
    unprepare(model)
    if torch.equal(plain, quantized) or not quantized.isfinite().all():
        raise AssertionError("QAT does not change the forward, or breaks it")


def bench_quantizer(model: nn.Module, args: argparse.Namespace) -> None:
    """Print the table of the quantizer alone, for BF16 weights and for FP32 masters."""
    experts = model.model.layers[0].mlp.experts
    stacks = [experts.gate_up_proj.detach(), experts.down_proj.detach()]
    elements = sum(stack.numel() for stack in stacks)
    source = torch.empty(elements, dtype=torch.bfloat16, device=args.device)
    target = torch.empty_like(source)
    copy_ms = median_ms(lambda: target.copy_(source), args.device, args.repeats)
    peak = 2 * 2 * elements / copy_ms / 1e6
    print(f"\nquantizer, one layer, {elements / 1e6:.0f} M weights; copy: {peak:.0f} GB/s")
    print(f"{'weights':<8} {'pass':<14} {'ms':>8} {'GB/s':>7} {'of copy':>8}")
    for dtype in (torch.bfloat16, torch.float32):
        weights = [stack.to(dtype) for stack in stacks]
        maxima = [matrix_amax(weight) for weight in weights]
        read, write = dtype.itemsize * elements, 2 * elements

        def amax(weights: list = weights) -> None:
            for weight in weights:
                matrix_amax(weight)

        def fake(weights: list = weights, maxima: list = maxima) -> None:
            for weight, maximum in zip(weights, maxima, strict=True):
                effective_weight(weight, maximum, dtype=torch.bfloat16)

        def both(amax: Callable = amax, fake: Callable = fake) -> None:
            amax()
            fake()

        name = str(dtype).removeprefix("torch.")
        for what, run, moved in (
            ("amax", amax, read),
            ("fake quantize", fake, read + write),
            ("both", both, 2 * read + write),
        ):
            ms = median_ms(run, args.device, args.repeats)
            rate = moved / ms / 1e6
            print(f"{name:<8} {what:<14} {ms:8.3f} {rate:7.0f} {rate / peak:8.1%}")


def step_ms(
    model: nn.Module, batches: list[torch.Tensor], args: argparse.Namespace, cached: bool
) -> float:
    """Milliseconds of one optimizer step over the micro-batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=args.device == "cuda")

    def run() -> None:
        with cached_quantization(model) if cached else contextlib.nullcontext():
            for batch in batches:
                model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return median_ms(run, args.device, args.repeats)


def bench_steps(model: nn.Module, args: argparse.Namespace) -> None:
    """Print the table of training steps."""
    print(f"\nstep, {args.layers} layers; forward, backward, AdamW")
    names = f"{'BF16 ms':>8} {'QAT':>14} {'cached':>14}"
    print(f"{'tokens':>7} {'micro':>5} {'checkpointing':<13} {names}")
    for tokens in args.tokens:
        for micro, checkpointing in ((1, False), (1, True), (2, True)):
            if checkpointing:
                model.gradient_checkpointing_enable()
            else:
                model.gradient_checkpointing_disable()
            rows = torch.randint(
                0, VOCABULARY, (micro, max(1, tokens // SEQUENCE), min(SEQUENCE, tokens))
            )
            batches = list(rows.to(args.device))
            plain = step_ms(model, batches, args, cached=False)
            prepare_qat(model)
            quantized = [step_ms(model, batches, args, cached=cached) for cached in (False, True)]
            unprepare(model)
            cells = " ".join(f"{ms:7.1f} {ms / plain - 1:+6.1%}" for ms in quantized)
            kind = "yes" if checkpointing else "no"
            print(f"{tokens:>7} {micro:>5} {kind:<13} {plain:8.1f} {cells}", flush=True)


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384, 32768])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="tiny shapes: only that it runs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    """Check, then print both tables."""
    args = parse_args()
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}, bfloat16")
    model = build(args)
    check(model, torch.arange(256, device=args.device).view(1, 256))
    print(f"checked; experts implementation: {model.config._experts_implementation}")
    bench_quantizer(model, args)
    bench_steps(model, args)


if __name__ == "__main__":
    main()
