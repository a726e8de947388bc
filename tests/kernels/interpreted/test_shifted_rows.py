"""The compensated quantizer where hot channels are shifted by the most, against ``fold``: bits."""

import pytest

from quads_common.compensation.operands import compensated_operands
from quads_common.kernels.compensated_rows import compensate_rows
from tests.kernels.compare_compensated_rows import same_rows
from tests.kernels.compensated_cases import Preset
from tests.kernels.shifted_rows import shifted_rows, shifts_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("rac", [None, 0.5])
def test_largest_shifts_equal_torch(rac):
    lists = Preset(rac, 32).lists(160, 1, 4, "cpu")
    x = shifted_rows(160, lists)
    assert shifts_of(x, lists) == [120, 121, 122, 123, 124, 125, 126, 126]
    got = compensate_rows(x, lists)
    same, differences = same_rows(got, compensated_operands(x, lists), 160, False)
    assert same, differences
