"""Bytes and seconds of a resync in buckets against closed forms of small layouts."""

from dataclasses import replace

import pytest
from estimate_cases import COLUMNS, NBYTES, ROWS, engine, layout

from slimrl.data.model_weights import EnginePlace, SourceLayout
from slimrl.estimates.resync.estimate import BucketEstimate, as_json, estimate
from slimrl.estimates.resync.machine import GB, Machine
from slimrl.quantization.fp8 import BlockFp8
from slimrl.resync.buckets import Transform
from slimrl.resync.plan import plan_resync
from slimrl.resync.transform import Quantize

SMOOTH = replace(Machine(), gather_us=0, load_us=0)
"""Links alone take time."""


def estimated(
    tensors: SourceLayout,
    nodes: list[str],
    engines: list[EnginePlace],
    *,
    machine: Machine = SMOOTH,
    bucket_bytes: int = NBYTES,
    transform: Transform | None = None,
    replicated: tuple[str, ...] = (),
) -> BucketEstimate:
    plan = plan_resync(tensors, nodes, bucket_bytes=bucket_bytes, transform=transform)
    return estimate(plan, engines, machine, replicated=replicated)


def test_each_byte_is_gathered_once_written_once_and_read_once_per_engine():
    result = estimated(layout([(0,), (1,)]), ["a", "a"], [engine("x", "a", num_ranks=2), engine("y", "b", num_ranks=2)])
    # Half of the bytes are the leader's own.
    assert result.link_bytes == {
        "memory": 2 * (NBYTES // 2),
        "nvlink": NBYTES // 2,
        "pcie": NBYTES + 2 * NBYTES,
        "disk": NBYTES + 2 * NBYTES,
    }
    assert (result.gathered_bytes, result.sent_bytes, result.buckets, result.tensors) == (NBYTES, NBYTES, 1, 1)


def test_a_node_gathers_as_long_as_its_leader_s_memory_or_the_links_into_it_need():
    tensors, engines = layout([(0,), (1,), (2,), (3,)]), [engine("x", "a")]
    for machine, seconds in (
        (replace(SMOOTH, memory_gb_per_s=4.0, nvlink_gb_per_s=2.0), 3 * NBYTES / 4 / (2 * GB)),
        (replace(SMOOTH, memory_gb_per_s=1.0, nvlink_gb_per_s=2.0), 2 * NBYTES / 4 / GB),
    ):
        result = estimated(tensors, ["a"] * 4, engines, machine=machine)
        assert result.stage_seconds["gather"] == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"network_gb_per_s": 0.0}, "network_gb_per_s 0.0: must be above 0"),
        ({"nvlink_gb_per_s": -1.0}, "nvlink_gb_per_s -1.0: must be above 0"),
        ({"gather_us": -1.0}, "gather_us -1.0: must be at least 0"),
        ({"round_us": float("nan")}, "round_us nan: must be a finite number"),
        ({"pcie_gb_per_s": float("inf")}, "pcie_gb_per_s inf: must be a finite number"),
    ],
)
def test_a_speed_or_an_overhead_that_cannot_be_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        Machine(**change)
    assert Machine(gather_us=0.0, load_us=0).gather_us == 0


def test_what_every_engine_rank_holds_is_copied_by_each():
    result = estimated(layout([(0,)]), ["a"], [engine("x", "a", num_ranks=4)], replicated=("layer0.weight",))
    assert result.link_bytes["pcie"] == NBYTES + 4 * NBYTES
    assert result.link_bytes["disk"] == 2 * NBYTES


def test_replicas_of_the_trainer_on_each_node_need_no_network():
    result = estimated(layout([(0, 2), (1, 3)]), ["a", "a", "b", "b"], [engine("x", "a"), engine("y", "b")])
    assert "network" not in result.link_bytes
    assert "exchange" not in result.stage_seconds


def test_each_byte_that_the_node_of_rank_0_lacks_crosses_the_network_once():
    nodes = ["a", "b", "c", "d"]
    engines = [engine(f"on-{node}", node) for node in nodes]
    for holders, lacking in (
        ([(0,), (1,), (2,), (3,)], 3 * NBYTES // 4),
        ([(0, 1), (2, 3)], NBYTES // 2),
        ([(1, 2, 3)], NBYTES),
    ):
        result = estimated(layout(holders), nodes, engines)
        assert result.link_bytes["network"] == lacking
        # All of it goes through one adapter of that node.
        assert result.stage_seconds["exchange"] == pytest.approx(lacking / (SMOOTH.network_gb_per_s * GB))


def test_a_bucket_is_sent_while_the_next_is_gathered():
    machine = replace(SMOOTH, memory_gb_per_s=1.0, pcie_gb_per_s=2.0, disk_write_gb_per_s=2.0)
    gathering, sending = 2 * NBYTES / GB, NBYTES / GB
    result = estimated(layout([(0,)], tensors=5), ["a"], [], machine=machine)
    assert result.buckets == 5
    assert result.stage_seconds == pytest.approx({"gather": 5 * gathering, "send": 5 * sending})
    assert result.seconds == pytest.approx(5 * gathering + sending)
    slow = replace(machine, pcie_gb_per_s=0.1, disk_write_gb_per_s=0.1)
    result = estimated(layout([(0,)], tensors=5), ["a"], [], machine=slow)
    assert result.seconds == pytest.approx(gathering + 5 * 20 * sending)


def test_a_rank_takes_its_time_for_each_piece():
    machine = replace(SMOOTH, gather_us=1000.0)
    plain, result = (
        estimated(layout([(0,)], tensors=6), ["a"], [], bucket_bytes=3 * NBYTES, machine=each)
        for each in (SMOOTH, machine)
    )
    assert result.stage_seconds["gather"] == pytest.approx(plain.stage_seconds["gather"] + 6e-3)


def test_quantised_weights_are_gathered_whole_and_sent_small():
    transform = Quantize(BlockFp8(), ["layer0.weight"])
    engines = [engine("x", "b", num_ranks=2)]
    plain = estimated(layout([(0,)]), ["a"], engines)
    result = estimated(layout([(0,)]), ["a"], engines, transform=transform)
    scales = 4 * (ROWS // 128) * (COLUMNS // 128)
    assert (result.gathered_bytes, result.sent_bytes) == (NBYTES, NBYTES // 2 + scales)
    # Written once and read once.
    assert result.link_bytes["disk"] == 2 * (NBYTES // 2 + scales)
    assert result.stage_seconds["transform"] == pytest.approx(
        (NBYTES + NBYTES // 2 + scales) / (SMOOTH.memory_gb_per_s * GB)
    )
    assert result.stage_seconds["gather"] == pytest.approx(plain.stage_seconds["gather"])


def test_nodes_send_each_other_quantised_weights():
    transform = Quantize(BlockFp8(), ["layer0.weight"])
    engines = [engine("x", "c", num_ranks=2)]
    scales = 4 * (ROWS // 128) * (COLUMNS // 128)
    sent = NBYTES // 2 + scales
    # Three quarters are on other nodes than rank 0, in whole tiles.
    result = estimated(layout([(0,), (1,), (2,), (3,)]), ["a", "b", "d", "e"], engines, transform=transform)
    assert result.link_bytes["network"] == 3 * sent // 4
    # Node a receives on one adapter.
    assert result.stage_seconds["exchange"] == pytest.approx(3 * sent / 4 / (SMOOTH.network_gb_per_s * GB))
    # Each node quantises its quarter while the others do theirs.
    quarter = (NBYTES + sent) / 4
    assert result.stage_seconds["transform"] == pytest.approx(quarter / (SMOOTH.memory_gb_per_s * GB))
    # Pieces of 64 rows lie on two nodes within a tile: they travel as they are, and rank 0 quantises them all.
    holders = [(rank % 2,) for rank in range(16)]
    torn = estimated(layout(holders), ["a", "b"], engines, transform=transform)
    assert torn.link_bytes["network"] == NBYTES // 2
    assert torn.stage_seconds["transform"] == pytest.approx((NBYTES + sent) / (SMOOTH.memory_gb_per_s * GB))


def test_all_adapters_of_a_node_carry_an_equal_share_of_what_it_sends():
    nodes, machine = ["a", "a", "a", "a", "b", "b", "b", "b"], replace(SMOOTH, nvlink_gb_per_s=450.0)
    result = estimated(layout([(4,)]), nodes, [engine("x", "a")], machine=machine)
    assert result.link_bytes["network"] == NBYTES
    assert result.stage_seconds["exchange"] == pytest.approx(NBYTES / 4 / (machine.network_gb_per_s * GB))
    # Three of four shares leave one leader's memory over NVLink and enter the other's.
    assert result.link_bytes["nvlink"] == 2 * 3 * NBYTES // 4
    # Leaders whose NVLink is slower than four adapters are the limit.
    slow = estimated(layout([(4,)]), nodes, [engine("x", "a")], machine=replace(machine, nvlink_gb_per_s=100.0))
    assert slow.stage_seconds["exchange"] == pytest.approx(3 * NBYTES / 4 / (100 * GB))


def test_a_checkpoint_on_disk_is_written_once_and_read_once_per_node():
    machine = replace(SMOOTH, pcie_gb_per_s=10.0, disk_write_gb_per_s=1.0, disk_read_gb_per_s=2.0)
    engines = [engine("x", "b", num_ranks=2), engine("y", "b", num_ranks=2), engine("z", "c", num_ranks=2)]
    result = estimated(layout([(0,)]), ["a"], engines, machine=machine)
    assert result.link_bytes["disk"] == 3 * NBYTES
    assert result.link_bytes["pcie"] == NBYTES + 3 * NBYTES
    assert result.stage_seconds["send"] == pytest.approx(NBYTES / GB * (1 / 10 + 1))
    assert result.stage_seconds["end"] == pytest.approx(NBYTES / GB * (1 / 2 + 1 / 2 / 10))
    shared = estimated(layout([(0,)]), ["a"], engines, machine=replace(machine, disk_read_total_gb_per_s=1.0))
    assert shared.stage_seconds["end"] == pytest.approx(NBYTES / GB * (2 + 1 / 2 / 10))


def test_each_tensor_of_a_checkpoint_takes_an_engine_s_time_where_there_is_one():
    machine = replace(SMOOTH, load_us=100.0)
    engines = [engine("x", "b")]
    ends = [
        estimated(layout([(0,)], tensors=4), ["a"], engines, machine=each).stage_seconds["end"]
        for each in (SMOOTH, machine)
    ]
    assert ends[1] - ends[0] == pytest.approx(4 * 1e-4)
    alone = estimated(layout([(0,)], tensors=4), ["a"], [], machine=machine)
    assert "end" not in alone.stage_seconds
    assert alone.link_bytes["disk"] == 4 * NBYTES


def test_the_figures_come_with_the_speeds_that_they_rest_on():
    result = estimated(layout([(0,)]), ["a"], [engine("x", "a")])
    told = as_json(result, SMOOTH)
    assert (told["buckets"], told["seconds"], told["machine"]["gather_us"]) == (1, result.seconds, 0)
    assert told["machine"]["network_gb_per_s"] == 50.0
