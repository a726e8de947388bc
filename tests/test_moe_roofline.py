"""Roofline fractions of the MoE benchmark: bytes of each format."""

import math

import pytest

from benchmarks.moe_roofline import roofline


def test_each_format_reads_its_own_bytes():
    """A layer of 1e6 weights, at 1e6 bytes per microsecond: 0.5625, 1.00024, 2 us to read them."""
    times = {"w4a4": 1.125, "marlin": 0.5625, "fp8": 2.0, "bf16": 4.0, "triton": math.nan}
    found = roofline(times, 0.5625)
    assert math.isnan(found.pop("triton"))
    assert found == {
        "w4a4": pytest.approx(0.5),
        "marlin": pytest.approx(1.0),
        "fp8": pytest.approx(1.000244140625 / 2),
        "bf16": pytest.approx(0.5),
    }
