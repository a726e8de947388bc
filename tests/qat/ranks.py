"""What two ranks do, each in a process of its own; their results go to files for the tests."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from quads_common.qat import check_finite, fake_quantize_experts, fingerprints, prepare_qat
from quads_common.qat.weight import prepared_weights
from tests.qat import tiny_models

WORLD = 2
STEPS = 2
MICRO_BATCHES = 2
TIMEOUT = timedelta(seconds=120)
EXPERTS, ROWS, HIDDEN, INNER = 4, 64, 32, 64


def run(folder: Path) -> list[dict[str, Any]]:
    """Run ``work`` on WORLD ranks and return what each found."""
    torch.multiprocessing.spawn(work, (str(folder),), nprocs=WORLD)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(WORLD)]


def work(rank: int, folder: str) -> None:
    """Entry of each rank."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/rendezvous", rank=rank, world_size=WORLD, timeout=TIMEOUT
    )
    results = {
        "fsdp-moe": train(shard(prepare_qat(tiny_models.moe(torch.float32)))),
        "fsdp-dense-mixed": train(
            shard(prepare_qat(tiny_models.dense(torch.float32)), param_dtype=torch.bfloat16)
        ),
        "fsdp-prepared-after": train(prepare_qat(shard(tiny_models.moe(torch.bfloat16)))),
        "split-group": split_group_error(),
        "finite": finite_error(rank),
        "tensor-parallel": tensor_parallel_experts(rank),
        "expert-parallel": expert_parallel_experts(rank),
    }
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()


def shard(model: nn.Module, **policy: Any) -> nn.Module:
    """Shard each layer, and what is left, with activation checkpointing."""
    model.gradient_checkpointing_enable()
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(**policy))
    return fully_shard(model, mp_policy=MixedPrecisionPolicy(**policy))


def train(model: nn.Module) -> dict[str, Any]:
    """Take STEPS optimizer steps; record state, effective weights and fingerprints of each."""
    model.train()
    effective: dict[str, torch.Tensor] = {}
    for weight in prepared_weights(model):

        def record(*_: Any, weight: Any = weight) -> None:
            effective[weight.parameter_name] = weight.effective().detach().clone()

        weight.owner.register_forward_hook(record)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = []
    for step in range(STEPS):
        before = full(model.state_dict())
        for micro in range(MICRO_BATCHES):
            batch = tiny_models.tokens(seed=STEPS * step + micro)
            model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        gradients = full({name: p.grad for name, p in model.named_parameters()})
        steps.append(
            {
                "state": before,
                "effective": dict(effective),
                "gradients": gradients,
                "fingerprints": fingerprints(model),
            }
        )
        optimizer.step()
        optimizer.zero_grad()
    return {"steps": steps, "keys": list(model.state_dict())}


def full(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Unsharded copies."""
    return {
        name: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()
        for name, t in tensors.items()
    }


def split_group_error() -> str:
    """The message when q, k and v are gathered apart from each other."""
    model = prepare_qat(tiny_models.dense())
    fully_shard(model.model.layers[0].self_attn.k_proj)
    fully_shard(model)
    try:
        model(input_ids=tiny_models.tokens(), use_cache=False)
    except NotImplementedError as error:
        return str(error)
    return ""


def finite_error(rank: int) -> str:
    """The message on each rank when rank 1's shard of one stack holds NaN; no forward is run."""
    model = shard(prepare_qat(tiny_models.moe()))
    check_finite(model)
    if rank == 1:
        with torch.no_grad():
            model.model.layers[1].mlp.experts.down_proj.to_local()[2, 3, 4] = float("nan")
    try:
        check_finite(model)
    except ValueError as error:
        return str(error)
    return ""


def expert_weights() -> tuple[torch.Tensor, torch.Tensor]:
    """w13 [E, 2I, H] and w2 [E, H, I]; each expert's largest value lies in the last rank's part."""
    generator = torch.Generator().manual_seed(3)
    w13 = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator)
    w2 = torch.randn(EXPERTS, HIDDEN, INNER, generator=generator)
    for expert in range(EXPERTS):
        # So large that other blocks lose bits of their scales, and only under the right amax.
        w13[expert, -1, 3] = 2.0e5 * (1 + expert)
        w2[expert, 5, -2] = 3.0e5 * (1 + expert)
    return w13, w2


def gradient_of(w13: torch.Tensor, w2: torch.Tensor, **options: Any) -> dict[str, torch.Tensor]:
    """Effective weights, and the gradients of their sum of squares."""
    w13, w2 = w13.clone().requires_grad_(), w2.clone().requires_grad_()
    first, second = fake_quantize_experts(w13, w2, **options)
    (first.square().sum() + second.square().sum()).backward()
    return {"w13": first.detach(), "w2": second.detach(), "d13": w13.grad, "d2": w2.grad}


def tensor_parallel_experts(rank: int) -> dict[str, dict[str, torch.Tensor]]:
    """Each rank has half of every expert: rows of gate and of up, columns of w2."""
    w13, w2 = expert_weights()
    gate, up = (half.chunk(WORLD, dim=1)[rank] for half in w13.chunk(2, dim=1))
    part13, part2 = torch.cat([gate, up], dim=1), w2.chunk(WORLD, dim=2)[rank].contiguous()

    def largest(amax: torch.Tensor) -> None:
        dist.all_reduce(amax, dist.ReduceOp.MAX)

    def largest_copy(amax: torch.Tensor) -> torch.Tensor:
        reduced = amax.clone()
        largest(reduced)
        return reduced

    return {
        "in place": gradient_of(part13, part2, amax_hook=largest),
        "returned": gradient_of(part13, part2, amax_hook=largest_copy),
        "no hook": gradient_of(part13, part2),
    }


def expert_parallel_experts(rank: int) -> dict[str, torch.Tensor]:
    """Each rank has half of the experts, whole."""
    w13, w2 = (w.chunk(WORLD)[rank] for w in expert_weights())
    return gradient_of(w13, w2)
