"""What trainer ranks send of any region, against quantisation of the whole matrix, bit for bit."""

import random
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from peer_world import PieceSource, edges_of
from thread_meeting import Meeting

from slimrl import device
from slimrl.data.model_weights import TensorSpec
from slimrl.quantization.fp8 import (
    NOT_FINITE,
    BlockFp8,
    dequantize,
    quantize,
    quantize_with,
    scales_of,
    tile_absmax,
)
from slimrl.resync.p2p.demand import sent_tensors, tiles_of
from slimrl.resync.p2p.sent_values import SentValues
from slimrl.resync.transform import Quantize, RoundToFp8

pytestmark = pytest.mark.skipif(device.device_type() == "cuda", reason="the regions here are of host memory")

BLOCK = (4, 6)
SHAPE = (23, 20)
"""Partial tiles at the lower and the right edge"""

PIECES = {
    "one rank": [(((0, 23), (0, 20)), (0,))],
    "two pieces of a rank within tiles": [(((0, 10), (0, 20)), (0,)), (((10, 23), (0, 20)), (0,))],
    "tiles that ranks share": [(((0, 10), (0, 20)), (0,)), (((10, 23), (0, 20)), (1,))],
    "columns within tiles": [(((0, 23), (0, 9)), (0,)), (((0, 23), (9, 20)), (1,))],
    "sections of two ranks": [
        (((0, 5), (0, 20)), (0,)), (((5, 11), (0, 20)), (1,)), (((11, 14), (0, 20)), (0,)), (((14, 23), (0, 20)), (1,)),
    ],
    "whole tiles": [(((0, 12), (0, 20)), (0, 1)), (((12, 23), (0, 20)), (1,))],
}  # fmt: skip


class ThreadRanks:
    """The part of Ranks that SentValues needs, for threads."""

    def __init__(self, rank, meeting):
        self.rank, self._meeting = rank, meeting

    def largest(self, values):
        values.copy_(torch.stack(self._meeting.exchange(self.rank, values.clone())).amax(0))


def in_threads(work, num_ranks=2):
    """What `work` gives for each rank, or raises."""
    with ThreadPoolExecutor(num_ranks) as pool:
        return [done.exception() or done.result() for done in [pool.submit(work, rank) for rank in range(num_ranks)]]


def matrix(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(SHAPE, generator=generator) * torch.exp(3 * torch.randn(SHAPE, generator=generator))
    values[4:8, 6:12] = 0
    return values.to(dtype)


def values_of(truth, pieces, transform, live_dtype=None, spec_dtype=None):
    """SentValues of two ranks that have settled their scales, or what this raised."""
    dtype = spec_dtype or str(truth.dtype).removeprefix("torch.")
    by_spec = {TensorSpec(name="w", shape=SHAPE, dtype=dtype): pieces}
    meeting = Meeting(2)

    def settled(rank):
        source = PieceSource(rank, by_spec, {"w": truth}, live_dtype)
        tensors = sent_tensors(source.layout(), transform)
        values = SentValues(source, tensors, transform, ThreadRanks(rank, meeting))
        values.settle()
        return values

    return in_threads(settled)


def random_box(rng, box):
    return tuple(tuple(sorted(rng.sample(range(start, stop + 1), 2))) for start, stop in box)


def written(values, name, box, dtype):
    target = torch.zeros([b - a for a, b in box], dtype=dtype)
    values.write(name, box, target)
    return target


def same_bits(one, other):
    return one.dtype is other.dtype and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )


@pytest.mark.parametrize("layout", PIECES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("live_dtype", [None, torch.float32])
def test_every_region_has_the_bits_of_the_whole_quantised_matrix(layout, dtype, live_dtype):
    truth, transform = matrix(dtype), Quantize(BlockFp8(block=BLOCK), ["w"])
    codes, scales = quantize(truth, BLOCK)
    both = values_of(truth, PIECES[layout], transform, live_dtype)
    rng = random.Random(0)
    for box, holders in PIECES[layout]:
        for rank in holders:
            for region in [box, *(random_box(rng, box) for _ in range(20))]:
                got = written(both[rank], "w", region, torch.float8_e4m3fn)
                assert same_bits(got, codes[edges_of(region)]), region
            tiles = tiles_of(box, BLOCK)
            for region in [tiles, *(random_box(rng, tiles) for _ in range(5))]:
                got = written(both[rank], "w_scale_inv", region, torch.float32)
                assert same_bits(got, scales[edges_of(region)]), region


@pytest.mark.parametrize("layout", PIECES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_region_has_the_bits_of_the_whole_matrix_that_was_rounded_to_fp8_and_back(layout, dtype):
    truth, transform = matrix(dtype, 1), RoundToFp8(BlockFp8(block=BLOCK), ["w"])
    expected = dequantize(*quantize(truth, BLOCK), dtype, BLOCK)
    both = values_of(truth, PIECES[layout], transform)
    rng = random.Random(1)
    for box, holders in PIECES[layout]:
        for rank in holders:
            for region in [box, *(random_box(rng, box) for _ in range(20))]:
                assert same_bits(written(both[rank], "w", region, dtype), expected[edges_of(region)]), region


def test_a_live_weight_of_another_dtype_is_quantised_in_the_tensor_s_dtype():
    live = matrix(torch.float32, 2)
    transform = Quantize(BlockFp8(block=BLOCK), ["w"])
    both = values_of(live, PIECES["tiles that ranks share"], transform, spec_dtype="bfloat16")
    codes, scales = quantize(live.bfloat16(), BLOCK)
    assert not same_bits(codes, quantize(live, BLOCK)[0])
    for rank, (box, _) in enumerate(PIECES["tiles that ranks share"]):
        assert same_bits(written(both[rank], "w", box, torch.float8_e4m3fn), codes[edges_of(box)])
        tiles = tiles_of(box, BLOCK)
        assert same_bits(written(both[rank], "w_scale_inv", tiles, torch.float32), scales[edges_of(tiles)])


def test_scales_are_those_of_the_weights_when_they_were_settled_last():
    transform = Quantize(BlockFp8(block=BLOCK), ["w"])
    pieces = PIECES["sections of two ranks"]
    first, second = matrix(torch.float32, 3), matrix(torch.float32, 4)
    both = values_of(first, pieces, transform)
    for values in both:
        values._source.truth = {"w": second}
    in_threads(lambda rank: both[rank].settle())
    expected = quantize(second, BLOCK)[1]
    for box, (rank,) in pieces:
        tiles = tiles_of(box, BLOCK)
        assert same_bits(written(both[rank], "w_scale_inv", tiles, torch.float32), expected[edges_of(tiles)])


@pytest.mark.parametrize("layout", ["one rank", "tiles that ranks share", "sections of two ranks"])
@pytest.mark.parametrize("transform", [Quantize, RoundToFp8])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_matrix_that_is_not_finite_is_named_by_a_rank_that_has_the_value(layout, transform, value):
    truth = matrix(torch.bfloat16)
    truth[9, 19] = float(value)
    results = values_of(truth, PIECES[layout], transform(BlockFp8(block=BLOCK), ["w"]))
    (holder,) = [rank for box, (rank,) in PIECES[layout] if box[0][0] <= 9 < box[0][1]]
    assert isinstance(results[holder], ValueError)
    assert str(results[holder]) == f"w: {NOT_FINITE}"


@pytest.mark.parametrize("transform", [None, Quantize(BlockFp8(block=BLOCK), ["another"])])
@pytest.mark.parametrize("layout", PIECES)
def test_regions_of_tensors_that_stay_as_they_are_are_copied(layout, transform):
    truth = matrix(torch.bfloat16, 5)
    both = values_of(truth, PIECES[layout], transform, torch.float32)
    rng = random.Random(2)
    for box, holders in PIECES[layout]:
        for rank in holders:
            for region in [box, *(random_box(rng, box) for _ in range(20))]:
                assert same_bits(written(both[rank], "w", region, torch.bfloat16), truth[edges_of(region)])


def test_experts_that_lie_in_groups_are_copied_over_the_groups_edges():
    truth = torch.randn(12, 5)
    spec = TensorSpec(name="w", shape=(12, 5), dtype="float32")
    source = PieceSource(0, {spec: [(((0, 12), (0, 5)), (0,))]}, {"w": truth})
    source.groups = lambda name: torch.nn.functional.pad(truth.view(4, 3, 5), (0, 2))
    values = SentValues(source, sent_tensors(source.layout(), None), None, SimpleNamespace(rank=0))
    for start in range(12):
        for stop in range(start + 1, 13):
            region = ((start, stop), (1, 4))
            assert torch.equal(written(values, "w", region, torch.float32), truth[start:stop, 1:4])


def test_a_region_that_the_rank_does_not_hold_is_refused():
    both = values_of(matrix(torch.float32), PIECES["tiles that ranks share"], Quantize(BlockFp8(block=BLOCK), ["w"]))
    with pytest.raises(KeyError, match=r"no piece of this rank has .* of w"):
        written(both[0], "w", ((9, 11), (0, 20)), torch.float8_e4m3fn)
    with pytest.raises(KeyError, match=r"no piece of this rank has tiles .* of w"):
        written(both[0], "w_scale_inv", ((5, 6), (0, 4)), torch.float32)


def test_a_version_without_a_transform_settles_nothing():
    (one, other) = values_of(matrix(torch.float32), PIECES["tiles that ranks share"], None)
    assert (one._scales, other._scales) == ({}, {})


def tiles_by_hand(size, tile, offset):
    """(first, end) of each tile's part of a piece that begins `offset` behind the beginning of a tile."""
    edges = [0, *range(tile - offset, size, tile), size]
    return list(pairwise(edges))


@pytest.mark.parametrize("offset", [(0, 0), (3, 0), (0, 5), (2, 1), (3, 5)])
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (4, 6), (9, 13), (23, 20)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("band_bytes", [1, 1 << 22])
def test_tiles_of_a_piece_have_their_largest_value_scale_and_codes(monkeypatch, shape, offset, dtype, band_bytes):
    monkeypatch.setattr("slimrl.quantization.fp8.BAND_BYTES", band_bytes)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(6)).to(dtype)
    before = weight.clone()
    rows, columns = (tiles_by_hand(*each) for each in zip(shape, BLOCK, offset, strict=True))
    expected = torch.tensor([[weight[a:b, c:d].abs().max().float() for c, d in columns] for a, b in rows])
    absmax = tile_absmax(weight, BLOCK, offset)
    assert same_bits(absmax, expected)
    scales = scales_of(absmax)
    # A product with a rounded reciprocal would differ in the last bit.
    assert scales.tolist() == [[float(torch.tensor(x) / torch.tensor(448.0)) for x in row] for row in expected.tolist()]
    codes = torch.empty(shape, dtype=torch.float8_e4m3fn)
    quantize_with(weight, scales, BLOCK, offset, codes)
    for i, (a, b) in enumerate(rows):
        for j, (c, d) in enumerate(columns):
            assert same_bits(codes[a:b, c:d], (weight[a:b, c:d].float() / scales[i, j]).to(torch.float8_e4m3fn))
    assert torch.equal(weight, before)
    back = dequantize(codes, scales, torch.float32, BLOCK, offset)
    for i, (a, b) in enumerate(rows):
        for j, (c, d) in enumerate(columns):
            assert same_bits(back[a:b, c:d], codes[a:b, c:d].float() * scales[i, j])


def test_tiles_of_zeros_and_of_values_that_are_not_finite():
    weight = torch.zeros(8, 12)
    weight[5, 0], weight[0, 7] = torch.nan, -torch.inf
    absmax = tile_absmax(weight, BLOCK)
    assert absmax.nan_to_num(nan=-1.0, posinf=torch.inf).tolist() == [[0.0, torch.inf], [-1.0, 0.0]]
    scales = scales_of(absmax)
    assert scales.isfinite().tolist() == [[True, False], [False, True]]
    assert scales[0, 0] == torch.tensor(1e-10) / torch.tensor(448.0)
