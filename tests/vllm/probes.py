"""What the tests ask of a running engine; executed inside the engine's own process.

``python -m tests.vllm.probes SPEC.json OUT.pt`` starts one engine, runs the probes of the
specification in order and saves their results by name. One engine answers many tests.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch


def stored_units(worker: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Worker function: every quantized unit of this rank by name, copied."""
    found = {}
    for module in worker.model_runner.get_model().modules():
        for units in getattr(module, "quads_units", ()):
            for index in range(units.count):
                q = units.quantized(index)
                found[f"{units.name}[{index}]"] = {
                    "packed": q.packed.clone(),
                    "block_scale": q.block_scale.view(torch.uint8).clone(),
                    "global_scale": q.global_scale.clone(),
                }
    return found


def expert_ids(worker: Any) -> dict[str, list[int]]:
    """Worker function: global ids of this rank's experts, per MoE layer, by local index."""
    found = {}
    for module in worker.model_runner.get_model().modules():
        if hasattr(module, "expert_map_manager") and hasattr(module, "quads_units"):
            mapping = module.expert_map
            count = module.global_num_experts
            ids = (
                range(count)
                if mapping is None
                else torch.argsort(mapping)[-module.local_num_experts :]
            )
            found[module.quant_method.prefix] = [int(i) for i in ids]
    return found


def load_raw(worker: Any, path: str) -> None:
    """Worker function: raw ``load_weights``, one tensor per call, in reverse, nothing after it."""
    from safetensors.torch import load_file

    model = worker.model_runner.get_model()
    for item in reversed(load_file(Path(path) / "model.safetensors").items()):
        model.load_weights([item])


class Probes:
    """The probes, by name; ``llm`` is the engine."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def report(self) -> Any:
        """The plugin's own report, per worker."""
        return self.llm.collective_rpc("quads_report")

    def units(self) -> Any:
        """Stored bytes per worker."""
        return self.llm.collective_rpc(stored_units)

    def experts(self) -> Any:
        """Expert placement per worker."""
        return self.llm.collective_rpc(expert_ids)

    def fingerprints(self) -> Any:
        """Partial fingerprints per worker."""
        return self.llm.collective_rpc("quads_fingerprints")

    def logprobs(self, sequences: list[list[int]]) -> list[torch.Tensor]:
        """Log-prob of every token of each sequence but the first, given those before it."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        prompts = [{"prompt_token_ids": ids} for ids in sequences]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [
            torch.tensor(
                [
                    entry[token].logprob
                    for entry, token in zip(o.prompt_logprobs[1:], ids[1:], strict=True)
                ]
            )
            for o, ids in zip(outputs, sequences, strict=True)
        ]

    def answers(self, prompts: list[str]) -> list[str]:
        """Greedy completions."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=8)
        return [o.outputs[0].text for o in self.llm.generate(prompts, params, use_tqdm=False)]

    def reload(self, path: str) -> None:
        """New weights from disk, through vLLM's own reload."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": path})

    def error_of_reload(self, path: str) -> str:
        """What a reload from disk raises, as text."""
        try:
            self.reload(path)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def reload_and_print(self, path: str) -> Any:
        """Partial fingerprints after a reload from disk, then after raw loads of the same."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
        first = self.fingerprints()
        self.llm.collective_rpc(load_raw, args=(path,))
        return [first, self.fingerprints()]

    def moe_calls(self, sequences: list[list[int]]) -> list[dict[str, Any]]:
        """Inputs, routing, quantized activations and outputs of each MoE layer for one batch.

        In-process engines only: wraps what the engine calls, changes nothing.
        """
        from quads_common import gemm
        from vllm_quads.fused_moe import QuadsMoEMethod

        calls: list[dict[str, Any]] = []
        quantized: list[dict[str, torch.Tensor]] = []
        plain_apply, plain_quantize = QuadsMoEMethod.apply, gemm.quantize

        def recording_quantize(x: torch.Tensor, **kwargs: Any) -> Any:
            q = plain_quantize(x, **kwargs)
            quantized.append(
                {
                    "x": x.clone(),
                    "packed": q.packed,
                    "block_scale": q.block_scale.view(torch.uint8),
                    "global_scale": q.global_scale,
                }
            )
            return q

        def recording_apply(
            method: Any, layer: Any, x: Any, topk_weights: Any, topk_ids: Any, *a: Any, **k: Any
        ) -> Any:
            quantized.clear()
            out = plain_apply(method, layer, x, topk_weights, topk_ids, *a, **k)
            calls.append(
                {
                    "layer": method.prefix,
                    "x": x.clone(),
                    "topk_weights": topk_weights.clone(),
                    "topk_ids": topk_ids.clone(),
                    "out": out.clone(),
                    "quantized": list(quantized),
                }
            )
            return out

        QuadsMoEMethod.apply, gemm.quantize = recording_apply, recording_quantize
        try:
            results = self.routed(sequences)
        finally:
            QuadsMoEMethod.apply, gemm.quantize = plain_apply, plain_quantize
        return [{"calls": calls, "routed": results}]

    def routed(self, sequences: list[list[int]]) -> list[Any]:
        """Expert ids that the engine returns for the prompt's tokens, if it was asked to."""
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": ids} for ids in sequences]
        outputs = self.llm.generate(
            prompts, SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False
        )
        return [o.outputs[0].routed_experts for o in outputs]


def main() -> None:
    """Start the engine that the specification describes and run its probes."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    from vllm import LLM

    from tests.vllm.compensation_probes import CompensationProbes

    llm = LLM(**spec["engine"])
    probes = CompensationProbes(llm)
    results = {}
    for name, method, arguments in spec["probes"]:
        results[name] = getattr(probes, method)(*arguments)
    torch.save(results, sys.argv[2])


if __name__ == "__main__":
    # A second import under the module's own name, so that workers can unpickle its functions.
    from tests.vllm import probes

    probes.main()
