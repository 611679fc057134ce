"""Buckets and plans: every byte once, bounded, aligned, and over the network at most once."""

import itertools

import pytest
import torch

from slimrl.data.model_weights import SourcePiece, TensorSpec
from slimrl.models.family import family_of
from slimrl.models.hf_config import published_config
from slimrl.resync.buckets import cut_buckets, rows_of
from slimrl.resync.exchange import messages
from slimrl.resync.pipeline import copy_rows
from slimrl.resync.plan import plan_resync


def spec(name: str, *shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype=dtype)


def names(buckets) -> list[list[str]]:
    return [[part.spec.name for part in bucket.gathered] for bucket in buckets]


class HalfWithSums:
    """A transform: half the precision, and one float32 for every two rows."""

    row_multiple = 2

    def outputs(self, part):
        spec, start, stop = part.spec, part.start, part.stop
        half = TensorSpec(name=spec.name, shape=spec.shape, dtype="float16")
        sums = TensorSpec(name=f"{spec.name}_sums", shape=(-(-spec.shape[0] // 2),), dtype="float32")
        return [rows_of(half, start, stop), rows_of(sums, start // 2, -(-stop // 2))]


def test_tensors_fill_buckets_in_their_order():
    specs = [spec("a", 10), spec("b", 10), spec("c", 5), spec("d", 20)]
    assert names(cut_buckets(specs, 100)) == [["a", "b", "c"], ["d"]]


def test_a_tensor_larger_than_a_bucket_is_cut_into_rows():
    buckets = cut_buckets([spec("a", 1), spec("big", 10, 3), spec("b", 1)], 40)
    rows = [[(p.spec.name, p.start, p.stop) for p in bucket.gathered] for bucket in buckets]
    assert rows == [[("a", 0, 1), ("big", 0, 3)], [("big", 3, 6)], [("big", 6, 9)], [("big", 9, 10), ("b", 0, 1)]]
    assert all(bucket.gathered_bytes <= 40 for bucket in buckets)
    assert buckets[1].gathered[0].shape == (3, 3)


def test_a_row_that_does_not_fit_is_refused_with_the_size_that_is_needed():
    with pytest.raises(ValueError, match=r"bucket_bytes: 10 bytes are too few: one row of big needs 12. Use 12 or"):
        cut_buckets([spec("big", 10, 3)], 10)


def test_mixed_dtypes_are_aligned_without_gaps():
    specs = [spec("half", 3, dtype="bfloat16"), spec("full", 2), spec("byte", 1, dtype="uint8"), spec("scalar")]
    (bucket,) = cut_buckets(specs, 1000)
    parts = bucket.gathered
    for part in parts:
        assert part.offset % getattr(torch, part.spec.dtype).itemsize == 0
    ends = [part.offset + part.nbytes for part in parts]
    assert [part.offset for part in parts] == [0, *ends[:-1]]
    assert ends[-1] == bucket.gathered_bytes == 3 * 2 + 2 * 4 + 1 + 4


@pytest.mark.parametrize("bucket_bytes", [1024**2, 256 * 1024**2])
def test_a_published_model_is_covered_once_within_the_bound(bucket_bytes):
    hf_config = {**published_config("Qwen3-30B-A3B"), "num_hidden_layers": 3}
    specs = family_of(hf_config).hf_tensor_specs(hf_config)
    buckets = cut_buckets(specs, bucket_bytes)
    assert max(bucket.gathered_bytes for bucket in buckets) <= bucket_bytes
    rows: dict[str, list[tuple[int, int]]] = {}
    for bucket in buckets:
        for part in bucket.gathered:
            rows.setdefault(part.spec.name, []).append((part.start, part.stop))
    assert list(rows) == [tensor.name for tensor in specs]
    for tensor in specs:
        edges = [0, *(stop for _, stop in rows[tensor.name])]
        assert rows[tensor.name] == list(itertools.pairwise(edges))
        assert edges[-1] == tensor.shape[0]


def test_a_transform_is_planned_by_what_it_makes_and_cut_where_it_allows():
    buckets = cut_buckets([spec("a", 9, 2), spec("b", 2, 2)], 40, HalfWithSums())
    assert all(max(bucket.gathered_bytes, bucket.sent_bytes) <= 40 for bucket in buckets)
    gathered = [[(p.spec.name, p.start, p.stop) for p in bucket.gathered] for bucket in buckets]
    sent = [[(p.spec.name, p.start, p.stop) for p in bucket.sent] for bucket in buckets]
    assert gathered == [[("a", 0, 4)], [("a", 4, 8), ("a", 8, 9)], [("b", 0, 2)]]
    assert sent == [
        [("a_sums", 0, 2), ("a", 0, 4)],
        [("a_sums", 2, 4), ("a_sums", 4, 5), ("a", 4, 8), ("a", 8, 9)],
        [("b_sums", 0, 1), ("b", 0, 2)],
    ]


@pytest.mark.parametrize("start", range(11))
def test_rows_of_interleaved_groups_are_copied_in_their_order(start):
    groups = torch.randn(3, 6, 2)[:, 1:5]
    for stop in range(start + 1, 13):
        target = torch.zeros(stop - start, 2)
        copy_rows(target, groups, start)
        assert torch.equal(target, groups.reshape(12, 2)[start:stop])


def piece(rows: tuple[int, int], *columns: tuple[int, int], holders: tuple[int, ...]) -> SourcePiece:
    return SourcePiece(region=tuple(slice(*edges) for edges in (rows, *columns)), holders=holders)


LAYOUT = {
    spec("rows", 8, 4): tuple(piece((i * 2, i * 2 + 2), (0, 4), holders=(i,)) for i in range(4)),
    spec("columns", 3, 4): (piece((0, 3), (0, 2), holders=(0, 2)), piece((0, 3), (2, 4), holders=(1, 3))),
    spec("everywhere", 5): (piece((0, 5), holders=(0, 1, 2, 3)),),
    spec("on_last", 6, 2): (piece((0, 6), (0, 2), holders=(3,)),),
}


def carried_out(plan, values):
    """The plan's buckets played through: content of the memory of rank 0's node, and bytes that crossed the network."""
    crossed = 0
    memories = []
    for bucket in plan.buckets:
        memory = {node: torch.full((bucket.gathered_bytes,), 255, dtype=torch.uint8) for node in plan.leaders}
        for rank, node in enumerate(plan.nodes):
            for part, region, held, _ in plan.writes(bucket, rank):
                assert rank in held.holders
                within = values[part.spec.name][held.region]
                source = tuple(
                    slice(edge.start - outer.start, edge.stop - outer.start)
                    for edge, outer in zip(region, held.region, strict=True)
                )
                part.view(memory[node])[part.local(region)] = within[source]
        for block in plan.blocks(bucket):
            part, place, source = block.part, block.part.local(block.region), plan.source(bucket, block)
            if source != plan.target:
                here = part.view(memory[source])[place]
                part.view(memory[plan.target])[place] = here
                crossed += here.nbytes
        memories.append(memory[plan.target])
    return memories, crossed


@pytest.mark.parametrize("bucket_bytes", [32, 100, 10_000])
@pytest.mark.parametrize(
    ("nodes", "lacking"),
    [
        # What the node of rank 0 lacks: nothing; the other node's rows and the last tensor; the same but for one
        # rank's rows; three quarters of the rows, half of the columns and the last tensor.
        ("aaaa", 0),
        ("aabb", 4 * 4 * 4 + 6 * 2 * 4),
        ("abaa", 2 * 4 * 4),
        ("abcd", 6 * 4 * 4 + 3 * 2 * 4 + 6 * 2 * 4),
    ],
)
def test_the_node_of_rank_0_has_every_byte_and_what_it_lacked_crossed_once(bucket_bytes, nodes, lacking):
    plan = plan_resync(LAYOUT, nodes, bucket_bytes=bucket_bytes)
    values = {spec.name: torch.randn(spec.shape) for spec in LAYOUT}
    memories, crossed = carried_out(plan, values)
    assert crossed == lacking
    for bucket, memory in zip(plan.buckets, memories, strict=True):
        for part in bucket.gathered:
            assert torch.equal(part.view(memory), values[part.spec.name][part.start : part.stop])


def test_leaders_are_the_lowest_ranks_of_their_nodes():
    plan = plan_resync(LAYOUT, "aabc", bucket_bytes=1000)
    assert plan.leaders == {"a": 0, "b": 2, "c": 3}


def test_other_nodes_than_that_of_rank_0_write_only_what_they_pass_on():
    plan = plan_resync(LAYOUT, "aabb", bucket_bytes=1000)
    (bucket,) = plan.buckets
    written = [
        sorted((part.spec.name, region[0].start) for part, region, *_ in plan.writes(bucket, rank)) for rank in range(4)
    ]
    assert written == [
        [("columns", 0), ("everywhere", 0), ("rows", 0)],
        [("columns", 0), ("rows", 2)],
        [("rows", 4)],
        [("on_last", 0), ("rows", 6)],
    ]


def test_nodes_that_hold_the_same_take_turns_to_pass_it_on():
    layout = {spec(f"w{i}", 2, 2): (piece((0, 2), (0, 2), holders=(1, 2)),) for i in range(4)}
    plan = plan_resync(layout, "abc", bucket_bytes=1000)
    (bucket,) = plan.buckets
    assert [plan.source(bucket, block) for block in plan.blocks(bucket)] == ["b", "b", "c", "c"]


def test_neighbouring_blocks_of_one_source_travel_as_one_message():
    layout = {spec(f"expert{i}", 2, 2): (piece((0, 2), (0, 2), holders=(i // 4,)),) for i in range(8)}
    layout[spec("halves", 3, 4)] = tuple(piece((0, 3), (2 * i, 2 * i + 2), holders=(i,)) for i in range(2))
    plan = plan_resync(layout, "ab", bucket_bytes=1000)
    (bucket,) = plan.buckets
    first, second = messages(plan, bucket)
    assert (first.source, first.start, first.stop) == ("b", 4 * 16, 8 * 16)
    assert second.columns is not None
