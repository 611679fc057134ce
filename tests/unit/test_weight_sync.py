"""What a run does about tensors that the engines did not load as the trainer has them."""

from types import SimpleNamespace

import pytest

from slimrl.resync.report import ResyncReport
from slimrl.runtime.errors import RunError
from slimrl.runtime.weight_sync import WeightSync


def report(**changes) -> ResyncReport:
    values = {
        "version": 7, "bytes": 1, "buckets": 1, "seconds": 1.0, "stage_seconds": {}, "verified_tensors": 2,
        "mismatching": (), "failed_engines": {}, "stale_requests": 0, "peak_extra_bytes": 0,
    }  # fmt: skip
    return ResyncReport(**{**values, **changes})


def test_a_run_stops_at_a_tensor_that_differs_and_names_it_and_the_engine():
    found = report(mismatching=("engine 1: model.layers.1.mlp.experts.3.down_proj.weight",))
    trainers = SimpleNamespace(resync=lambda version: found)
    state = SimpleNamespace(weight_version=7)
    sync = WeightSync(None, state, trainers, None, None)
    with pytest.raises(RunError, match=r"weight version 7: 1 tensors differ .*engine 1: model\.layers\.1\.mlp.*"):
        sync.send(None)
