"""What compensation recovers: log-probs and accuracy of arith-moe with hot channels.

    python benchmarks/accuracy_compensation.py [--problems 500] [--sequences 300] [--plot FILE]

Hot channels 32 times as large (see ``accuracy_arith_moe.py``). Statistics come from other problems
than those that are measured. |log-prob difference| of every token of teacher-forced sequences, to
W4A16 for RAC and splice (they compensate activations), to BF16 for ``foursight``. Standard errors
are over sequences, paired: of the mean from the differences of each sequence, of p99 from 500
bootstrap samples of sequences. One engine per method; the ratios are lists that one engine chooses
from the same statistics. Needs the CPU environment, or a GPU; the plot needs matplotlib.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from accuracy_arith_moe import heldout, make_variant

from tests.vllm.engine import run_engine

RATIOS = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)
STATISTICS = ("residual", "variance")
COUNTED = {"sampling_rate": 1, "min_tokens": 32}
MOST_TOKENS = 256  # of a forward, so that every one is counted
SPLICE = {"splice_count_w13": 16, "splice_count_w2": 16}
CALIBRATION = 400
BOOTSTRAP = 500

Gap = list[torch.Tensor]  # |differences| of each sequence's tokens


def main() -> None:
    """Print the tables; write the plot if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=500, help="held-out problems, accuracy")
    parser.add_argument("--sequences", type=int, default=300, help="held-out ones, log-probs")
    parser.add_argument("--plot", type=Path, help="PNG file to write")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_variant(Path(folder) / "hot", ("--scale", "32"))
        results = measure(Path(folder), model, heldout(args.problems), args.sequences)
    right = [answer for _, answer in heldout(args.problems)]
    print_accuracies(results, right)
    by_statistic = {s: ratio_gaps(results, s) for s in STATISTICS}
    for statistic, gaps in by_statistic.items():
        print_ratios(statistic, gaps)
    print_presets(results)
    if args.plot is not None:
        plot(by_statistic, args.plot)


def measure(
    folder: Path, model: Path, problems: list[tuple[str, str]], count: int
) -> dict[str, dict[str, Any]]:
    """Results of the engines by name: log-probs and answers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    sequences = [tokenizer(prompt + answer)["input_ids"] for prompt, answer in problems[:count]]
    prompts = [prompt for prompt, _ in problems]
    other = [prompt + answer for prompt, answer in heldout(len(problems) + CALIBRATION)]
    calibration = other[len(problems) :]

    def both(name: str) -> list[tuple[str, str, list]]:
        return [(f"{name} logprobs", "logprobs", [sequences]), (name, "answers", [prompts])]

    def run(name: str, probes: list, options: dict[str, Any] | None) -> dict[str, Any]:
        how = {} if options is None else {"quantization": "quads_nvfp4"}
        if options is not None:
            how["additional_config"] = {"quads": options}
        return run_engine(folder / name, model, probes, max_num_batched_tokens=MOST_TOKENS, **how)

    ratios: list[tuple[str, str, list]] = [("counted", "count", [calibration])]
    for statistic in STATISTICS:
        for ratio in RATIOS:
            changes = {"rac_ratio": ratio, "rac_statistic": statistic}
            name = f"{statistic} {ratio}"
            ratios += [("chosen", "choose", [changes]), (name, "logprobs", [sequences])]
    calibrate = [("calibrated", "calibrated", [calibration])]
    return {
        "BF16": run("bf16", both("it"), None),
        "W4A16": run("w4a16", both("it"), {"act": "bf16"}),
        "nvfp4": run("nvfp4", both("it"), {"method": "nvfp4"}),
        "ratios": run("ratios", ratios, {"method": "quads", **COUNTED}),
        "quads": run("quads", [*calibrate, *both("it")], {"method": "quads", **COUNTED}),
        "quads_splice": run(
            "splice",
            [*calibrate, *both("it"), ("-", "drop_residual", []), *both("splice alone")],
            {"method": "quads_splice", **SPLICE, **COUNTED},
        ),
        "splice by residual": run(
            "by_residual",
            [*calibrate, *both("it")],
            {"method": "quads_splice", "rac_ratio": 0, "splice_statistic": "residual"}
            | {"splice_count_linear": 0, **SPLICE, **COUNTED},
        ),
        "foursight": run(
            "foursight",
            [*calibrate, ("synced", "reload", [str(model)]), *both("it")],
            {"method": "foursight", **SPLICE, **COUNTED},
        ),
    }


def gap(a: list[torch.Tensor], b: list[torch.Tensor]) -> Gap:
    """|a - b| by sequence."""
    return [(x.double() - y.double()).abs() for x, y in zip(a, b, strict=True)]


def ratio_gaps(results: dict[str, dict[str, Any]], statistic: str) -> dict[float, Gap]:
    """Gaps to W4A16 by ratio."""
    to = results["W4A16"]["it logprobs"]
    return {r: gap(results["ratios"][f"{statistic} {r}"], to) for r in RATIOS}


def mean(g: Gap) -> float:
    """Over sequences, of their means."""
    return float(torch.stack([x.mean() for x in g]).mean())


def p99(g: Gap) -> float:
    """Over all tokens."""
    return float(torch.cat(g).quantile(0.99))


def steps(a: Gap, b: Gap) -> dict[str, tuple[float, float]]:
    """(a - b, paired standard error) of the mean and of p99."""
    by_sequence = torch.stack([x.mean() - y.mean() for x, y in zip(a, b, strict=True)])
    error = float(by_sequence.std() / len(a) ** 0.5)
    generator = torch.Generator().manual_seed(0)
    samples = []
    for _ in range(BOOTSTRAP):
        picks = torch.randint(0, len(a), (len(a),), generator=generator).tolist()
        samples.append(p99([a[i] for i in picks]) - p99([b[i] for i in picks]))
    spread = float(torch.tensor(samples).std())
    return {"mean": (float(by_sequence.mean()), error), "p99": (p99(a) - p99(b), spread)}


def verdict(difference: float, error: float) -> str:
    """Whether a step is seen."""
    if abs(difference) < 2 * error:
        return "equal"
    return "falls" if difference > 0 else "RISES"


def print_accuracies(results: dict[str, dict[str, Any]], right: list[str]) -> None:
    """Share of exact answers of every preset."""
    print(f"accuracy on {len(right)} held-out problems, hot x 32")
    rows = {name: result["it"] for name, result in results.items() if name != "ratios"}
    rows["splice alone"] = results["quads_splice"]["splice alone"]
    for name, answers in rows.items():
        share = sum(a == b for a, b in zip(answers, right, strict=True)) / len(right)
        print(f"| {name} | {share:.1%} |")


def print_ratios(statistic: str, gaps: dict[float, Gap]) -> None:
    """One line for each ratio, with the step from the one before."""
    print(f"\nRAC, blocks by {statistic}: |log-prob difference| to W4A16")
    print("| ratio | mean | step | 2 SE | | p99 | step | 2 SE | |")
    before: Gap | None = None
    for ratio, g in gaps.items():
        cells = []
        step = None if before is None else steps(before, g)
        for key, value in (("mean", mean(g)), ("p99", p99(g))):
            cells.append(f"{value:.5f}")
            if step is None:
                cells += ["", "", ""]
            else:
                difference, error = step[key]
                cells += [f"{difference:.5f}", f"{2 * error:.5f}", verdict(difference, error)]
        print(f"| {ratio} | {' | '.join(cells)} |")
        before = g


def print_presets(results: dict[str, dict[str, Any]]) -> None:
    """Gaps of the presets to both references, and splice by residual against variance."""
    rows = {n: r["it logprobs"] for n, r in results.items() if n not in ("ratios", "BF16")}
    rows["splice alone"] = results["quads_splice"]["splice alone logprobs"]
    print("\n| | mean to W4A16 | p99 | mean to BF16 | p99 |")
    for name, found in rows.items():
        gaps = [gap(found, results[to]["it logprobs"]) for to in ("W4A16", "BF16")]
        print(f"| {name} | " + " | ".join(f"{mean(g):.5f} | {p99(g):.5f}" for g in gaps) + " |")
    to = results["W4A16"]["it logprobs"]
    by_residual = gap(rows["splice by residual"], to)
    for key, (d, error) in steps(by_residual, gap(rows["splice alone"], to)).items():
        print(f"splice by residual minus by variance, {key}: {d:.5f} +- {2 * error:.5f} (2 SE)")


def plot(by_statistic: dict[str, dict[float, Gap]], path: Path) -> None:
    """Mean and p99 over the ratio."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    for axis, (what, measure_of) in zip(axes, (("mean", mean), ("p99", p99)), strict=True):
        for statistic, gaps in by_statistic.items():
            values = [measure_of(g) for g in gaps.values()]
            axis.plot(list(gaps), values, marker="o", label=f"blocks by {statistic}")
        axis.set(xlabel="RAC ratio", ylabel=f"{what} |log-prob difference| to W4A16", yscale="log")
        axis.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
