"""transformers forwards with a selection file's lists: what presets are held against.

Operands are those of ``quads_common`` (as the quantizer is for plain W4A4); products, rounding
points and the order of summation are written here.
"""

from pathlib import Path

import torch
from torch.nn import functional as F

from quads_common.compensation import InputCompensation, read_selection_file
from quads_common.compensation.operands import Operands, compensated_operands, gather_columns
from quads_common.packing import unscaled_values
from quads_common.quantize import quantize
from tests.checkpoints import ARITH_MOE
from tests.sglang.compensated import (
    SCORED,
    VLLM_FILES,
    first_seen,
    heldout,
    vllm_logprobs,
)
from tests.vllm import reference
from tests.vllm.reference import Matmul
from tests.vllm.test_served_numerics import differences


class Weight:
    """What a layer multiplies with: decoded values, global scale; BF16 columns if wanted."""

    def __init__(self, weight: torch.Tensor, lists: InputCompensation, group: int, **how) -> None:
        bf16_columns = how.pop("bf16_columns")
        q = quantize(weight, **how)
        self.values = unscaled_values(q.packed, q.block_scale)
        self.scale = q.global_scale
        channels = lists.channels
        wanted = bf16_columns and channels is not None
        self.columns = gather_columns(weight, channels[group]) if wanted else None

    def product(self, o: Operands, matmul: Matmul) -> torch.Tensor:
        """float32 [M, N]."""
        acc = matmul(o.quantized, self.values.T)
        if o.residual is not None:
            acc = acc + matmul(o.residual, self.values.T)
        if o.hot is None or o.channels is None:
            return acc * (o.row_scale * self.scale)
        if self.columns is not None:
            hot = matmul(o.hot, self.columns.float().T)
            return acc * (o.row_scale * self.scale) + hot
        hot = matmul(o.hot, self.values[:, o.channels.clamp(min=0)].T)
        return self.scale * (o.row_scale * acc + hot)


class Lists:
    """A selection file's lists by site."""

    def __init__(self, path: Path) -> None:
        saved = read_selection_file(path)
        self.tensors, self.sites = saved.tensors, saved.sites
        self.rac = saved.options["rac_ratio"] > 0
        self.bf16_columns = saved.options["splice_weight"] == "bf16"

    def of(self, site: str) -> InputCompensation:
        """All lists of a site."""
        blocks = self.tensors[f"{site}/selection_blocks"]
        channels = self.tensors[f"{site}/selection_channels"]
        width = self.sites[site]["full_width"] // 16
        mask = (blocks.unsqueeze(2) == torch.arange(width)).any(dim=1)
        return InputCompensation(
            mask if self.rac else None, channels if channels.shape[1] else None, None
        )


def use_compensation(model: torch.nn.Module, path: Path, matmul: Matmul) -> None:
    """Replace what the file has lists for by W4A4 with them."""
    lists = Lists(path)
    for i, experts in enumerate(reference.experts_of(model)):
        replace_experts(experts, f"model.layers.{i}.mlp.experts", lists, matmul)
    for i, layer in enumerate(model.model.layers):
        attention, prefix = layer.self_attn, f"model.layers.{i}.self_attn"
        if f"{prefix}.qkv_proj" in lists.sites:
            qkv = [getattr(attention, f"{n}_proj") for n in "qkv"]
            replace_linears(qkv, lists.of(f"{prefix}.qkv_proj"), lists.bf16_columns, matmul)
            output = lists.of(f"{prefix}.o_proj")
            replace_linears([attention.o_proj], output, lists.bf16_columns, matmul)


def replace_linears(linears, given: InputCompensation, bf16_columns: bool, matmul: Matmul) -> None:
    """Linears that share one input and one global scale."""
    amax = torch.stack([linear.weight.abs().amax() for linear in linears]).amax().float()
    for linear in linears:
        weight = Weight(linear.weight.data, given, 0, amax=amax, bf16_columns=bf16_columns)

        def forward(x, weight=weight):
            o = compensated_operands(x.reshape(-1, x.shape[-1]), given)
            return weight.product(o, matmul).to(x.dtype).reshape(*x.shape[:-1], -1)

        linear.forward = forward


def replace_experts(experts: torch.nn.Module, name: str, lists: Lists, matmul: Matmul) -> None:
    """W4A4 experts with the lists of w13's and w2's inputs."""
    first, second = lists.of(f"{name}.w13"), lists.of(f"{name}.w2")
    how = {"bf16_columns": lists.bf16_columns}
    w13 = [Weight(w, first, 0, **how) for w in experts.gate_up_proj.data]
    w2 = [Weight(w, second, e, **how) for e, w in enumerate(experts.down_proj.data)]

    def forward(x, ids, weights):
        operands = compensated_operands(x, first)
        out = torch.zeros((*ids.shape, x.shape[1]), dtype=torch.float32)
        for expert in ids.unique().tolist():
            token, slot = torch.where(ids == expert)
            y = w13[expert].product(operands.rows(token), matmul).to(x.dtype)
            gate, up = y.float().chunk(2, dim=-1)
            hidden = (F.silu(gate) * up).to(x.dtype)
            y = w2[expert].product(compensated_operands(hidden, second, expert), matmul)
            out[token, slot] = y * weights[token, slot].float().unsqueeze(1)
        total = out[:, 0]
        for slot in range(1, ids.shape[1]):
            total = total + out[:, slot]
        return total.to(x.dtype)

    experts.forward = forward


def logprobs_of(preset: str, batch: list[list[int]], reordered: bool) -> list[torch.Tensor]:
    """transformers' log-probs with a preset, in one or another legal order of summation."""
    attention, matmul = "sdpa", reference.plain_matmul
    if reordered:
        attention, matmul = "eager", reference.split_matmul
    model = reference.load(ARITH_MOE, torch.bfloat16, attention=attention)
    if reordered:
        reference.reorder_linears(model)
    if preset == "nvfp4":
        reference.use_w4a4(model, matmul)
    else:
        use_compensation(model, VLLM_FILES / f"{preset}.safetensors", matmul)
    return reference.logprobs(model, batch)


def check_logprobs(preset: str, ours: list[torch.Tensor]) -> None:
    """An engine's log-probs on arith-moe with vLLM's lists, against transformers and vLLM.

    Each beginning of a sequence counts once (``first_seen``).

    Raises:
        AssertionError: further away, in the mean or the 99th percentile, than 1.5 times what
            another legal order of summation makes; or no further from plain W4A4 of vLLM.
    """
    batch = heldout()[SCORED]
    new = first_seen(batch)
    expected = logprobs_of(preset, batch, reordered=False)
    noise = differences(expected, logprobs_of(preset, batch, reordered=True))[new]
    for what, theirs in (("transformers", expected), ("vLLM", vllm_logprobs(preset))):
        gap = differences(ours, theirs)[new]
        for measure, of in (("mean", torch.mean), ("p99", lambda d: d.quantile(0.99))):
            found, floor = of(gap).item(), of(noise).item()
            print(f"{preset}: {what} {measure} {found:.4f} floor {floor:.4f} {found / floor:.2f}")
            assert found <= 1.5 * floor, f"{what}: {measure} {found} of {floor}"
    if preset != "nvfp4":
        plain = differences(ours, vllm_logprobs("nvfp4"))[new].mean()
        print(f"{preset}: plain W4A4 of vLLM {plain / noise.mean():.2f}")
        assert plain > 1.5 * noise.mean(), f"compensation is not seen: {plain=} {noise.mean()=}"


def check_lists(preset: str, lists: dict) -> None:
    """An engine's lists on one rank are those of vLLM's file."""
    saved = read_selection_file(VLLM_FILES / f"{preset}.safetensors")
    assert lists.keys() == saved.sites.keys()
    for site, found in lists.items():
        for name in ("blocks", "channels"):
            assert found[name] == saved.tensors[f"{site}/selection_{name}"].tolist(), site
