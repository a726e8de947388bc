"""Probes of updates that are wrong, or that follow one which left something half."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from sglang_quads import client
from tests.sglang import updates
from tests.vllm import syncing

__all__ = ["FailedUpdates", "weights_of"]

LONG_PROMPT = "347+589=936;12-345=-333;70*8="


def weights_of(path: str) -> syncing.Tensors:
    """The tensors of a checkpoint folder."""
    return load_file(Path(path) / "model.safetensors")


class FailedUpdates:
    """Part of ``Probes``."""

    engine: Any
    files: updates.Files

    def bad_weights(self, first: str, second: str) -> dict[str, dict[str, Any]]:
        """One wrong tensor in an otherwise good update: the error, and the state afterwards."""
        good, old = weights_of(second), list(weights_of(first).items())
        layer = "model.layers.1.mlp.experts"
        name = f"{layer}.3.up_proj.weight"

        def filled(value: float) -> torch.Tensor:
            changed = good[name].clone()
            changed[1, 2] = value
            return changed

        wrong = {
            "nan": (name, filled(float("nan"))),
            "inf": (name, filled(float("inf"))),
            "shape": (name, torch.zeros(80, 256, dtype=torch.bfloat16)),
            "transposed": (name, good[name].t().contiguous()),
            "float64": (name, good[name].double()),
            "unknown expert": (name.replace(".3.", ".99."), good[name]),
            "stack": (f"{layer}.gate_up_proj", torch.ones(15, 128, 256, dtype=torch.bfloat16)),
            "unknown name": (f"{layer}.3.extra.weight", good[name]),
            "scales": (name.replace("up_proj.weight", "up_proj.weight_scale"), good[name]),
        }
        gate = name.replace("up_proj", "gate_proj")
        results = {}
        for case, item in wrong.items():
            results[case] = self.failing(
                lambda item=item: updates.tensors(self.engine, [item, (gate, good[gate])])
            )
        bad = {**good, name: filled(float("nan"))}
        results["nan on disk"] = self.failing(
            lambda: self.files.disk(self.engine, list(bad.items()))
        )
        one = f"{layer}.3."
        for case, left_out in (("half on disk", gate), ("missing on disk", one)):
            there = [item for item in good.items() if not item[0].startswith(left_out)]
            self.update(updates.tensors, old)
            results[case] = self.failing(lambda there=there: self.files.disk(self.engine, there))
        self.update(updates.tensors, old)
        results["direct"] = self.failing(
            lambda: updates.check(
                self.engine.update_weights_from_tensor(
                    [("model.norm.weight", good["model.norm.weight"])], load_format="direct"
                )
            )
        )
        results["flash_rl"] = self.failing(
            lambda: updates.check(
                self.engine.update_weights_from_disk(second, load_format="flash_rl")
            )
        )
        return results

    def wrong_names(self, second: str) -> dict[str, dict[str, Any]]:
        """Whole updates under names that a trainer's wrappers left, and single tensors."""
        good = weights_of(second)
        norm = good["model.norm.weight"]
        renamed = {
            "module": lambda name: f"module.{name}",
            "no model": lambda name: name.removeprefix("model."),
            "orig_mod": lambda name: name.replace(".mlp.", "._orig_mod.mlp."),
        }
        updates_of = {
            case: [(rename(name), tensor) for name, tensor in good.items()]
            for case, rename in renamed.items()
        }
        expert = good["model.layers.0.mlp.experts.0.gate_proj.weight"]
        single = {
            "norm": [("module.model.norm.weight", norm)],
            "bare norm": [("norm.weight", norm)],
            "wrapped norm": [("model.norm._orig_mod.weight", norm)],
            "beside a known one": [("module.norm.weight", norm), ("model.norm.weight", norm)],
            "rotary": [("model.layers.0.self_attn.rotary_emb.inv_freq", norm)],
            "kv scale": [("model.layers.0.self_attn.k_proj.k_scale", norm)],
            "draft layer": [("model.layers.4.mlp.experts.0.gate_proj.weight", expert)],
        }
        results = {}
        for case, items in {**updates_of, **single}.items():
            results[case] = self.failing(lambda items=items: updates.tensors(self.engine, items))
        for case in renamed:  # as one call
            items = updates_of[case]
            results[f"{case}, whole"] = self.failing(
                lambda items=items: updates.tensors(self.engine, items, bucket=len(items))
            )
        return results

    def failing(self, update: Any) -> dict[str, Any]:
        """The error of an update, and whether quantized weights are what they were."""
        before = self.fingerprints()
        try:
            update()
            error = ""
        except RuntimeError as raised:
            error = str(raised)
        after = self.fingerprints()
        changed = sorted(name for name in before if after[name] != before[name])
        client.end_sync(self.engine)
        return {"error": error, "changed": changed, "tokens": self.greedy()}

    def left_half(self, first: str, second: str) -> dict[str, Any]:
        """What follows half an expert of W2, in orders that would pair it with a half of W1."""
        w1, w2 = (weights_of(path) for path in (first, second))
        everything = syncing.as_they_are(w1)
        gate = "model.layers.1.mlp.experts.3.gate_proj.weight"
        half = [(gate, w2[gate])]
        results: dict[str, Any] = {}

        def given_up() -> None:
            updates.tensors(self.engine, half)
            updates.flush(self.engine)
            updates.tensors(self.engine, everything[::-1])

        def from_disk() -> None:
            updates.tensors(self.engine, half)
            self.files.disk(self.engine, everything[::-1])

        def from_disk_without_it() -> None:
            updates.tensors(self.engine, half)
            self.files.disk(self.engine, [item for item in everything if item[0] != gate])

        def of_a_failed_call() -> None:
            wrong = ("model.layers.1.mlp.experts.4.down_proj.weight", torch.zeros(3, 3))
            try:
                updates.tensors(self.engine, [*half, wrong])
            except RuntimeError:
                updates.tensors(self.engine, everything[::-1])

        def of_an_earlier_call() -> None:
            updates.tensors(self.engine, half)
            rest = [item for item in syncing.as_they_are(w2) if item[0] != gate]
            wrong = ("model.layers.1.mlp.experts.4.down_proj.weight", torch.zeros(3, 3))
            try:
                updates.tensors(self.engine, [wrong])
            except RuntimeError:
                updates.tensors(self.engine, rest)

        for case in (given_up, from_disk, from_disk_without_it, of_a_failed_call):
            self.update(updates.tensors, everything)
            results[case.__name__] = self.failing(case)
        self.update(updates.tensors, everything)
        results["of_an_earlier_call"] = self.failing(of_an_earlier_call)
        results["then"] = self.fingerprints()
        return results

    def unreadable(self) -> dict[str, Any]:
        """A request whose tensors cannot be unpacked."""
        ranks = self.engine.server_args.tp_size
        return self.failing(
            lambda: updates.check(
                self.engine.update_weights_from_tensor(
                    ["aaaa"] * ranks, load_format="flattened_bucket", flush_cache=False
                )
            )
        )

    def after_a_failure(self, first: str, second: str) -> dict[str, Any]:
        """What a prompt that was cached before a failed update gets, and after a flush."""
        bad = weights_of(second)
        name = "model.layers.1.mlp.experts.3.up_proj.weight"
        bad[name] = torch.full_like(bad[name], torch.nan)
        self.update(updates.tensors, syncing.as_they_are(weights_of(first)))
        self.cached()
        results = {"before": self.cached()}
        try:
            updates.tensors(self.engine, syncing.as_they_are(bad))
        except RuntimeError as error:
            results["error"] = str(error)
        results["after"] = self.cached()
        updates.flush(self.engine)
        results["flushed"] = self.cached()
        self.update(updates.tensors, syncing.as_they_are(weights_of(first)))
        return results

    def cached(self) -> tuple[float, int]:
        """Log-prob of the first token after a prompt, and how much of it was in the cache."""
        params = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}
        found = self.engine.generate(LONG_PROMPT, params, return_logprob=True)["meta_info"]
        return found["output_token_logprobs"][0][0], found["cached_tokens"]

    def names_inside_linears(self, second: str) -> dict[str, Any]:
        """Names that lie in a quantized linear layer, but are no tensor of its."""
        weight = weights_of(second)["model.layers.0.self_attn.q_proj.weight"]
        linear = "model.layers.0.self_attn.q_proj"
        names = ("base_layer.weight", "weight_orig", "weight.data", "Weight")
        return {
            name: self.failing(
                lambda name=name: updates.tensors(self.engine, [(f"{linear}.{name}", weight)])
            )
            for name in names
        }
