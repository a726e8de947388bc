"""Which rows are counted: of every ``period`` tokens in order of arrival exactly one.

Which one is drawn from a hash of the window's number, so a sequence that always has the same place
in the batch is not favoured. How tokens are spread over forwards makes no difference, as long as a
forward touches no more windows than it may have samples.
"""

__all__ = ["most_samples", "sampled_rows"]

# Odd constants of splitmix64.
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = 0xBF58476D1CE4E5B9
_MASK = 2**64 - 1


def sampled_rows(offered: int, tokens: int, period: int, most: int) -> list[int]:
    """The sampled ones of a forward's ``tokens`` rows, ascending; ``offered`` came before them.

    most: windows that are considered; of more, an evenly spread subset.
    """
    if tokens == 0:
        return []
    first = offered // period
    windows = (offered + tokens - 1) // period - first + 1
    chosen = range(windows)
    if windows > most:
        chosen = [i * windows // most for i in range(most)]  # type: ignore[assignment]
    rows = (_sample(first + i, period) - offered for i in chosen)
    return [row for row in rows if 0 <= row < tokens]


def most_samples(tokens: int, period: int) -> int:
    """Windows that a forward of at most ``tokens`` tokens can touch."""
    return min(tokens, (tokens - 2 + period) // period + 1)


def _sample(window: int, period: int) -> int:
    """The token of a window that is sampled, counted from the first token of all."""
    mixed = window * _GOLDEN & _MASK
    mixed = (mixed ^ mixed >> 32) * _MIX & _MASK
    return window * period + (mixed >> 33) % period
