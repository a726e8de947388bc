"""Options and presets: the design's values; errors name key, value and what is allowed."""

import json

import pytest

from quads_common.compensation import PRESETS, CompensationOptions, Site
from quads_common.compensation.options import KINDS


def test_presets():
    found = {name: CompensationOptions.from_preset(name) for name in PRESETS}
    shown = {
        name: (o.rac_ratio, o.splice_count_w13, o.splice_count_w2, o.splice_weight)
        for name, o in found.items()
    }
    assert shown == {
        "nvfp4": (0, 0, 0, "dequant"),
        "quads": (0.5, 0, 0, "dequant"),
        "foursight": (0, 64, 32, "bf16"),
        "quads_splice": (0.5, 64, 32, "dequant"),
    }
    assert [any(o.active(kind) for kind in KINDS) for o in found.values()] == [
        False,
        True,
        True,
        True,
    ]
    for o in found.values():
        assert (o.rac_alpha, o.ema, o.rac_statistic, o.splice_statistic) == (
            1, 0.9, "residual", "variance",
        )  # fmt: skip
        assert o.sampling_period == 64


def test_every_knob_stays_settable():
    o = CompensationOptions.from_preset(
        "quads", {"splice_count_w2": 48, "splice_weight": "bf16", "compensate": ["w2"]}
    )
    assert o.ratio("w2") == 0.5 and o.ratio("w13") == 0 and o.splice_count("w2") == 48
    assert o.active("w2") and not o.active("linear")
    again = CompensationOptions.from_preset("nvfp4", json.loads(json.dumps(o.to_dict())))
    assert again == o


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rac_ratio": 1.5}, r"rac_ratio 1\.5 .*from 0 to 1"),
        ({"rac_ratio": -0.1}, r"rac_ratio -0\.1 .*from 0 to 1"),
        ({"rac_ratio": float("nan")}, r"rac_ratio nan .*from 0 to 1"),
        ({"rac_ratio": "0.5"}, r"rac_ratio '0\.5' .*number"),
        ({"rac_ratio": True}, r"rac_ratio True .*number"),
        ({"rac_alpha": 0}, r"rac_alpha 0 .*above 0 to 1"),
        ({"rac_alpha": 2}, r"rac_alpha 2 .*above 0 to 1"),
        ({"ema": 1.0}, r"ema 1\.0 .*to below 1"),
        ({"ema": -0.5}, r"ema -0\.5 .*from 0"),
        ({"sampling_rate": 0}, r"sampling_rate 0 .*above 0"),
        ({"sampling_rate": float("inf")}, r"sampling_rate inf .*to 1"),
        ({"splice_count_w13": -16}, r"splice_count_w13 -16 .*integer from 0"),
        ({"splice_count_w2": 1.5}, r"splice_count_w2 1\.5 .*integer"),
        ({"splice_count_linear": True}, r"splice_count_linear True .*integer"),
        ({"refresh_interval": 0}, r"refresh_interval 0 .*integer from 1"),
        ({"min_tokens": 0}, r"min_tokens 0 .*integer from 1"),
        ({"sampling_rate": 1e-20}, r"sampling_rate 1e-20 .*from 2\*\*-62 to 1"),
        ({"sampling_rate": 5e-324}, r"sampling_rate 5e-324 .*from 2\*\*-62"),
        ({"min_tokens": 2**63}, r"min_tokens 9223372036854775808 .*to 2\*\*63 - 1"),
        (
            {"min_tokens": 10**400},
            r"min_tokens \(an integer of more.*integer from 1 to 2\*\*63 - 1",
        ),
        ({"min_tokens": 1e3}, r"min_tokens 1000\.0 .*integer"),
        ({"refresh_interval": 10**400}, r"refresh_interval .*to 2\*\*63 - 1"),
        ({"splice_count_w13": 10**400}, r"splice_count_w13 .*to 2\*\*63 - 1"),
        ({"compensate": [["w13"]]}, r"compensate \[\['w13'\]\] .*linear"),
        ({"compensate": [{}]}, r"compensate \[\{\}\] .*linear"),
        ({"rac_statistic": "max"}, r"rac_statistic 'max' .*residual.*variance"),
        ({"splice_statistic": "mean"}, r"splice_statistic 'mean' .*variance"),
        ({"splice_weight": "fp8"}, r"splice_weight 'fp8' .*dequant.*bf16"),
        ({"compensate": []}, r"compensate \[\] .*w13.*w2.*linear"),
        ({"compensate": ["w1"]}, r"compensate \['w1'\] .*w13"),
        ({"compensate": ["w2", "w2"]}, r"compensate \['w2', 'w2'\] .*w13"),
        ({"compensate": "w2"}, r"compensate 'w2' .*w13"),
        ({"adaptive": 1}, r"adaptive 1 .*true or false"),
        ({"exact": "yes"}, r"exact 'yes' .*true or false"),
        ({"adaptive": True, "rac_ratio": 0}, r"adaptive true .*rac_ratio 0"),
        ({"rac_ration": 0.5}, r"'rac_ration'; allowed are \['rac_ratio'"),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if type(value) is dict else "",
)
def test_bad_options_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        CompensationOptions.from_preset("quads", change)


@pytest.mark.parametrize(
    ("rate", "period"), [(1, 1), (0.7, 1), (0.4, 2), (1 / 3, 3), (2.0**-62, 2**62)]
)
def test_one_of_so_many_rows_is_counted(rate, period):
    assert CompensationOptions(sampling_rate=rate).sampling_period == period


def test_extreme_values_that_are_allowed_can_be_used():
    from quads_common.compensation.refresh import refresh
    from quads_common.compensation.sampling import sampled_rows
    from quads_common.compensation.state import new_site_state

    chosen = CompensationOptions.from_preset(
        "quads_splice",
        {"sampling_rate": 2.0**-62, "min_tokens": 2**63 - 1, "splice_count_w13": 2**63 - 1},
    )
    assert len(sampled_rows(0, 5, chosen.sampling_period, 5)) <= 1
    state = new_site_state(Site("x", "w13", 32, 32), chosen)
    assert state.selection.channels.shape == (1, 32)
    state.statistics.count.fill_(1e6)
    assert refresh([state], chosen)[0].groups_ready == 0


@pytest.mark.parametrize("key", ["min_tokens", "rac_ratio", "sampling_rate", "splice_count_w2"])
@pytest.mark.parametrize("sign", [1, -1])
def test_integers_that_cannot_be_written_are_refused_by_name(key, sign):
    with pytest.raises(ValueError, match=f"{key} .an integer of more than 40 digits. is not all"):
        CompensationOptions.from_preset("quads", {key: sign * 10**5000})


def test_unknown_preset_is_refused():
    with pytest.raises(ValueError, match=r"method 'quad' .*quads_splice"):
        CompensationOptions.from_preset("quad")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("x", "w3", 64, 64), r"x: kind 'w3'.*w13"),
        (("x", "w2", 40, 80), "width 40"),
        (("x", "w2", 0, 0), "width 0"),
        (("x", "w2", 32, 80), "no shard of 80"),
        (("x", "w2", 32, 64, 16), "32 channels from 16"),
        (("x", "w2", 32, 64, 64), "32 channels from 64"),
        (("x", "w2", 32, 64, 0, (0, 0), 2), "distinct"),
        (("x", "w2", 32, 64, 0, (0, 2), 2), "below 2"),
    ],
    ids=str,
)
def test_bad_sites_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Site(*arguments)


def test_shards():
    site = Site("x", "w2", 32, 128, 64)
    assert (site.shards, site.shard, site.blocks) == (4, 2, 2)
