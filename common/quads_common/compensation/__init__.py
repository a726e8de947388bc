"""Compensation of quantized activations: statistics, selections, and the layers that use them.

Online statistics of a GEMM's input choose, at weight syncs, the 16-blocks whose quantization
residual is added (RAC) and the channels that skip quantization (splice). The layers here define the
semantics in torch; kernels must equal them.
"""

from quads_common.compensation.files import (
    read_selection_file,
    restore,
    snapshot,
    write_selection_file,
)
from quads_common.compensation.linear import linear_compensated
from quads_common.compensation.metrics import SiteMetrics
from quads_common.compensation.moe import Gathering, fused_moe_compensated
from quads_common.compensation.operands import InputCompensation
from quads_common.compensation.options import PRESETS, CompensationOptions
from quads_common.compensation.refresh import refresh
from quads_common.compensation.site import Site
from quads_common.compensation.staging import Staging
from quads_common.compensation.state import SiteState, new_site_state

__all__ = [
    "PRESETS",
    "CompensationOptions",
    "Gathering",
    "InputCompensation",
    "Site",
    "SiteMetrics",
    "SiteState",
    "Staging",
    "fused_moe_compensated",
    "linear_compensated",
    "new_site_state",
    "read_selection_file",
    "refresh",
    "restore",
    "snapshot",
    "write_selection_file",
]
