"""Boundaries and files of a rank's ``Compensator``, without an engine."""

from dataclasses import replace

import pytest
import torch

from quads_common.compensation.controller import Compensator
from quads_common.compensation.layers import LayerInput, Runtime
from quads_common.compensation.site import linear_site, moe_sites
from quads_common.layer_weights import weight_counts
from tests.compensation.serving import (
    ALL_PLANTED,
    NONE,
    W2,
    W13,
    N,
    bf16,
    channels,
    loaded,
    options,
    serve,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("dummy", [True, False])
def test_statistics_are_empty_after_a_load_of_dummy_weights(log, dummy):
    """An engine that makes up weights writes random values into every tensor of a layer."""
    compensator = Compensator(options(), tp_size=1, log=log)
    state = compensator.add(W2, CPU)
    floats = {n: t for n, t in state.buffers().items() if t.is_floating_point() and t.numel()}
    for tensor in floats.values():
        tensor.fill_(1e-3)
    if not dummy:
        compensator.weights_arrive()
        compensator.end_sync()
    compensator.loaded()
    empty = [name for name, tensor in floats.items() if not tensor.any()]
    assert empty == (list(floats) if dummy else [])


def test_a_sync_is_one_boundary(log):
    """However many calls end it; loads alone and calls alone are none."""
    chosen = options()
    compensator = loaded(log, chosen)
    assert (compensator.version, compensator.boundaries) == (0, 0)
    serve(compensator, chosen)
    assert not compensator.end_sync()
    compensator.weights_arrive()
    compensator.weights_arrive()
    assert channels(compensator) == NONE
    assert compensator.end_sync()
    assert not compensator.end_sync()
    assert channels(compensator) == ALL_PLANTED
    assert (compensator.version, compensator.boundaries) == (1, 1)


def test_refresh_interval_counts_syncs(log):
    chosen = options(refresh_interval=2)
    compensator = loaded(log, chosen)
    serve(compensator, chosen)
    for version in (0, 1, 1):
        compensator.weights_arrive()
        compensator.end_sync()
        assert compensator.version == version


def test_state_tells_versions_and_shared_lists(log):
    chosen = options()
    compensator = loaded(log, chosen)
    first = compensator.state().copy()
    assert (first["start_version"], first["version"]) == (0, 0)
    assert list(first["shared"]) == [W13.name]
    assert first["calibration_passes"] == 2
    serve(compensator, chosen)
    result = compensator.refresh_now()
    assert (result["applied"], result["changed"]) == (True, True)
    second = compensator.state()
    assert (second["start_version"], second["version"]) == (0, 1)
    assert first["shared"] != second["shared"]


def test_a_refresh_that_ends_a_sync_is_one(log):
    """Its metrics are those of the rows that were counted, and handed on once."""
    chosen, handed = options(), []
    compensator = loaded(log, chosen, on_refresh=handed.append)
    serve(compensator, chosen)
    compensator.weights_arrive()
    result = compensator.refresh_now()
    assert (result["applied"], result["changed"], len(handed)) == (True, True, 1)
    for site in result["metrics"]:
        assert site["residual_energy_before"] > 0 and site["refreshes"] == 1
        assert site["channels_overlap"] == 0, "of the lists before the sync"
    compensator.weights_arrive()
    compensator.end_sync()
    assert compensator.boundaries == 2


def test_a_refresh_that_ends_a_sync_that_is_not_due(log):
    chosen = options(refresh_interval=3)
    compensator = loaded(log, chosen)
    serve(compensator, chosen)
    compensator.weights_arrive()
    assert compensator.refresh_now()["changed"]
    assert channels(compensator) == ALL_PLANTED


def test_energies_stay_known_where_no_row_was_counted(log):
    chosen, handed = options(), []
    compensator = loaded(log, chosen, on_refresh=handed.append)
    serve(compensator, chosen)
    first, second = (compensator.refresh_now()["metrics"] for _ in range(2))
    for before, after in zip(first, second, strict=True):
        assert before["residual_energy_after"] > 0 and after["refreshes"] == 2
        for key in ("residual_energy_before", "residual_energy_after", "signal_energy"):
            assert after[key] == before[key]
        assert after["rac_scale_underflow_share"] == before["rac_scale_underflow_share"]
        assert after["channels_overlap"] == 1
    assert handed[1] == compensator.metrics


@pytest.mark.parametrize(
    "chosen", [options(rac_ratio=0.0), options(splice_count_w2=0, compensate=("w2",))]
)
def test_one_pass_where_one_method_is_used(log, chosen):
    assert loaded(log, chosen).state()["calibration_passes"] == 1


@pytest.mark.parametrize("kind", ["w13", "w2"])
def test_inputs_that_are_not_compensated_are_not_kept_counted_or_reported(log, tmp_path, kind):
    chosen = options(compensate=(kind,))
    compensator, layer = Compensator(chosen, tp_size=1, log=log), torch.nn.Module()
    runtime = Runtime(compensator, chosen, period=1, max_tokens=8)
    given = {
        site.kind: LayerInput(
            layer, site, runtime, units=1, rows=N, dtype=torch.bfloat16, device=CPU
        )
        for site in (W13, W2)
    }
    compensator.loaded()
    for name, one in given.items():
        active = name == kind
        assert (one.sample_map(layer, 4) is not None) == active
        assert bool(one.staged(layer)[0].numel()) == active
    result = compensator.refresh_now()
    assert [m["name"] for m in result["metrics"]] == [given[kind].state.site.name]
    path = str(tmp_path / "s")
    assert compensator.save(path, lambda parts: [parts]) == {"path": path, "inputs": 1}


@pytest.mark.parametrize("count", [0, 16])
def test_columns_count_as_weights(log, count):
    """The report says what a layer's weights take, BF16 columns of hot channels included."""
    chosen = options(splice_count_w13=count, splice_weight="bf16", compensate=("w13",))
    layer = torch.nn.Module()
    layer.quads_units = ()
    bare = weight_counts(layer, bool)["bytes_after"]
    runtime = Runtime(Compensator(chosen, tp_size=1, log=log), chosen, period=1, max_tokens=8)
    LayerInput(layer, W13, runtime, units=2, rows=N, dtype=torch.bfloat16, device=CPU)
    assert weight_counts(layer, bool)["bytes_after"] - bare == 2 * N * count * 2


def test_forget_keeps_the_lists(log):
    chosen = options()
    compensator = loaded(log, chosen)
    serve(compensator, chosen)
    compensator.refresh_now()
    compensator.forget()
    assert channels(compensator) == ALL_PLANTED
    compensator.refresh_now()
    assert channels(compensator) == NONE, "there is nothing to choose by any more"


def test_energies_are_unknown_after_forgetting(log, caplog):
    """Until rows have been counted; the metrics of the last refresh stay what they were."""
    caplog.set_level("INFO")
    chosen = options()
    compensator = loaded(log, chosen)
    serve(compensator, chosen)
    first = compensator.refresh_now()["metrics"]
    compensator.forget()
    assert [m.to_json() for m in compensator.metrics] == first
    for site in compensator.refresh_now()["metrics"]:
        assert site["residual_energy_after"] is site["signal_energy"] is None
    assert "residual energy unknown of uncompensated" in caplog.messages[-1]
    serve(compensator, chosen)
    assert all(m["residual_energy_after"] > 0 for m in compensator.refresh_now()["metrics"])


@pytest.mark.parametrize("first_rank", [True, False])
def test_more_channels_than_an_input_has_are_told_once(log, caplog, first_rank):
    """For each kind; as many as there are is no mistake."""
    chosen = options(splice_count_w13=1000, splice_count_w2=129, splice_count_linear=128)
    compensator = Compensator(chosen, tp_size=1, log=log, first_rank=first_rank)
    for site in (W13, W2, replace(W13, name="b"), replace(W2, name="c")):
        compensator.add(site, CPU)
    compensator.add(replace(W13, name="d", kind="linear"), CPU)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    wanted = [
        "quads_nvfp4: splice_count_w13 1000 is more than the 128 channels of layers.0.w13: all 128 "
        "are spliced there, and none is quantized",
        "quads_nvfp4: splice_count_w2 129 is more than the 128 channels of layers.0.w2: all 128 "
        "are spliced there, and none is quantized",
    ]
    assert told == (wanted if first_rank else [])


def test_save_and_load(log, tmp_path):
    chosen = options()
    compensator = loaded(log, chosen)
    serve(compensator, chosen)
    compensator.refresh_now()
    path = str(tmp_path / "selection")
    assert compensator.save(path, lambda parts: [parts]) == {"path": path, "inputs": 2}
    assert compensator.save(path, lambda parts: None) is None
    other = loaded(log, chosen)
    assert other.load(path) == {"applied": True}
    assert channels(other) == ALL_PLANTED
    assert other.version == 1
    started = loaded(log, chosen, selection_file=path)
    assert channels(started) == ALL_PLANTED
    assert (started.state()["start_version"], started.version) == (1, 1)


@pytest.mark.parametrize("chosen", [options(), bf16()], ids=["plain", "bf16"])
@pytest.mark.parametrize("wrong", ["tp_size", "options", "shape", "absent"])
def test_a_load_that_is_refused_leaves_a_sync_open(log, tmp_path, chosen, wrong):
    """Ending it would refresh the lists, or put those in force that wait."""
    path = tmp_path / "s"
    other = {"tp_size": 2} if wrong == "tp_size" else {}
    saved = replace(chosen, rac_alpha=0.5) if wrong == "options" else chosen
    source = Compensator(saved, tp_size=other.get("tp_size", 1), log=log)
    source.add(W13, CPU)
    source.add(W2 if wrong != "shape" else replace(W2, num_groups=2, groups=(0, 1)), CPU)
    if wrong != "absent":
        source.save(path, lambda parts: [parts])
    compensator = loaded(log, chosen)
    serve(compensator, chosen)
    compensator.weights_arrive()
    with pytest.raises((ValueError, OSError), match=str(path)):
        compensator.load(path)
    assert channels(compensator) == NONE
    assert (compensator.version, compensator._arriving) == (0, True)
    if not compensator.gathers_columns:
        assert compensator.end_sync(), "the sync goes on"
        assert channels(compensator) == ALL_PLANTED


def full_disk(metrics):
    raise OSError(28, "No space left on device")


def test_metrics_that_nobody_takes_stop_no_refresh(log, caplog):
    """The lists have changed, and whoever caches results hears of it."""
    chosen = options()
    compensator = loaded(log, chosen, on_refresh=full_disk)
    serve(compensator, chosen)
    assert compensator.refresh_now()["changed"]
    assert channels(compensator) == ALL_PLANTED
    assert compensator.state()["version"] == 1
    assert "No space left on device" in caplog.text


def test_a_change_is_noted_before_metrics_are_handed_on(log):
    chosen = options()
    versions = []
    compensator = loaded(log, chosen, on_refresh=lambda m: versions.append(compensator.version))
    serve(compensator, chosen)
    compensator.refresh_now()
    assert versions == [1]


# Sites ------------------------------------------------------------------------------------------


def test_sites_of_experts():
    first, second = moe_sites(
        "m", hidden=64, inner=32, tp_size=2, tp_rank=1, experts=[4, 5], num_experts=8
    )
    assert (first.name, first.width, first.shards, first.groups) == ("m.w13", 64, 1, (0,))
    assert (second.name, second.full_width, second.offset) == ("m.w2", 64, 32)
    assert (second.groups, second.num_groups) == ((4, 5), 8)


def test_sites_of_linears():
    assert linear_site("a", width=64, full_width=64, tp_rank=1).offset == 0
    assert linear_site("a", width=32, full_width=64, tp_rank=1).offset == 32
