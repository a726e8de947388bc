"""Write a variant of an arith-moe checkpoint whose MoE inputs have outlier channels.

    python make_outliers.py SRC DST --scale 32               # hot channels: nothing reads them
    python make_outliers.py SRC DST --scale 32 --mode live   # ordinary channels, in use

Both modes multiply the post_attention_layernorm gain of some channels by a power of two. In mode
hot these are the channels whose consumer columns training kept at zero, and no other weight
changes. In mode live they are ordinary channels, and the columns that read them (gate_proj,
up_proj, router) are divided by the same power of two. Either way BF16 computes the same function,
bit for bit, while a quantizer sees the outliers.
"""

import argparse
import json
import math
import random
import shutil
import sys
from pathlib import Path

import torch
from arith_model import BLOCK, CHECKPOINT_FILE, consumer_names
from safetensors.torch import load_file, save_file
from torch import Tensor

CONFIG_FILE = "config.json"


def scale_columns(weight: Tensor, channels: list[int], factor: float) -> Tensor:
    """Return weight with some columns (of a gain: entries) times factor; raise if inexact."""
    scaled = weight.clone()
    scaled[..., channels] *= factor
    if not scaled.isfinite().all() or not torch.equal(
        scaled[..., channels] / factor, weight[..., channels]
    ):
        raise ValueError(f"a factor of {factor:g} is not exact in {weight.dtype} for this weight")
    return scaled


def pick_live_channels(hot: list[int], hidden: int, count: int, rng: random.Random) -> list[int]:
    """Choose count channels that are not hot, at most one in any block of 16."""
    blocks = hidden // BLOCK
    if not 1 <= count <= blocks:
        raise ValueError(f"--channels must be 1 to {blocks} (one for a block), not {count}")
    return [
        rng.choice([c for c in range(BLOCK * block, BLOCK * (block + 1)) if c not in hot])
        for block in sorted(rng.sample(range(blocks), count))
    ]


def read_checkpoint(source: Path) -> tuple[dict, dict[str, Tensor]]:
    """Return the config and the weights of a checkpoint that has hot channels."""
    for name in (CONFIG_FILE, CHECKPOINT_FILE):
        if not (source / name).is_file():
            raise ValueError(f"{source / name} does not exist")
    config = json.loads((source / CONFIG_FILE).read_text())
    if not any(config.get("arith_moe", {}).get("hot_channels", [])):
        raise ValueError(f"{source / CONFIG_FILE} has no arith_moe.hot_channels")
    return config, load_file(source / CHECKPOINT_FILE)


def apply_outliers(
    config: dict, weights: dict[str, Tensor], channels: list[list[int]], args: argparse.Namespace
) -> None:
    """Scale the gain of the channels of each layer in place and, if live, undo it downstream."""
    experts = config.get("num_experts") or config["num_local_experts"]
    for layer, chosen in enumerate(channels):
        gain = f"model.layers.{layer}.post_attention_layernorm.weight"
        readers, _ = consumer_names(layer, experts)
        weights[gain] = scale_columns(weights[gain], chosen, args.scale)
        # The norm's output is at most gain * sqrt(hidden): it must not overflow to infinity.
        if not (weights[gain] * config["hidden_size"] ** 0.5).isfinite().all():
            raise ValueError(f"--scale {args.scale:g} overflows {weights[gain].dtype}")
        for name in readers:
            if args.mode == "live":
                weights[name] = scale_columns(weights[name], chosen, 1 / args.scale)
            elif weights[name][:, chosen].any():
                raise ValueError(f"{name} reads a hot channel: its column is not zero")


def write_variant(args: argparse.Namespace) -> list[list[int]]:
    """Write the variant and return the channels scaled in each layer."""
    if args.scale <= 0 or math.frexp(args.scale)[0] != 0.5:
        raise ValueError(f"--scale must be a power of two, not {args.scale:g}")
    if args.destination.exists():
        raise ValueError(f"{args.destination} already exists")
    config, weights = read_checkpoint(args.source)
    channels = config["arith_moe"]["hot_channels"]
    if args.mode == "live":
        rng = random.Random(f"live channels {args.seed}")
        channels = [
            pick_live_channels(hot, config["hidden_size"], args.channels, rng) for hot in channels
        ]
    apply_outliers(config, weights, channels, args)
    record = {"mode": args.mode, "scale": args.scale, "channels": channels}
    config["arith_moe"].setdefault("outliers", []).append(record)
    shutil.copytree(args.source, args.destination)
    save_file(weights, args.destination / CHECKPOINT_FILE, metadata={"format": "pt"})
    (args.destination / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return channels


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, metavar="SRC", help="checkpoint directory")
    parser.add_argument("destination", type=Path, metavar="DST", help="directory to create")
    parser.add_argument("--scale", type=float, required=True, help="a power of two")
    parser.add_argument("--mode", choices=("hot", "live"), default="hot")
    parser.add_argument("--channels", type=int, default=8, help="live channels in each layer")
    parser.add_argument("--seed", type=int, default=0, help="choice of the live channels")
    return parser.parse_args()


def main() -> int:
    """Write the variant; return 1 after a one-line message if the input is bad."""
    args = parse_args()
    try:
        channels = write_variant(args)
    except (ValueError, OSError) as error:
        print(f"make_outliers.py: error: {error}", file=sys.stderr)
        return 1
    print(f"{args.destination}: {args.mode} channels x {args.scale:g}: {channels}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
