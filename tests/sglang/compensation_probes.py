"""Probes of compensation; each returns what a test compares."""

import json
from pathlib import Path
from typing import Any

import torch

from sglang_quads import client
from sglang_quads.calibrate import calibrate
from sglang_quads.compensation import WARM_UP
from tests.sglang import updates
from tests.sglang.probes import Probes, weights_of
from tests.vllm import syncing

LOCAL = "inside_compensation"


class CompensationProbes(Probes):
    """All probes of ``Probes`` and those of compensation."""

    def local(self, function: str, *arguments: Any) -> list[Any]:
        """Call a function of ``tests.sglang.inside_compensation`` in every rank."""
        return self.inside(f"{LOCAL}:{function}", *arguments)

    def generate(self, sequences: list[list[int]], tokens: int, **more: Any) -> list[int]:
        """Run them; returns how many tokens went through the model for each."""
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        outputs = self.engine.generate(input_ids=sequences, sampling_params=params, **more)
        return [
            len(ids) - o["meta_info"]["cached_tokens"] + len(o["output_ids"]) - 1
            for ids, o in zip(sequences, outputs, strict=True)
        ]

    def alone(self, sequences: list[list[int]]) -> list[torch.Tensor]:
        """Log-probs of prompts that are sent one by one: the same batches in every engine."""
        return [self.logprobs([ids])[0] for ids in sequences]

    def in_groups(self, sequences: list[list[int]], size: int) -> list[torch.Tensor]:
        """Log-probs of prompts that are sent ``size`` at a time."""
        groups = (sequences[i : i + size] for i in range(0, len(sequences), size))
        return [found for group in groups for found in self.logprobs(group)]

    def counted(self, sequences: list[list[int]], pad_to: int = 1) -> list[dict[str, Any]]:
        """Statistics of a mixed batch beside those recomputed from the same rows, per rank."""
        updates.flush(self.engine)
        self.local("start_recording", pad_to)
        tokens = sum(self.generate(sequences, 5))
        return [{**found, "tokens": tokens} for found in self.local("compare")]

    def counted_of_warm_up(self, sequence: list[int]) -> list[int]:
        """Rows counted so far, before and after a server's own warm-up request."""

        def offered() -> int:
            (found,) = self.local("statistics")
            return max(int(t) for name, t in found.items() if name.endswith("statistics_offered"))

        before = offered()
        self.generate([sequence], 3, rid=[f"{WARM_UP}-1"])
        return [before, offered()]

    def lists(self) -> list[dict[str, Any]]:
        """The lists in force, per rank."""
        return self.local("lists")

    def buffers(self) -> list[dict[str, Any]]:
        """Where the state lies, per rank."""
        return self.local("buffers")

    def columns(self) -> list[dict[str, torch.Tensor]]:
        """BF16 columns, per rank."""
        return self.local("columns")

    def refresh(self) -> list[dict[str, Any]]:
        """``quads_refresh``."""
        return client.refresh(self.engine)

    def metrics(self) -> list[list[dict[str, Any]]]:
        """``quads_metrics``."""
        return client.metrics(self.engine)

    def save(self, path: str) -> dict[str, Any]:
        """``quads_save_selection``."""
        return client.save_selection(self.engine, path)

    def load(self, path: str) -> list[dict[str, Any]]:
        """``quads_load_selection``."""
        return client.load_selection(self.engine, path)

    def error_of(self, name: str, *path: str) -> str:
        """What an order raises, as text."""
        try:
            client.ask(self.engine, name, *path)
        except RuntimeError as error:
            return str(error)
        return ""

    def errors_of_load(self, path: str, folder: str) -> dict[str, str]:
        """What files of another layout or version, and other things, raise; nothing may change."""
        from safetensors import safe_open
        from safetensors.torch import save_file

        with safe_open(path, "pt") as file:
            header = json.loads(file.metadata()["quads"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        before, found = self.lists(), {}
        for key, value in {"tp_size": 8, "contract_version": 99}.items():
            target = str(Path(folder) / f"{key}.safetensors")
            save_file(tensors, target, {"quads": json.dumps({**header, key: value})})
            found[key] = self.error_of("quads_load_selection", target)
        text = Path(folder) / "text"
        text.write_text("no selection")
        found["no file"] = self.error_of("quads_load_selection", str(text))
        found["missing"] = self.error_of("quads_load_selection", f"{text}?")
        found["no path"] = self.error_of("quads_load_selection")
        found["unwritable"] = self.error_of("quads_save_selection", f"{folder}/none/file")
        found["changed"] = "" if self.lists() == before else "the lists"
        return found

    def frozen(self, sequence: list[int], others: list[list[int]]) -> dict[str, Any]:
        """Log-probs of one prompt alone, before and after many other requests."""
        lists = self.lists()
        before = self.logprobs([sequence])[0]
        self.generate(others, 1)
        after = self.logprobs([sequence])[0]
        return {"before": before, "after": after, "same lists": self.lists() == lists}

    def layers(self, sequences: list[list[int]]) -> list[dict[str, Any]]:
        """What went into and came out of each compensated layer for one batch."""
        updates.flush(self.engine)
        self.local("record_layers")
        self.generate(sequences, 1)
        return self.local("recorded_layers")[0]

    def layers_without(self, what: str, sequences: list[list[int]]) -> list[dict[str, Any]]:
        """The same once lists are dropped: "channels" or "residual"."""
        self.local(f"drop_{what}")
        return self.layers(sequences)

    # Weight updates and boundaries ---------------------------------------------------------------

    def by_tensors(self, path: str) -> None:
        """The weights of a checkpoint, in buckets, with a flush at the end."""
        self.update(updates.tensors, syncing.as_they_are(weights_of(path)))

    def from_disk(self, path: str) -> dict[str, Any]:
        """An update from disk with the weights that are there already: what it moves."""
        before = {"prints": self.fingerprints(), "buffers": self.buffers(), "lists": self.lists()}
        updates.flush(self.engine)
        updates.check(self.engine.update_weights_from_disk(path))
        after = {"prints": self.fingerprints(), "buffers": self.buffers(), "lists": self.lists()}
        return {"before": before, "after": after}

    def boundaries(self, path: str, then: str) -> list[int]:
        """Refreshes after: nothing, tensors without a flush, and twice one of the boundaries."""

        def refreshes() -> int:
            (found,) = self.local("statistics")
            return max(int(t) for name, t in found.items() if name.endswith("averages_refreshes"))

        updates.flush(self.engine)
        counts = [refreshes()]
        updates.tensors(self.engine, syncing.as_they_are(weights_of(path)))
        counts.append(refreshes())
        for _ in range(2):
            if then == "flush":
                updates.flush(self.engine)
            elif then == "end_sync":
                client.end_sync(self.engine)
            else:
                self.engine.release_memory_occupation()
                self.engine.resume_memory_occupation()
            counts.append(refreshes())
        return counts

    def update_without(self, path: str, skipped: str) -> dict[str, Any]:
        """An update that lacks every tensor with ``skipped`` in its name, ended by a flush."""
        items = [(n, t) for n, t in weights_of(path).items() if skipped not in n]
        self.update(updates.tensors, items)
        return {"lists": self.lists(), "columns": self.columns()}

    def calibrated(self, prompts: list[str], save: str | None = None) -> dict[str, Any]:
        """``sglang_quads.calibrate.calibrate``."""
        return calibrate(self.engine, prompts, max_tokens=4, save=save)

    # The radix cache -----------------------------------------------------------------------------

    def cached_tokens(self, sequence: list[int]) -> int:
        """Tokens of a prompt that the radix cache has."""
        params = {"temperature": 0, "max_new_tokens": 1}
        (answer,) = self.engine.generate(input_ids=[sequence], sampling_params=params)
        return answer["meta_info"]["cached_tokens"]

    def radix_cache(self, sequence: list[int], action: str) -> list[int]:
        """Cached tokens of a prompt: the second time, and the third after ``action``."""
        updates.flush(self.engine)
        self.cached_tokens(sequence)
        second = self.cached_tokens(sequence)
        getattr(self, action)()
        return [second, self.cached_tokens(sequence)]

    def nothing(self) -> None:
        """Leave everything as it is."""

    def refresh_while_running(self, cached: list[int], running: list[int]) -> dict[str, Any]:
        """A refresh while a request runs; what a prompt hits before, and when it has ended."""
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        updates.flush(self.engine)
        self.cached_tokens(cached)
        hits = self.cached_tokens(cached)
        params = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}

        async def scenario() -> tuple[bool, int]:
            stream = await self.engine.async_generate(
                input_ids=running, sampling_params=params, stream=True
            )
            await anext(stream)
            request = CheckWeightsReqInput(action="quads_refresh")
            answer = await self.engine.tokenizer_manager.check_weights(request, None)
            later = 0
            async for _ in stream:
                later += 1
            changed = client.decode(
                "quads_refresh",
                {"success": answer[0], "message": answer[1], "ranks": answer[2]},
            )[0]["changed"]
            return changed, later

        changed, later = self.engine.loop.run_until_complete(scenario())
        return {
            "hits": hits,
            "changed": changed,
            "later": later,
            "after": self.cached_tokens(cached),
        }
