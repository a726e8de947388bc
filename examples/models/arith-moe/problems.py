"""Addition and subtraction problems: their format, their held-out split and how they are drawn.

Plain Python without torch, so that tests, rewards and demos can import it cheaply.
A problem is ``a op b`` with operands of 2 or 3 digits; its prompt is ``"347+589="``, its answer
``"936"`` (``"-333"`` where a difference is negative). The model ends an answer with ``</s>``.
"""

import random
import zlib
from collections.abc import Iterator, Mapping

OPERATORS = "+-"
OPERAND_RANGES = {2: range(10, 100), 3: range(100, 1000)}
# (digits of a, digits of b) -> share of the problems drawn, in training and in held-out alike.
GROUP_SHARES = {(2, 2): 0.1, (2, 3): 0.2, (3, 2): 0.2, (3, 3): 0.5}
HELDOUT_ONE_IN = 10

Group = tuple[int, int]
Problem = tuple[str, str]


def format_prompt(a: int, op: str, b: int) -> str:
    """Return the text the model is given."""
    return f"{a}{op}{b}="


def format_answer(a: int, op: str, b: int) -> str:
    """Return the completion the model must give before ``</s>``."""
    return str(a + b if op == "+" else a - b)


def is_heldout(a: int, op: str, b: int) -> bool:
    """Say whether (a, op, b) belongs to the held-out tenth, which training never sees."""
    return zlib.crc32(format_prompt(a, op, b).encode()) % HELDOUT_ONE_IN == 0


def training(group: Group) -> Iterator[Problem]:
    """Yield every training problem (prompt, answer) of one group of operand lengths."""
    for a in OPERAND_RANGES[group[0]]:
        for b in OPERAND_RANGES[group[1]]:
            for op in OPERATORS:
                if not is_heldout(a, op, b):
                    yield format_prompt(a, op, b), format_answer(a, op, b)


def heldout(n: int, seed: int, shares: Mapping[Group, float] = GROUP_SHARES) -> list[Problem]:
    """Return n different held-out problems (prompt, answer), drawn by seed."""
    total = sum(len(OPERAND_RANGES[i]) * len(OPERAND_RANGES[j]) for i, j in shares)
    if n > total * len(OPERATORS) // HELDOUT_ONE_IN // 2:
        raise ValueError(f"{n} held-out problems asked for, which is over half of all there are")
    rng = random.Random(seed)
    groups, weights = list(shares), list(shares.values())
    found: dict[str, str] = {}
    while len(found) < n:
        digits_a, digits_b = rng.choices(groups, weights)[0]
        a, b = rng.choice(OPERAND_RANGES[digits_a]), rng.choice(OPERAND_RANGES[digits_b])
        op = rng.choice(OPERATORS)
        if is_heldout(a, op, b):
            found[format_prompt(a, op, b)] = format_answer(a, op, b)
    return list(found.items())
