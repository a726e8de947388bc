"""Weight syncs inside an engine's process, by every path and in every order trainers choose."""

import gc
import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
Send = Callable[[Any, Tensors], None]


def model_of(llm: Any) -> torch.nn.Module:
    """The in-process engine's model."""
    return worker_of(llm).model_runner.get_model()


def worker_of(llm: Any) -> Any:
    """The in-process engine's only worker."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


# How the tensors are cut and ordered ------------------------------------------------------------


def as_they_are(weights: Tensors) -> list[tuple[str, torch.Tensor]]:
    """Checkpoint order."""
    return list(weights.items())


def shuffled(weights: Tensors) -> list[tuple[str, torch.Tensor]]:
    """Random order, float32 or float16 where that loses nothing, not contiguous."""
    rng = random.Random(len(weights))
    items = list(weights.items())
    rng.shuffle(items)
    changed = []
    for name, tensor in items:
        dtype = rng.choice([torch.float32, torch.float16, torch.bfloat16])
        other = tensor.to(dtype)
        if not torch.equal(other.to(tensor.dtype), tensor):
            other = tensor.float()
        changed.append((name, other.t().contiguous().t() if other.ndim == 2 else other))
    return changed


def split_groups(weights: Tensors) -> list[tuple[str, torch.Tensor]]:
    """Parts of a unit as far apart as can be: all first parts, then all second, then all third."""
    first = ("q_proj", "gate_proj")
    second = ("k_proj", "up_proj")

    def rank(name: str) -> int:
        module = name.rpartition(".weight")[0].rpartition(".")[2]
        return 0 if module in first else 1 if module in second else 2

    return sorted(weights.items(), key=lambda item: rank(item[0]))


def stacked(weights: Tensors) -> list[tuple[str, torch.Tensor]]:
    """Experts as transformers 5 holds them: [E, 2I, H] and [E, H, I] per layer."""
    found: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    rest = []
    for name, tensor in weights.items():
        layer, separator, tail = name.partition(".experts.")
        if not separator:
            rest.append((name, tensor))
            continue
        index, part, _ = tail.split(".")
        found.setdefault(layer, {}).setdefault(int(index), {})[part] = tensor
    for layer, experts in found.items():
        order = [experts[e] for e in sorted(experts)]
        gate_up = torch.stack([torch.cat([e["gate_proj"], e["up_proj"]]) for e in order])
        rest.append((f"{layer}.experts.gate_up_proj", gate_up))
        rest.append((f"{layer}.experts.down_proj", torch.stack([e["down_proj"] for e in order])))
    return rest


ORDERS = {
    "checkpoint": as_they_are,
    "shuffled": shuffled,
    "split": split_groups,
    "stacked": stacked,
}


# How they are sent ------------------------------------------------------------------------------


def reload_iterator(llm: Any, items: list[tuple[str, torch.Tensor]]) -> None:
    """Path 1: ``reload_weights`` from an iterator."""
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(items)})


def weight_transfer(llm: Any, items: list[tuple[str, torch.Tensor]]) -> None:
    """Path 2: start, updates, finish; the tensors in files, as shared memory would hold them."""
    import tempfile

    from safetensors.torch import save_file

    llm.collective_rpc("init_weight_transfer_engine", args=({},))
    llm.collective_rpc("start_weight_update")
    with tempfile.TemporaryDirectory() as folder:
        for start in range(0, len(items), 50):
            chunk = items[start : start + 50]
            path = f"{folder}/{start}.safetensors"
            save_file({name: tensor.contiguous() for name, tensor in chunk}, path)
            names = [name for name, _ in chunk]
            llm.collective_rpc("update_weights", args=({"path": path, "names": names},))
    llm.collective_rpc("finish_weight_update")


def bucket_and_process(llm: Any, items: list[tuple[str, torch.Tensor]]) -> None:
    """Path 3: raw ``load_weights`` of buckets that are reused, then PWAL over the model."""
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    worker = worker_of(llm)
    for start in range(0, len(items), 70):
        bucket = [(name, tensor.clone()) for name, tensor in items[start : start + 70]]
        model_of(llm).load_weights(bucket)
        for _, tensor in bucket:
            tensor.fill_(float("nan"))  # the sender's buffer is used for the next bucket
    model_config = worker.vllm_config.model_config
    process_weights_after_loading(model_of(llm), model_config, torch.device("cpu"))


def one_by_one(llm: Any, items: list[tuple[str, torch.Tensor]]) -> None:
    """Path 4: raw ``load_weights``, one tensor per call, and nothing after it."""
    for name, tensor in items:
        buffer = tensor.clone()
        model_of(llm).load_weights([(name, buffer)])
        buffer.fill_(float("nan"))


PATHS = {
    "reload": reload_iterator,
    "transfer": weight_transfer,
    "bucket": bucket_and_process,
    "one by one": one_by_one,
}


# What is looked at ------------------------------------------------------------------------------


def addresses(model: torch.nn.Module) -> dict[str, int]:
    """``data_ptr`` of every parameter and buffer, and of any tensor our layers hold elsewhere."""
    found = {}
    for name, module in model.named_modules():
        tensors = {**module._parameters, **module._buffers}
        if hasattr(module, "quads_units"):
            tensors.update(module.__dict__)
        for units in getattr(module, "quads_units", ()):
            for field in ("packed", "block_scale", "global_scale"):
                tensors[f"{units.name}.{field}"] = getattr(units, field)
        for key, tensor in tensors.items():
            if isinstance(tensor, torch.Tensor):
                found[f"{name}.{key}"] = tensor.data_ptr()
    return found


def state(llm: Any) -> dict[str, Any]:
    """Fingerprints of the quantized weights and the bytes of everything else."""
    from quads_common.fingerprint import combine_ranks

    prints: dict[str, Any] = combine_ranks(llm.collective_rpc("quads_fingerprints"))
    quantized = {
        id(p)
        for module in model_of(llm).modules()
        if hasattr(module, "quads_units")
        for p in module._parameters.values()
    }
    for name, parameter in model_of(llm).named_parameters():
        if id(parameter) not in quantized:
            for i, part in enumerate(checkpoint_tensors(model_of(llm), name, parameter)):
                data = part.detach().float().numpy().tobytes()
                prints[f"{name}.{i}"] = hashlib.sha256(data).hexdigest()
    return prints


def checkpoint_tensors(
    model: torch.nn.Module, name: str, parameter: torch.Tensor
) -> Sequence[torch.Tensor]:
    """A parameter cut into the checkpoint tensors that vLLM fuses in it (q, k, v)."""
    module = model.get_submodule(name.rpartition(".")[0])
    sizes = getattr(module, "output_partition_sizes", [])
    return parameter.split(sizes) if len(sizes) > 1 else [parameter]


def live_bytes() -> int:
    """Bytes of all tensors alive in the process, each storage once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and not thing.is_meta:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def greedy(llm: Any, prompts: list[str]) -> list[tuple[int, ...]]:
    """Greedy tokens, with the prefix cache reset as trainers do."""
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    return [tuple(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]


def combinations(moe: bool) -> Iterator[tuple[str, str]]:
    """Every path with every order that the model has."""
    for path in PATHS:
        for order in ORDERS:
            if moe or order != "stacked":
                yield path, order
