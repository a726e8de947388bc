"""Two trainer processes: the check after a sync in server mode, and the figures of the gap."""

import json

import pytest

pytest.importorskip("trl", reason="needs TRL: make test-trainers")

from tests.trainers.running import FOLDER, run_python


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    run_python(folder, *launcher, FOLDER / "run_trl_two_ranks.py", folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_every_rank_checks_sharded_weights(ranks):
    assert [seen["checked"] for seen in ranks] == [[4 * 16 * 2]] * 2


def test_every_rank_raises(ranks):
    for seen in ranks:
        kind, message = seen["errors"][0]
        assert kind == "WeightsDifferError" and message.startswith("1 of 128 quantized tensors")
    assert ranks[0]["errors"][1] == ["KeyError", "'no answer'"]
    assert ranks[1]["errors"][1][0] == "RuntimeError"


def test_the_gap_is_of_all_ranks(ranks):
    for seen in ranks:
        assert seen["gap"]["logprob_gap/tokens"] == 12
        assert seen["gap"]["logprob_gap/sequences"] == 4
        # float32 log-probs of -0.9 and -0.7
        assert seen["gap"]["logprob_gap/mean"] == pytest.approx((8 * 0.1 + 4 * 0.3) / 12, rel=1e-6)
