"""What the tests ask of a running engine.

``python -m tests.sglang.probes SPEC.json OUT.pt`` starts one engine, runs the probes of the
specification in order and saves their results by name. One engine answers many tests.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from sglang_quads import client
from tests.sglang import updates
from tests.sglang.engine import INSIDE
from tests.sglang.failed_updates import FailedUpdates, weights_of
from tests.vllm import syncing

PROMPTS = ["347+589=", "12-345="]


class Probes(FailedUpdates):
    """The probes, by name; ``engine`` is a ``sglang.Engine``."""

    def __init__(self, engine: Any, folder: Path, model: Path) -> None:
        self.engine, self.folder = engine, folder
        self.files = updates.Files(model, folder)

    # The engine as it is -------------------------------------------------------------------------

    def report(self) -> Any:
        """The plugin's own report, per rank."""
        return client.report(self.engine)

    def inside(self, function: str, *arguments: Any) -> list[Any]:
        """Call a function of ``tests.sglang.inside`` in every rank."""
        out = self.folder / "inside"
        call = {"function": function, "arguments": arguments, "out": str(out)}
        named = [(json.dumps(call), torch.zeros(1))]
        updates.session(self.engine)
        updates.check(
            self.engine.update_weights_from_tensor(named, load_format=INSIDE, flush_cache=False)
        )
        updates.session(self.engine, end=True)
        ranks = range(self.engine.server_args.tp_size)
        return [torch.load(out.with_suffix(f".{r}.pt"), weights_only=False) for r in ranks]

    def fingerprints(self) -> dict[str, str]:
        """Digests of the quantized tensors."""
        return client.fingerprints(self.engine)

    def logprobs(self, sequences: list[list[int]]) -> list[torch.Tensor]:
        """Log-prob of every token of each sequence but the first, given those before it."""
        outputs = self.engine.generate(
            input_ids=sequences,
            sampling_params={"temperature": 0, "max_new_tokens": 1},
            return_logprob=True,
            logprob_start_len=0,
        )
        return [
            torch.tensor([entry[0] for entry in o["meta_info"]["input_token_logprobs"][1:]])
            for o in outputs
        ]

    def greedy(self) -> list[tuple[int, ...]]:
        """Greedy tokens after a flush, as trainers do it."""
        updates.flush(self.engine)
        params = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
        outputs = self.engine.generate(PROMPTS, params)
        updates.flush(self.engine)
        return [tuple(o["output_ids"]) for o in outputs]

    def moe_calls(self, sequences: list[list[int]]) -> list[dict[str, Any]]:
        """What went into and came out of each MoE layer for one batch."""
        updates.flush(self.engine)
        self.inside("record")
        self.engine.generate(
            input_ids=sequences, sampling_params={"temperature": 0, "max_new_tokens": 1}
        )
        return self.inside("recorded")[0]

    def observe(self) -> dict[str, Any]:
        """Bytes of all weights, addresses and tokens."""
        looks = self.inside("look")
        state: dict[str, Any] = self.fingerprints()
        for rank, look in enumerate(looks):
            state.update({f"{name} of {rank}": h for name, h in look["hashes"].items()})
        addresses = [look["addresses"] for look in looks]
        return {"state": state, "addresses": addresses, "tokens": self.greedy()}

    # Weight updates ------------------------------------------------------------------------------

    def update(self, send: updates.Send, items: updates.Items) -> None:
        """One whole update."""
        updates.flush(self.engine)
        if getattr(send, "__name__", "") not in ("disk", "ipc"):
            updates.session(self.engine)
        send(self.engine, items)
        if getattr(send, "__name__", "") not in ("disk", "ipc"):
            updates.session(self.engine, end=True)
        updates.flush(self.engine)

    def matrix(self, first: str, second: str, moe: bool) -> dict[str, list[dict[str, Any]]]:
        """W1, W1, W2, W1 by every method and order: state, addresses and tokens after each."""
        sources = [weights_of(first), weights_of(second)]
        if moe:
            self.inside("stand_in_for_checkpoint_engine")
            combinations = updates.moe_combinations(self.files)
        else:
            combinations = updates.dense_combinations(self.files)
        results = {"start": [self.observe()]}
        for name, send, order in combinations:
            observed = []
            for source in (0, 0, 1, 0):
                self.update(send, syncing.ORDERS[order](sources[source]))
                observed.append(self.observe())
            results[name] = observed
        return results

    def synced(self, second: str) -> dict[str, Any]:
        """State after one update by tensors, parts far apart."""
        self.update(updates.tensors, syncing.split_groups(weights_of(second)))
        return self.observe()

    def without_quantizing(self, second: str) -> dict[str, Any]:
        """State after an update while new weights do not reach the packed ones."""
        before = self.observe()
        self.inside("stop_quantizing")
        self.update(updates.tensors, syncing.as_they_are(weights_of(second)))
        self.inside("undo")
        return {"before": before, "after": self.observe()}

    def interrupted(self, first: str, second: str) -> dict[str, Any]:
        """Updates that stop early, repeat tensors or send half: what is served and reported."""
        w1, w2 = (syncing.as_they_are(weights_of(path)) for path in (first, second))
        results: dict[str, Any] = {}
        self.update(updates.tensors, w1)
        half = w2[: len(w2) // 2]
        updates.tensors(self.engine, half)
        updates.tensors(self.engine, w1[::-1])
        updates.flush(self.engine)
        results["half of W2, then W1 backwards"] = self.observe()["state"]

        self.update(updates.tensors, half)
        results["half of the tensors"] = self.observe()["state"]
        self.update(updates.tensors, w1)

        gates = [i for i in w2 if ".experts." in i[0] and "gate_proj" in i[0]]
        ups = [i for i in w1 if ".experts." in i[0] and "up_proj" in i[0]]
        updates.tensors(self.engine, gates)
        results["only gates: open"] = self.inside("open_units")[0]
        results["only gates: reported"] = client.end_sync(self.engine)[0]
        results["only gates: state"] = self.observe()["state"]

        updates.tensors(self.engine, gates)
        updates.flush(self.engine)  # the update was given up
        updates.tensors(self.engine, ups)
        results["gates of W2, ups of W1: state"] = self.observe()["state"]
        updates.flush(self.engine)

        updates.tensors(self.engine, w2)
        self.update(updates.tensors, [pair for item in w1 for pair in (item, item)])
        results["every tensor twice"] = self.observe()["state"]
        results["open at the end"] = self.inside("open_units")[0]
        return results

    def memory(self, first: str, second: str, count: int) -> list[dict[str, int]]:
        """Live tensors after each of several updates, and what was staged half-way."""
        sources = [weights_of(path) for path in (first, second)]
        found = []
        for i in range(count):
            order = syncing.split_groups if i % 4 == 3 else syncing.as_they_are
            items = order(sources[i % 2])
            half = len(items) // 2
            updates.tensors(self.engine, items[:half])
            (middle,) = self.inside("staged")
            updates.tensors(self.engine, items[half:])
            updates.flush(self.engine)
            (after,) = self.inside("memory")
            found.append({**after, "half-way": middle})
        return found

    def release(self, first: str, second: str) -> dict[str, Any]:
        """Release, resume, update; then the same with the weights really gone."""
        w1, w2 = weights_of(first), weights_of(second)
        self.update(updates.tensors, syncing.as_they_are(w1))
        results: dict[str, Any] = {"before": self.observe()}
        updates.flush(self.engine)
        self.engine.release_memory_occupation()
        self.engine.resume_memory_occupation()
        results["resumed"] = self.observe()
        updates.flush(self.engine)
        self.engine.release_memory_occupation(tags=["weights"])
        self.engine.resume_memory_occupation(tags=["weights"])
        self.update(updates.tensors, syncing.as_they_are(w2))
        results["W2"] = self.observe()
        self.inside("lose_weights")
        results["all lost"] = self.inside("error_of_running")[0]
        items = syncing.as_they_are(w1)
        updates.tensors(self.engine, items[: len(items) // 2])
        results["half came"] = self.inside("error_of_running")[0]
        self.update(updates.tensors, items)
        results["all came"] = self.inside("error_of_running")[0]
        results["after"] = self.observe()
        return results

    def error_on_one_rank(self, second: str) -> dict[str, Any]:
        """A bad tensor of the last expert, which under expert parallelism is not rank 0's."""
        good = weights_of(second)
        name = "model.layers.2.mlp.experts.15.down_proj.weight"
        bad = good[name].clone()
        bad[0, -1] = float("nan")
        return self.failing(lambda: updates.tensors(self.engine, [(name, bad)]))


def start(spec: dict[str, Any]) -> Any:
    """The engine that a specification describes."""
    if spec["how"] == "server args":  # no plugin is loaded yet
        from sglang.srt.server_args import ServerArgs

        arguments = ServerArgs(**spec["engine"])
        import sglang

        return sglang.Engine(server_args=arguments)
    import sglang

    return sglang.Engine(**spec["engine"])


def main() -> None:
    """Start the engine that the specification describes and run its probes."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    from tests.sglang.compensation_probes import CompensationProbes

    engine = start(spec)
    probes = CompensationProbes(engine, Path(spec["folder"]), Path(spec["engine"]["model_path"]))
    results = {}
    for name, method, arguments in spec["probes"]:
        results[name] = getattr(probes, method)(*arguments)
    torch.save(results, sys.argv[2])
    engine.shutdown()


if __name__ == "__main__":
    main()
