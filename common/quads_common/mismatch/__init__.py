"""Training-inference mismatch (TIM): measure it, and leave drifted sequences out of an update.

Everything is a function of ``delta = logp_train - logp_rollout`` on the sampled response tokens,
in plain torch; trainers' plug-ins only bring their tensors into that form.
"""

from quads_common.mismatch.calibration import calibrate, load_options, save_options
from quads_common.mismatch.filter import FilterOptions, FilterResult, RunningCap, select_sequences
from quads_common.mismatch.metrics import filter_metrics
from quads_common.mismatch.report import GapReport, gap_report
from quads_common.mismatch.statistics import SequenceStatistics, sequence_statistics

__all__ = [
    "FilterOptions",
    "FilterResult",
    "GapReport",
    "RunningCap",
    "SequenceStatistics",
    "calibrate",
    "filter_metrics",
    "gap_report",
    "load_options",
    "save_options",
    "select_sequences",
    "sequence_statistics",
]
