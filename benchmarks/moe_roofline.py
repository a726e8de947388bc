"""Which part of the roofline do MoE layers reach? Fractions of ``bench_moe.py``'s times, drawn."""

import math
from pathlib import Path

__all__ = ["plot", "roofline"]

# Bytes of a weight with its scales: 4 bits and one of 8 for 16 weights; one of float32 for a block
# of 128 x 128; none.
WEIGHT_BYTES = {"fp8": 1 + 4 / 128**2, "bf16": 2.0}
NVFP4_BYTES = 0.5 + 1 / 16


def roofline(times: dict[str, float], nvfp4_floor: float) -> dict[str, float]:
    """Of each column, the time in which the weights of its format can be read over its time.

    times: microseconds, NaN where there are none. nvfp4_floor: of the NVFP4 weights in use.
    """
    return {
        name: nvfp4_floor * WEIGHT_BYTES.get(name, NVFP4_BYTES) / NVFP4_BYTES / time
        for name, time in times.items()
    }


def plot(fractions: dict[int, dict[str, float]], path: Path, title: str) -> None:
    """Fractions by number of tokens, a line for each column; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    counts = sorted(fractions)
    for name in fractions[counts[0]]:
        values = [fractions[count].get(name, math.nan) for count in counts]
        own = name in ("w4a4", "w4a16", "triton")
        axis.plot(counts, values, marker="o", linestyle="-" if own else "--", label=name)
    axis.set_xscale("log", base=2)
    axis.set(xlabel="tokens", ylabel="time to read the weights in use / time", title=title)
    axis.set_ylim(0, 1)
    axis.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
