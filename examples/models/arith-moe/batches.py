"""Problems as fixed-length token rows on the training device, and random batches of them."""

from collections.abc import Iterable, Mapping

import torch
from arith_model import BOS_ID, EOS_ID, PAD_ID, VOCAB
from problems import Group, Problem, training
from torch import Tensor

ROW_TOKENS = len("^999-999=-999$")
# One-character stand-ins for the special tokens, used only to build rows.
BOS_CHAR, EOS_CHAR, PAD_CHAR = "^$_"


def encode(problems: Iterable[Problem]) -> tuple[Tensor, Tensor]:
    """Return inputs and next-token labels (both uint8, right padded) of the problems.

    A label is PAD except where it is a token of the answer or its </s>.
    """
    char_ids = torch.zeros(128, dtype=torch.uint8)
    for char, token in {**VOCAB, BOS_CHAR: BOS_ID, EOS_CHAR: EOS_ID, PAD_CHAR: PAD_ID}.items():
        if len(char) == 1:
            char_ids[ord(char)] = token
    texts: list[str] = []
    targets: list[str] = []
    for prompt, answer in problems:
        ending = answer + EOS_CHAR
        texts.append((BOS_CHAR + prompt + ending).ljust(ROW_TOKENS, PAD_CHAR))
        targets.append((PAD_CHAR * len(prompt) + ending).ljust(ROW_TOKENS - 1, PAD_CHAR))
    inputs, labels = (
        torch.frombuffer(bytearray("".join(rows), "ascii"), dtype=torch.uint8).view(len(rows), -1)
        for rows in (texts, targets)
    )
    return char_ids[inputs[:, :-1].int()], char_ids[labels.int()]


class TrainingRows:
    """All training problems as token rows on one device; draws batches by group shares."""

    def __init__(self, shares: Mapping[Group, float], device: str, seed: int) -> None:
        parts = [encode(training(group)) for group in shares]
        self.inputs = torch.cat([inputs for inputs, _ in parts]).to(device)
        self.labels = torch.cat([labels for _, labels in parts]).to(device)
        sizes = torch.tensor([len(inputs) for inputs, _ in parts], device=device)
        self.sizes, self.starts = sizes, sizes.cumsum(0) - sizes
        weights = torch.tensor(list(shares.values()), dtype=torch.float64, device=device)
        self.bounds = weights.cumsum(0)
        self.generator = torch.Generator(device).manual_seed(seed)

    def __len__(self) -> int:
        return len(self.inputs)

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        """Return count random rows: inputs and labels as int64."""
        uniform = torch.rand(
            2, count, generator=self.generator, device=self.bounds.device, dtype=torch.float64
        )
        group = torch.bucketize(uniform[0] * self.bounds[-1], self.bounds, right=True)
        group = group.clamp(max=len(self.bounds) - 1)
        rows = self.starts[group] + (uniform[1] * self.sizes[group]).long()
        return self.inputs[rows].long(), self.labels[rows].long()
