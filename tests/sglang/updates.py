"""Weight updates of a running engine, by every method that SGLang has."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.vllm.engine import free_port
from tests.vllm.syncing import ORDERS

Items = list[tuple[str, torch.Tensor]]
GROUP = "weight_update_group"


def check(answer: tuple[bool, str]) -> None:
    """Raise what an update reports."""
    success, message = answer[:2]
    if not success:
        raise RuntimeError(message)


def flush(engine: Any) -> None:
    """Flush the cache; a request that has been answered may not be drained yet."""
    for _ in range(100):
        answer = engine.flush_cache()
        if getattr(answer, "success", answer):
            return
        time.sleep(0.05)
    raise RuntimeError("the cache could not be flushed")


def session(engine: Any, end: bool = False) -> None:
    """0.5.23 wants a session around tensor and distributed updates."""
    name = "end_weight_update" if end else "begin_weight_update"
    if hasattr(engine, name):
        check(tensor_answer(getattr(engine, name)()))


def tensor_answer(answer: Any) -> tuple[bool, str]:
    """(success, message) of whatever a call returns."""
    return answer if isinstance(answer, tuple) else (answer.success, answer.message)


def tensors(engine: Any, items: Items, bucket: int = 70) -> None:
    """``update_weights_from_tensor`` in buckets."""
    for start in range(0, len(items), bucket):
        check(engine.update_weights_from_tensor(items[start : start + bucket], flush_cache=False))


def one_by_one(engine: Any, items: Items) -> None:
    """One tensor a call."""
    tensors(engine, items, bucket=1)


def flattened(engine: Any, items: Items) -> None:
    """Flattened buckets, as slime and verl send them."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    for start in range(0, len(items), 70):
        bucket = FlattenedTensorBucket(named_tensors=items[start : start + 70])
        payload = MultiprocessingSerializer.serialize(
            {
                "flattened_tensor": bucket.get_flattened_tensor(),
                "metadata": bucket.get_metadata(),
            }
        )
        check(
            engine.update_weights_from_tensor(
                [payload] * engine.server_args.tp_size,
                load_format="flattened_bucket",
                flush_cache=False,
            )
        )


class Trainer:
    """Rank 0 of the group that distributed updates are broadcast in (gloo)."""

    def __init__(self, engine: Any) -> None:
        from sglang.srt.utils import init_custom_process_group

        port, world = free_port(), 1 + engine.server_args.tp_size

        def join() -> None:
            self.group = init_custom_process_group(
                backend="gloo",
                init_method=f"tcp://127.0.0.1:{port}",
                world_size=world,
                rank=0,
                group_name=GROUP,
            )

        thread = threading.Thread(target=join)
        thread.start()
        check(engine.init_weights_update_group("127.0.0.1", port, 1, world, GROUP, "gloo"))
        thread.join()

    def send(self, parts: list[torch.Tensor]) -> threading.Thread:
        """Broadcast from another thread, since the engine's call blocks."""

        def broadcast() -> None:
            for tensor in parts:
                torch.distributed.broadcast(tensor.contiguous(), src=0, group=self.group)

        thread = threading.Thread(target=broadcast)
        thread.start()
        return thread


def distributed(engine: Any, items: Items, load_format: str | None = None) -> None:
    """``update_weights_from_distributed``; tensor by tensor, or buckets flattened into one."""
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    trainer = engine.__dict__.get("quads_trainer") or Trainer(engine)
    engine.quads_trainer = trainer
    for start in range(0, len(items), 70):
        names, values = zip(*items[start : start + 70], strict=True)
        parts = list(values)
        if load_format:
            bucket = FlattenedTensorBucket(named_tensors=list(items[start : start + 70]))
            parts = [bucket.get_flattened_tensor()]
        sender = trainer.send(parts)
        answer = engine.update_weights_from_distributed(
            list(names),
            [str(t.dtype).removeprefix("torch.") for t in values],
            [list(t.shape) for t in values],
            group_name=GROUP,
            flush_cache=False,
            load_format=load_format,
        )
        sender.join()
        check(answer)


def distributed_flattened(engine: Any, items: Items) -> None:
    """The same in flattened buckets."""
    distributed(engine, items, "flattened_bucket")


class Files:
    """Methods that take a path: the items are written to a checkpoint of their own first."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder, self.count = model, folder, 0

    def write(self, items: Items) -> Path:
        """A folder with the model's configuration and these tensors, in two files."""
        self.count += 1
        target = self.folder / f"update{self.count}"
        target.mkdir()
        for file in self.model.iterdir():
            if file.is_file() and not file.name.startswith("model"):
                (target / file.name).symlink_to(file.resolve())
        half = len(items) // 2
        for i, part in enumerate((items[half:], items[:half])):
            if part:
                data = {name: tensor.contiguous() for name, tensor in part}
                save_file(data, target / f"model-{i}.safetensors", metadata={"format": "pt"})
        return target

    def disk(self, engine: Any, items: Items) -> None:
        """``update_weights_from_disk``."""
        check(engine.update_weights_from_disk(str(self.write(items))))

    def ipc(self, engine: Any, items: Items) -> None:
        """``update_weights_from_ipc`` with a stand-in for checkpoint_engine's transport."""
        path = self.folder / f"ipc{self.count}.safetensors"
        self.count += 1
        save_file({name: tensor.contiguous() for name, tensor in items}, path)
        check(engine.update_weights_from_ipc({"cpu": str(path)}, flush_cache=False))


Send = Callable[[Any, Items], None]


def moe_combinations(files: Files) -> list[tuple[str, Send, str]]:
    """(name, method, order) of a model with experts."""
    return [
        *((f"tensor, {order}", tensors, order) for order in ORDERS),
        ("one by one, split", one_by_one, "split"),
        ("flattened, shuffled", flattened, "shuffled"),
        ("flattened, stacked", flattened, "stacked"),
        ("distributed, shuffled", distributed, "shuffled"),
        ("distributed flattened, split", distributed_flattened, "split"),
        ("disk, checkpoint", files.disk, "checkpoint"),
        ("disk, stacked", files.disk, "stacked"),
        ("ipc, split", files.ipc, "split"),
    ]


def dense_combinations(files: Files) -> list[tuple[str, Send, str]]:
    """The same of a dense model."""
    return [
        ("tensor, shuffled", tensors, "shuffled"),
        ("one by one, split", one_by_one, "split"),
        ("flattened, split", flattened, "split"),
        ("distributed, shuffled", distributed, "shuffled"),
        ("disk, checkpoint", files.disk, "checkpoint"),
    ]
