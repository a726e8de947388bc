"""Probes of weight syncs; in-process engines only. Each returns what a test compares."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.vllm import syncing, transfer  # transfer registers the test backend
from tests.vllm.probes import Probes

__all__ = ["SyncProbes", "transfer"]

PROMPTS = ["347+589=", "12-345="]


def weights_of(path: str) -> syncing.Tensors:
    """The tensors of a checkpoint folder."""
    return load_file(Path(path) / "model.safetensors")


class SyncProbes(Probes):
    """All probes of ``Probes`` and those of weight syncs."""

    def sync_matrix(self, first: str, second: str, moe: bool) -> dict[str, list[dict[str, Any]]]:
        """W1, W1, W2, W1 by every path in every order: state, addresses and tokens after each."""
        sources = [weights_of(first), weights_of(second)]
        results = {"start": [self._observe()]}
        for path, order in syncing.combinations(moe):
            observed = []
            for source in (0, 0, 1, 0):
                items = syncing.ORDERS[order](sources[source])
                syncing.PATHS[path](self.llm, items)
                observed.append(self._observe())
            results[f"{path}, {order}"] = observed
        return results

    def interrupted(self, first: str, second: str) -> dict[str, Any]:
        """Syncs that stop early, repeat tensors or send half: what is served and reported."""
        w1, w2 = weights_of(first), weights_of(second)
        items = syncing.as_they_are(w2)
        half = len(items) // 2
        results: dict[str, Any] = {}

        syncing.one_by_one(self.llm, items[:half])
        syncing.one_by_one(self.llm, syncing.as_they_are(w1)[::-1])
        results["half of W2, then W1 backwards"] = self._state()

        self.llm.collective_rpc("start_weight_update")
        self._load(items[:half])
        self.llm.collective_rpc("finish_weight_update")
        results["half of the tensors"] = self._state()
        syncing.reload_iterator(self.llm, syncing.as_they_are(w1))

        experts = [i for i in items if ".experts." in i[0]]
        gates = [i for i in experts if "gate_proj" in i[0]]
        self._load(gates)
        results["only gates: open"] = self._open()
        results["only gates: reported"] = self.llm.collective_rpc("quads_end_sync")[0]
        results["only gates: state"] = self._state()

        # First halves of a sync that was given up must not pair with the next one's second halves.
        self._load(gates)
        self.llm.reset_prefix_cache()
        ups = [i for i in syncing.as_they_are(w1) if "up_proj" in i[0]]
        self._load(ups)
        results["gates of W2, ups of W1: state"] = self._state()
        self.llm.reset_prefix_cache()

        self._load(items)
        doubled = [pair for item in syncing.as_they_are(w1) for pair in (item, item)]
        syncing.reload_iterator(self.llm, doubled)
        results["every tensor twice"] = self._state()
        results["open at the end"] = self._open()
        return results

    def started_again(self, first: str, second: str) -> dict[str, Any]:
        """A weight update that was started, half sent and never finished, then a whole one."""
        w1, w2 = weights_of(first), weights_of(second)
        worker = syncing.worker_of(self.llm)
        model = syncing.model_of(self.llm)
        from vllm.model_executor.model_loader import reload

        gates = [i for i in w2.items() if "gate_proj" in i[0]]
        reload.initialize_layerwise_reload(model)
        self._load(gates)
        reload.finalize_layerwise_reload(model, worker.vllm_config.model_config)
        syncing.reload_iterator(self.llm, syncing.as_they_are(w1)[::-1])
        return {"state": self._state(), "open": self._open()}

    def bad_weights(self, second: str) -> dict[str, dict[str, Any]]:
        """One wrong tensor in an otherwise good sync: the error, and the state afterwards."""
        good = weights_of(second)
        layer = "model.layers.1.mlp.experts"
        name = f"{layer}.3.up_proj.weight"
        shape = good[name].shape

        def filled(value: float) -> torch.Tensor:
            changed = good[name].clone()
            changed[1, 2] = value
            return changed

        wrong = {
            "nan": (name, filled(float("nan"))),
            "inf": (name, filled(float("inf"))),
            "shape": (name, torch.zeros(shape[0] + 16, shape[1], dtype=torch.bfloat16)),
            "transposed": (name, good[name].t().contiguous()),
            "float64": (name, good[name].double()),
            "int8": (name, good[name].to(torch.int8)),
            "unknown expert": (name.replace(".3.", ".99."), good[name]),
            "stack": (f"{layer}.gate_up_proj", torch.ones(15, 128, 256, dtype=torch.bfloat16)),
            "unknown name": ("model.layers.1.mlp.experts.3.extra.weight", good[name]),
            "scales": (name.replace("up_proj.weight", "up_proj.weight_scale"), good[name]),
        }
        results = {}
        for case, (wrong_name, tensor) in wrong.items():
            before = self._state()
            try:
                self._load(
                    [(wrong_name, tensor), (name.replace("up_proj", "gate_proj"), good[name])]
                )
                error = ""
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
            dropped = self.llm.collective_rpc("quads_end_sync")[0]
            results[case] = {
                "error": error,
                "unchanged": self._state() == before,
                "dropped": dropped,
                "tokens": syncing.greedy(self.llm, PROMPTS),
            }
        return results

    def memory(self, first: str, second: str, syncs: int) -> dict[str, list[int]]:
        """Bytes of live tensors after each sync, and the most that was staged while it ran."""
        sources = [weights_of(first), weights_of(second)]
        model = syncing.model_of(self.llm)
        after, peak = [], []
        for i in range(syncs):
            items = (
                syncing.split_groups(sources[i % 2]) if i % 4 == 3 else list(sources[i % 2].items())
            )
            most = 0
            for j, item in enumerate(items):
                model.load_weights([item])
                if j % 40 == 0:
                    most = max(most, self._staged())
            self.llm.reset_prefix_cache()
            after.append(syncing.live_bytes())
            peak.append(most)
        return {"after": after, "peak": peak}

    def lost(self, first: str) -> dict[str, Any]:
        """What sleep level 2 leaves: the model refuses to run until everything came again."""
        from quads_common.layer_weights import mark_lost

        wrapper = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
        items = list(weights_of(first).items())
        results: dict[str, Any] = {"before": syncing.greedy(self.llm, PROMPTS)}
        mark_lost(syncing.model_of(self.llm))
        wrapper._quads_weights_lost = True
        results["all lost"] = self._error_of_running()
        self._load(items[: len(items) // 2])
        results["half came"] = self._error_of_running()
        self._load(items)
        results["after"] = syncing.greedy(self.llm, PROMPTS)
        return results

    def _error_of_running(self) -> str:
        try:
            wrapper = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
            wrapper.execute_model(None)
        except Exception as raised:
            return f"{type(raised).__name__}: {raised}"
        return ""

    def _load(self, items: list[tuple[str, torch.Tensor]]) -> None:
        syncing.model_of(self.llm).load_weights([(n, t.clone()) for n, t in items])

    def _state(self) -> dict[str, Any]:
        return syncing.state(self.llm)

    def _observe(self) -> dict[str, Any]:
        return {
            "state": self._state(),
            "addresses": syncing.addresses(syncing.model_of(self.llm)),
            "tokens": syncing.greedy(self.llm, PROMPTS),
        }

    def _open(self) -> int:
        from quads_common.layer_weights import all_units

        return sum(len(u._open) for u in all_units(syncing.model_of(self.llm)))

    def _staged(self) -> int:
        from quads_common.layer_weights import all_units

        units = all_units(syncing.model_of(self.llm))
        return sum(opened.buffer.nbytes for u in units for opened in u._open.values())
