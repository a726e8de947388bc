"""Synthetic batches whose drifted sequences are known."""

from dataclasses import dataclass

import torch

# strength -> standard deviation of the gap in nats. k3 is about half of the variance: .0008 (below
# the limit of .01), .02 (twice the limit), .4 with many tokens beyond two nats.
STRENGTHS = {"weak": 0.04, "medium": 0.2, "strong": 0.9}
ENGINE_NOISE = 0.02


@dataclass
class Batch:
    """delta, mask: [B, T]. drifted: strength -> indices of sequences."""

    delta: torch.Tensor
    mask: torch.Tensor
    drifted: dict[str, list[int]]


def drifted_batch(
    sequences: int, each: int, *, seed: int = 0, shortest: int = 64, longest: int = 400
) -> Batch:
    """``each`` sequences of every strength among engine noise; places and lengths random."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (sequences,), generator=generator)
    mask = torch.arange(longest) < lengths.unsqueeze(1)
    deviation = torch.full((sequences, 1), ENGINE_NOISE)
    places = torch.randperm(sequences, generator=generator).tolist()
    drifted = {}
    for strength, size in STRENGTHS.items():
        chosen, places = sorted(places[:each]), places[each:]
        deviation[chosen] = size
        drifted[strength] = chosen
    delta = torch.randn(sequences, longest, generator=generator) * deviation
    # What lies under the mask must not matter.
    return Batch(delta.masked_fill(~mask, 1e4), mask, drifted)
