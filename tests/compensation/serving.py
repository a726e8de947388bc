"""Two small inputs, and what serves rows to their statistics."""

import torch

from quads_common.compensation import CompensationOptions, Site, new_site_state
from quads_common.compensation.observe import observe
from quads_common.compensation.refresh import SiteState
from tests.common.samples import normal

K, EXPERTS = 128, 3
W13 = Site("layers.0.w13", "w13", K, K)
W2 = Site("layers.0.w2", "w2", K, K, 0, tuple(range(EXPERTS)), EXPERTS)


def options(**changes) -> CompensationOptions:
    defaults = {"rac_ratio": 0.5, "splice_count_w13": 16, "splice_count_w2": 16}
    return CompensationOptions(**{**defaults, "min_tokens": 8, "sampling_rate": 1.0, **changes})


def new(site: Site, chosen: CompensationOptions) -> SiteState:
    state = new_site_state(site, chosen)
    state.statistics.enabled.fill_(True)
    return state


def feed(state: SiteState, x, chosen: CompensationOptions, expert: int | None = None) -> None:
    served = state.selection.compensation(chosen, state.site.kind)
    ids = None
    if expert is not None:
        x, ids = x.unsqueeze(1), torch.full((len(x), 1), expert)
    observe(state.statistics, x, served, chosen.sampling_period, expert_ids=ids)


def rows_with(hot: list[int], rows: int, seed: int) -> torch.Tensor:
    x = normal(rows, K, seed=seed, dtype=torch.float32)
    x[:, hot] *= 25
    return x.to(torch.bfloat16)


PLANTED = sorted([0, 1, 17, 31, 32, 40, 41, 63, 64, 77, 90, 100, 111, 112, 126, 127])
