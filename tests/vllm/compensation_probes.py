"""Probes of compensation; each returns what a test compares."""

import json
from pathlib import Path
from typing import Any

import torch

from tests.vllm import recorder
from tests.vllm.sync_probes import SyncProbes, weights_of

__all__ = ["CompensationProbes"]


def lists_of(worker: Any) -> dict[str, dict[str, list]]:
    """Worker function: the lists in force, with local ids, by site."""
    states = worker.vllm_config.quant_config.runtime.compensator.states
    return {
        s.site.name: {
            "groups": list(s.site.groups),
            "blocks": s.selection.blocks.tolist(),
            "channels": s.selection.channels.tolist(),
        }
        for s in states
    }


def buffers_of(worker: Any) -> dict[str, Any]:
    """Worker function: addresses of all buffers, and which of them the model does not own."""
    compensator = worker.vllm_config.quant_config.runtime.compensator
    model = worker.model_runner.get_model()
    owned = {b.data_ptr() for _, b in model.named_buffers()}
    kept = {n for n in model.state_dict() if "quads_" in n}
    tensors = {
        f"{s.site.name}/{name}": t for s in compensator.states for name, t in s.buffers().items()
    }
    lost = [name for name, t in tensors.items() if t.numel() and t.data_ptr() not in owned]
    return {
        "addresses": {name: t.data_ptr() for name, t in tensors.items()},
        "not owned": lost,
        "persistent": sorted(kept),
    }


def statistics_of(worker: Any) -> dict[str, torch.Tensor]:
    """Worker function: every statistics and averages buffer, copied, with all rows counted."""
    runtime = worker.vllm_config.quant_config.runtime
    runtime.count_staged()
    states = runtime.compensator.states
    return {
        f"{s.site.name}/{name}": t.clone()
        for s in states
        for name, t in s.buffers().items()
        if not name.startswith("selection")
    }


def columns_of(worker: Any) -> dict[str, torch.Tensor]:
    """Worker function: the BF16 columns by site, copied."""
    compensator = worker.vllm_config.quant_config.runtime.compensator
    return {name: c.columns.clone() for name, c in compensator._columns.items()}


def forget_totals(worker: Any) -> None:
    """Worker function: statistics as in a new engine."""
    compensator = worker.vllm_config.quant_config.runtime.compensator
    compensator.forget()
    for state in compensator.states:
        state.statistics.offered.zero_()


def choose(worker: Any, changes: dict[str, Any]) -> None:
    """Worker function: the lists that other options would choose from what was counted so far."""
    import dataclasses

    from quads_common.compensation import new_site_state, refresh
    from quads_common.compensation.statistics import copy_into

    compensator = worker.vllm_config.quant_config.runtime.compensator
    compensator.count_staged()
    options = dataclasses.replace(compensator.options, **changes)
    for state in compensator.states:
        other = new_site_state(state.site, options)
        copy_into(other.statistics.buffers(), state.statistics.buffers(), state.site.name)
        refresh([other], options)
        copy_into(state.selection.buffers(), other.selection.buffers(), state.site.name)


def mark_changed(worker: Any) -> None:
    """Worker function: lists were changed, as by a refresh."""
    worker.vllm_config.quant_config.runtime.compensator._changed()


def drop_residual(worker: Any) -> None:
    """Worker function: no block has its residual added any more."""
    for state in worker.vllm_config.quant_config.runtime.compensator.states:
        state.selection.block_mask.zero_()
        state.selection.blocks.fill_(-1)


class CompensationProbes(SyncProbes):
    """All probes of ``SyncProbes`` and those of compensation."""

    def counted(self, sequences: list[list[int]], pad_to: int = 1) -> list[dict[str, Any]]:
        """Statistics of a mixed batch beside those recomputed from the same rows, per worker."""
        self.llm.collective_rpc(forget_totals)
        self.llm.collective_rpc(recorder.start, args=(pad_to,))
        lengths = self.generate(sequences, max_tokens=5)
        found = self.llm.collective_rpc(recorder.compare)
        return [{**result, "tokens": sum(lengths)} for result in found]

    def generate(self, sequences: list[list[int]], max_tokens: int) -> list[int]:
        """Run them; returns how many tokens went through the model for each."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        prompts = [{"prompt_token_ids": ids} for ids in sequences]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [len(o.prompt_token_ids) + len(o.outputs[0].token_ids) - 1 for o in outputs]

    def lists(self) -> list[dict[str, Any]]:
        """The lists in force, per worker."""
        return self.llm.collective_rpc(lists_of)

    def buffers(self) -> list[dict[str, Any]]:
        """Where the state lies, per worker."""
        return self.llm.collective_rpc(buffers_of)

    def refresh(self) -> list[dict[str, Any]]:
        """``quads_refresh``."""
        return self.llm.collective_rpc("quads_refresh")

    def metrics(self) -> dict[str, Any]:
        """What the workers report, and the names and values on the Prometheus registry."""
        from prometheus_client import REGISTRY

        samples = {
            (s.name, s.labels["site"]): s.value
            for family in REGISTRY.collect()
            for s in family.samples
            if s.name.startswith("vllm:quads_")
        }
        return {"workers": self.llm.collective_rpc("quads_metrics"), "prometheus": samples}

    def save(self, path: str) -> list[dict[str, Any] | None]:
        """``quads_save_selection``."""
        return self.llm.collective_rpc("quads_save_selection", args=(path,))

    def load(self, path: str) -> list[dict[str, Any]]:
        """``quads_load_selection``."""
        return self.llm.collective_rpc("quads_load_selection", args=(path,))

    def errors_of_load(self, path: str, folder: str) -> dict[str, str]:
        """What files of another layout or version, and other things, raise; nothing may change."""
        from safetensors import safe_open
        from safetensors.torch import save_file

        with safe_open(path, "pt") as file:
            header = json.loads(file.metadata()["quads"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        cases = {"tp_size": 8, "contract_version": 99}
        before, found = self.lists(), {}
        for key, value in cases.items():
            target = str(Path(folder) / f"{key}.safetensors")
            save_file(tensors, target, {"quads": json.dumps({**header, key: value})})
            found[key] = self._error(lambda p=target: self.load(p))
        text = Path(folder) / "text"
        text.write_text("no selection")
        found["no file"] = self._error(lambda: self.load(str(text)))
        found["missing"] = self._error(lambda: self.load(str(text) + "?"))
        found["changed"] = "" if self.lists() == before else "the lists"
        return found

    def frozen(self, sequence: list[int], others: list[list[int]]) -> dict[str, Any]:
        """Log-probs of one prompt alone, before and after many other requests; then a sync."""
        lists = self.lists()
        before = self.logprobs([sequence])[0]
        self.generate(others, max_tokens=1)
        after = self.logprobs([sequence])[0]
        return {"before": before, "after": after, "same lists": self.lists() == lists}

    def synced(self, path: str) -> dict[str, Any]:
        """A sync with the weights that are there already: what it moves."""
        before = {"prints": self.fingerprints(), "buffers": self.buffers(), "lists": self.lists()}
        self.reload(path)
        after = {"prints": self.fingerprints(), "buffers": self.buffers(), "lists": self.lists()}
        return {"before": before, "after": after}

    def raw_sync(self, path: str, then: str) -> dict[str, Any]:
        """Raw ``load_weights`` with nothing after it, then one of the other boundaries, twice."""
        from tests.vllm.probes import load_raw

        def refreshes() -> int:
            (stats,) = self.llm.collective_rpc(statistics_of)
            return max(int(t) for name, t in stats.items() if name.endswith("averages_refreshes"))

        counts = [refreshes()]
        if then == "wake_up":  # vLLM wakes nobody who is not asleep
            self.llm.sleep(level=1)
        self.llm.collective_rpc(load_raw, args=(path,))
        counts.append(refreshes())
        for _ in range(2):
            getattr(self.llm, then)()
            counts.append(refreshes())
        return {"refreshes": counts}

    def survives(self, path: str) -> dict[str, Any]:
        """Statistics before and after a sync that is no boundary's due, as interval says."""
        (before,) = self.llm.collective_rpc(statistics_of)
        self.reload(path)
        (after,) = self.llm.collective_rpc(statistics_of)
        return {"before": before, "after": after}

    def prefix_cache(self, sequence: list[int], action: str) -> list[int]:
        """Cached tokens of a prompt: second time, and the third after ``action``."""
        from vllm import SamplingParams

        def cached() -> int:
            params = SamplingParams(temperature=0.0, max_tokens=1)
            (output,) = self.llm.generate([{"prompt_token_ids": sequence}], params, use_tqdm=False)
            return output.num_cached_tokens

        cached()
        second = cached()
        getattr(self, action)()
        return [second, cached()]

    def refresh_while_running(self, cached: list[int], running: list[int]) -> dict[str, Any]:
        """Another refresh while a request runs; what a prompt hits before, then, and afterwards."""
        from vllm import SamplingParams

        def cached_tokens() -> int:
            params = SamplingParams(temperature=0.0, max_tokens=1)
            (output,) = self.llm.generate([{"prompt_token_ids": cached}], params, use_tqdm=False)
            return output.num_cached_tokens

        cached_tokens()
        hits = cached_tokens()
        engine = self.llm.llm_engine
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        engine.add_request("running", {"prompt_token_ids": running}, params)
        for _ in range(3):
            engine.step()
        self.llm.collective_rpc(choose, args=({"rac_ratio": 0.25, "adaptive": False},))
        self.llm.collective_rpc(mark_changed)
        kept = engine.get_num_unfinished_requests()
        while engine.has_unfinished_requests():
            engine.step()
        return {"hits": hits, "kept": kept, "after": cached_tokens()}

    def nothing(self) -> list[Any]:
        """An RPC that changes no selection."""
        return self.llm.collective_rpc("quads_metrics")

    def calibrated(self, prompts: list[str], save: str | None = None) -> dict[str, Any]:
        """``vllm_quads.calibrate.calibrate``."""
        from vllm_quads.calibrate import calibrate

        return calibrate(self.llm, prompts, max_tokens=4, save=save)

    def count(self, prompts: list[str]) -> None:
        """Fresh statistics of prompts, without a refresh."""
        from vllm import SamplingParams

        self.llm.collective_rpc("quads_forget")
        self.llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)

    def choose(self, changes: dict[str, Any]) -> None:
        """See the worker function."""
        self.llm.collective_rpc(choose, args=(changes,))

    def drop_residual(self) -> None:
        """See the worker function."""
        self.llm.collective_rpc(drop_residual)

    def columns(self) -> list[dict[str, torch.Tensor]]:
        """BF16 columns, per worker."""
        return self.llm.collective_rpc(columns_of)

    def sync_without(self, path: str, skipped: str) -> dict[str, Any]:
        """A raw sync that lacks every tensor with ``skipped`` in its name, ended by a boundary."""
        from tests.vllm import syncing

        items = [(n, t.clone()) for n, t in weights_of(path).items() if skipped not in n]
        syncing.model_of(self.llm).load_weights(items)
        self.llm.reset_prefix_cache()
        return {"lists": self.lists(), "columns": self.columns()}

    def error_of(self, method: str, *args: Any) -> str:
        """What a worker method raises, as text."""
        return self._error(lambda: self.llm.collective_rpc(method, args=args))

    @staticmethod
    def _error(call: Any) -> str:
        try:
            call()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""
