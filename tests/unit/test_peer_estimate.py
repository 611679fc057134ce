"""Bytes and seconds of a resync through `p2p` against closed forms of small layouts."""

from dataclasses import replace

import pytest
from estimate_cases import COLUMNS, NBYTES, ROWS, engine, layout

from slimrl.data.model_weights import EngineModel, EnginePlace, SourceLayout
from slimrl.estimates.resync.machine import GB, Machine
from slimrl.estimates.resync.peer_estimate import PeerEstimate, Spread, estimate_models
from slimrl.estimates.resync.peer_pipeline import RoundSeconds, pipeline_seconds
from slimrl.estimates.resync.peer_traffic import QUANTIZE_BYTES
from slimrl.quantization.fp8 import BlockFp8
from slimrl.resync.p2p.demand import sent_tensors
from slimrl.resync.transform import Quantize

SMOOTH = replace(
    Machine(), gather_us=0, load_us=0, settle_us=0, stage_us=0, quantize_us=0, place_us=0, message_us=0,
    round_us=0,
)  # fmt: skip
"""Links alone take time."""
ADAPTER = SMOOTH.network_gb_per_s * GB


def estimated(
    tensors: SourceLayout,
    nodes: list[str],
    engines: list[EnginePlace],
    *,
    machine: Machine = SMOOTH,
    bucket_bytes: int = 64 * NBYTES,
    transform: Quantize | None = None,
    whole: bool = False,
) -> PeerEstimate:
    """
    Args:
        whole: each rank of an engine keeps everything, instead of an equal part of the rows.
    """
    sent = sent_tensors(tensors, transform)
    num_ranks = engines[0].num_ranks if engines else 1
    kept = []
    for rank in range(num_ranks):
        boxes = {}
        for tensor in sent:
            rows, columns = tensor.spec.shape
            step = rows if whole else rows // num_ranks
            start = 0 if whole else rank * step
            boxes[tensor.spec.name] = [((start, start + step), (0, columns))]
        kept.append(boxes)
    return estimate_models(
        tensors,
        nodes,
        engines,
        machine,
        tensors=sent,
        models={EngineModel.target: kept},
        bucket_bytes=bucket_bytes,
        transform=transform,
    )


def test_each_rank_sends_what_it_holds_and_each_byte_crosses_the_network_once_for_each_engine():
    engines = [engine("x", "c", num_ranks=2), engine("y", "d", num_ranks=2)]
    result = estimated(layout([(0,), (1,), (2,), (3,)]), ["a", "a", "b", "b"], engines)
    assert result.link_bytes["network"] == 2 * NBYTES
    assert "nvlink" not in result.link_bytes
    # Staged, then placed: read and written each time.
    assert result.link_bytes["memory"] == 2 * 2 * 2 * NBYTES
    assert result.sent_by_rank == Spread(least=NBYTES // 2, mean=NBYTES // 2, most=NBYTES // 2)
    assert result.kept_by_rank == Spread(least=NBYTES // 2, mean=NBYTES // 2, most=NBYTES // 2)
    assert result.adapter_bytes == NBYTES // 2
    assert result.limit_seconds == pytest.approx(NBYTES / 2 / ADAPTER)
    assert result.stage_seconds["send"] == pytest.approx(NBYTES / 2 / ADAPTER)
    assert (result.tensors, result.gathered_bytes, result.sent_bytes) == (1, NBYTES, NBYTES)
    assert (result.rounds, result.messages, result.entries, result.chain) == (1, 4, 8, 1)


def test_the_busiest_rank_is_the_limit():
    result = estimated(layout([(0,)]), ["a", "a"], [engine("x", "c", num_ranks=2)])
    assert result.sent_by_rank == Spread(least=0, mean=NBYTES // 2, most=NBYTES)
    assert result.adapter_bytes == NBYTES
    assert result.limit_seconds == pytest.approx(NBYTES / ADAPTER)
    copies = estimated(layout([(0, 1)]), ["a", "a"], [engine("x", "c", num_ranks=2)])
    assert copies.limit_seconds == pytest.approx(NBYTES / 2 / ADAPTER)


def test_an_engine_on_the_trainers_node_is_reached_over_nvlink():
    result = estimated(layout([(0,), (1,)]), ["a", "b"], [engine("x", "a", num_ranks=2)])
    assert result.link_bytes["nvlink"] == NBYTES // 2
    assert result.link_bytes["network"] == NBYTES // 2
    assert result.stage_seconds["send"] == pytest.approx(NBYTES / 2 / ADAPTER)
    slow = estimated(
        layout([(0,), (1,)]), ["a", "b"], [engine("x", "a", num_ranks=2)], machine=replace(SMOOTH, nvlink_gb_per_s=1.0)
    )
    assert slow.stage_seconds["send"] == pytest.approx(NBYTES / 2 / GB)


def test_what_all_ranks_keep_enters_each_node_of_the_engine_once():
    result = estimated(layout([(0,)]), ["a"], [engine("x", "b", "c", num_ranks=8)], whole=True)
    assert result.link_bytes["network"] == 2 * NBYTES
    # The other three of each node.
    assert result.link_bytes["nvlink"] == 6 * NBYTES
    assert result.kept_by_rank.least == NBYTES
    passing = NBYTES / ADAPTER + 3 * NBYTES / (SMOOTH.nvlink_gb_per_s * GB)
    assert result.stage_seconds["pass on"] == pytest.approx(passing)
    # In one round nothing overlaps.
    assert result.seconds == pytest.approx(sum(result.stage_seconds.values()))


def test_what_is_passed_on_between_nodes_shares_the_adapters_with_the_next_round():
    one = {"bucket_bytes": 64 * NBYTES, "whole": True}
    two = {"bucket_bytes": 2 * NBYTES, "whole": True}
    engines, tensors = [engine("x", "b", "c", num_ranks=2)], layout([(0,)], tensors=2)
    assert estimated(tensors, ["a"], engines, **one).rounds == 1
    result = estimated(tensors, ["a"], engines, **two)
    assert result.rounds == 2
    # Rank 0 of the engine gets the first tensor from outside. In the second round rank 1 gets both: the second one from
    # outside, and the first one from rank 0.
    assert result.stage_seconds["send"] == pytest.approx((1 + 2) * NBYTES / ADAPTER)


def test_engines_with_more_ranks_than_the_trainer_feed_each_other():
    engines = [engine(name, node) for name, node in zip("wxyz", "cdef", strict=True)]
    result = estimated(layout([(0,), (1,)]), ["a", "b"], engines)
    assert result.chain == 2
    assert result.link_bytes["network"] == 4 * NBYTES
    # Each trainer rank sends its half to two engines, and these pass all of it on.
    assert result.sent_by_rank.most == NBYTES
    assert result.adapter_bytes == NBYTES
    assert result.stage_seconds["send"] == pytest.approx(2 * NBYTES / ADAPTER)
    beside = [engine(name, "c") for name in "wxyz"]
    assert estimated(layout([(0,), (1,)]), ["a", "b"], beside).link_bytes["nvlink"] == 2 * NBYTES


def test_without_engines_nothing_is_sent():
    result = estimated(layout([(0,)]), ["a"], [])
    assert (result.seconds, result.link_bytes, result.rounds, result.limit_seconds) == (0.0, {}, 0, 0.0)


def test_quantised_weights_are_read_for_their_scales_and_sent_small():
    transform = Quantize(BlockFp8(), ["layer0.weight"])
    result = estimated(layout([(0,)]), ["a"], [engine("x", "b", num_ranks=2)], transform=transform)
    scales = 4 * (ROWS // 128) * (COLUMNS // 128)
    assert (result.gathered_bytes, result.sent_bytes) == (NBYTES, NBYTES // 2 + scales)
    assert result.link_bytes["network"] == NBYTES // 2 + scales
    memory = SMOOTH.memory_gb_per_s * GB
    assert result.stage_seconds["settle"] == pytest.approx(2 * NBYTES / memory)
    staged = QUANTIZE_BYTES * NBYTES // 2 + 2 * scales
    assert result.stage_seconds["stage"] == pytest.approx(staged / memory)
    assert result.link_bytes["memory"] == 2 * NBYTES + staged + 2 * (NBYTES // 2 + scales)


def test_overheads_count_for_each_region_message_and_round():
    transform = Quantize(BlockFp8(), ["layer0.weight", "layer1.weight"])
    tensors, engines = layout([(0,), (1,)], tensors=3), [engine("x", "b", num_ranks=2)]
    slow = {
        "stage_us": 1e5,
        "quantize_us": 3e6,
        "place_us": 5e6,
        "message_us": 7e6,
        "round_us": 11e6,
        "settle_us": 13e6,
    }
    result = estimated(tensors, ["a", "a"], engines, transform=transform, machine=replace(SMOOTH, **slow))
    assert result.rounds == 1
    # A rank has a piece of three tensors, and sends the scales of two; one rank of the engine keeps the same.
    assert result.stage_seconds["settle"] == pytest.approx(2 * 13)
    assert result.stage_seconds["stage"] == pytest.approx(3 * 0.1 + 2 * 3)
    assert result.stage_seconds["place"] == pytest.approx(5 * 5)
    assert result.stage_seconds["agree"] == pytest.approx(11 + 7)


def rounds(count: int, **seconds: float) -> list[RoundSeconds]:
    zero = {"stage": 0.0, "agree": 0.0, "send": 0.0, "pass_on": 0.0, "place": 0.0}
    return [RoundSeconds(**{**zero, **seconds})] * count


def test_rounds_take_the_time_of_their_slowest_step_and_the_first_and_last_the_others_too():
    for count in (1, 2, 5, 20):
        assert pipeline_seconds([rounds(count, stage=1, send=3, place=1)]) == 1 + 3 * count + 1
        assert pipeline_seconds([rounds(count, stage=3, send=1, place=1)]) == 3 * count + 1 + 1
        assert pipeline_seconds([rounds(count, stage=1, send=1, pass_on=2, place=1)]) == 1 + 1 + 3 * count
        assert pipeline_seconds([rounds(count, agree=2)]) == 2 * count
    assert pipeline_seconds([]) == pipeline_seconds([[]]) == 0.0


def test_a_round_waits_until_its_buffers_at_both_ends_are_free():
    # A receiver is ready for a round when it has placed the one before the last; then it places the last one.
    assert pipeline_seconds([rounds(10, agree=1, send=1, place=3)]) == 10 * (1 + 3)
    # A round trip hides behind the messages of the round before, except for the first.
    assert pipeline_seconds([rounds(10, agree=1, send=4)]) == 1 + 10 * 4


def test_a_chain_of_engines_takes_a_round_longer_for_each():
    one = rounds(10, send=2, place=1)
    assert pipeline_seconds([one]) == 10 * 2 + 1
    assert pipeline_seconds([one, one]) == 11 * 2 + 1
    assert pipeline_seconds([one, one, one]) == 12 * 2 + 1
