"""What does quantizing cost in a weight sync, against copying the same BF16 tensors?

    PYTHONPATH=common:. python benchmarks/bench_weight_sync.py
    PYTHONPATH=common:. python benchmarks/bench_weight_sync.py --programs 128,256,512

The tensors of MoE layers (w1, w3, w2 of every expert) lie on the GPU. "copy": each is copied into
its place in stacked BF16 parameters. "units": each goes through ``WeightUnits.load`` into quantized
storage, amax, check for NaN and one device read per parameter included. Codes are compared with the
torch code before anything is timed. Wall time per layer, median of several passes over all layers;
"host" is when the last launch was issued, "gpu" the time of its kernels; what they are is listed.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.moe_shapes import SHAPES
from quads_common import quantize
from quads_common.weight_units import Piece, WeightUnits

Layer = dict[str, list[torch.Tensor]]  # w1, w3, w2: one matrix for each expert


def make_layer(shape: tuple[int, int, int, int], device: str) -> Layer:
    hidden, inner, experts, _ = shape
    sizes = {"w1": (inner, hidden), "w3": (inner, hidden), "w2": (hidden, inner)}
    return {
        name: [
            torch.randn(size, device=device, dtype=torch.bfloat16) * 0.02 for _ in range(experts)
        ]
        for name, size in sizes.items()
    }


class Copies:
    """Stacked BF16 parameters of a layer."""

    def __init__(self, shape: tuple[int, int, int, int], device: str) -> None:
        hidden, self.inner, experts, _ = shape
        self.w13 = torch.empty(
            (experts, 2 * self.inner, hidden), device=device, dtype=torch.bfloat16
        )
        self.w2 = torch.empty((experts, hidden, self.inner), device=device, dtype=torch.bfloat16)

    def load(self, layer: Layer) -> None:
        for e, (w1, w3, w2) in enumerate(zip(layer["w1"], layer["w3"], layer["w2"], strict=True)):
            self.w13[e, : self.inner].copy_(w1)
            self.w13[e, self.inner :].copy_(w3)
            self.w2[e].copy_(w2)


class Quantized:
    """Units of a layer, as an engine makes them."""

    def __init__(
        self, shape: tuple[int, int, int, int], device: str, programs: int | None = None
    ) -> None:
        hidden, inner, experts, _ = shape
        self.w13 = self._units(("w1", "w3"), (experts, 2 * inner, hidden), device, programs)
        self.w2 = self._units(("w2",), (experts, hidden, inner), device, programs)
        self.pieces = {
            "w1": Piece(inner),
            "w3": Piece(inner, first_row=inner),
            "w2": Piece(hidden),
        }

    @staticmethod
    def _units(
        parts: tuple[str, ...], size: tuple[int, int, int], device: str, programs: int | None
    ) -> WeightUnits:
        count, n, k = size
        packed = torch.zeros((count, n, k // 2), dtype=torch.uint8, device=device)
        scale = torch.zeros((count, n, k // 16), dtype=torch.uint8, device=device)
        units = WeightUnits(
            "/".join(parts), parts, packed, scale.view(torch.float8_e4m3fn),
            torch.ones(count, device=device), lambda unit: [],
        )  # fmt: skip
        if programs is not None:
            gpu = units._gpu()
            assert gpu is not None, "programs are for a GPU"
            gpu.programs = programs
        return units

    def load(self, layer: Layer) -> None:
        w13, w2, pieces = self.w13.load, self.w2.load, self.pieces
        for e, (a, b, c) in enumerate(zip(layer["w1"], layer["w3"], layer["w2"], strict=True)):
            w13(e, "w1", a, "w1", pieces["w1"])
            w13(e, "w3", b, "w3", pieces["w3"])
            w2(e, "w2", c, "w2", pieces["w2"])


def check(quantized: Quantized, layer: Layer) -> None:
    """Refuse to time wrong codes."""
    last = len(layer["w2"]) - 1
    for e in (0, last):
        w13 = torch.cat([layer["w1"][e], layer["w3"][e]])
        for units, weight in ((quantized.w13, w13), (quantized.w2, layer["w2"][e])):
            got, want = units.quantized(e), quantize(weight)
            same = torch.equal(got.packed, want.packed) and torch.equal(
                got.block_scale.view(torch.uint8), want.block_scale.view(torch.uint8)
            )
            if not same or got.global_scale != want.global_scale:
                raise SystemExit(f"{units.name}: codes of expert {e} are wrong")


def measure(
    load: Callable[[int], None], layers: int, passes: int, wait: Callable[[], None]
) -> tuple[float, float]:
    """Median milliseconds per layer: until the last launch is issued, and until all is done."""
    host, wall = [], []
    for _ in range(passes + 2):
        wait()
        start = time.perf_counter()
        for i in range(layers):
            load(i)
        issued = time.perf_counter()
        wait()
        host.append((issued - start) * 1e3 / layers)
        wall.append((time.perf_counter() - start) * 1e3 / layers)
    return statistics.median(host[2:]), statistics.median(wall[2:])


def gpu_times(load: Callable[[int], None], layers: int) -> dict[str, tuple[float, int]]:
    """Milliseconds and launches per layer of each kernel, from torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for i in range(layers):
            load(i)
        torch.cuda.synchronize()
    found = {}
    for event in profiler.key_averages():
        if event.self_device_time_total:
            time_ms = event.self_device_time_total / 1e3 / layers
            found[event.key[:48]] = (time_ms, event.count // layers)
    return found


def report(name: str, times: tuple[float, float], base: float, kernels: dict) -> None:
    gpu = sum(ms for ms, _ in kernels.values())
    host, wall = times
    print(f"{name:20} {host:9.3f} {wall:9.3f} {gpu:9.3f} {wall / base:9.2f}", flush=True)
    for kernel, (ms, count) in sorted(kernels.items(), key=lambda item: -item[1][0])[:6]:
        print(f"{'':20} {count:4} x {ms * 1e3 / max(1, count):7.2f} us  {kernel}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=4, help="different tensors, so a cold L2")
    parser.add_argument("--passes", type=int, default=7)
    parser.add_argument("--programs", default="", help="of a launch, comma separated")
    parser.add_argument("--device", default="cuda", help="cpu: the torch code, for a try")
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    shape = SHAPES[args.shape]
    torch.manual_seed(0)
    print(torch.cuda.get_device_name() if on_gpu else "cpu", torch.__version__, args.shape)
    sources = [make_layer(shape, args.device) for _ in range(args.layers)]
    nbytes = sum(t.nbytes for tensors in sources[0].values() for t in tensors)
    count = sum(len(tensors) for tensors in sources[0].values())
    print(f"{count} tensors, {nbytes / 1e9:.2f} GB a layer; milliseconds a layer")
    print(f"{'path':20} {'host':>9} {'wall':>9} {'gpu':>9} {'to copy':>9}")

    def run(name: str, make: Callable[[], Copies | Quantized], base: float | None) -> float:
        targets = [make() for _ in range(args.layers)]
        first = targets[0]
        first.load(sources[0])
        if isinstance(first, Quantized):
            check(first, sources[0])
        load = lambda i: targets[i].load(sources[i])  # noqa: E731
        times = measure(load, args.layers, args.passes, wait)
        kernels = gpu_times(load, args.layers) if on_gpu else {}
        report(name, times, base or times[1], kernels)
        return times[1]

    base = run("copy", lambda: Copies(shape, args.device), None)
    run("units", lambda: Quantized(shape, args.device), base)
    for programs in (int(p) for p in args.programs.split(",") if p):
        name = f"units, {programs} programs"
        run(name, lambda p=programs: Quantized(shape, args.device, p), base)
    run("copy", lambda: Copies(shape, args.device), base)


if __name__ == "__main__":
    main()
