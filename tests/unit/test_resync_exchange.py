"""What travels between nodes: quantised where it can be, over all ranks of a node, to the bits of one node alone.

The plan is played through in one process: the nodes' memories are tensors, and a message is a copy.
"""

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from slimrl.config.schema.resync import ResyncConfig, VerifyMode
from slimrl.data.model_weights import SourcePiece, TensorSpec
from slimrl.models.fingerprint import fingerprint
from slimrl.quantization.fp8 import BlockFp8, quantize
from slimrl.resync.exchange import CUT_BYTES, Exchange, messages
from slimrl.resync.expected_fingerprints import ExpectedFingerprints
from slimrl.resync.pipeline import Gatherer
from slimrl.resync.plan import plan_resync
from slimrl.resync.ranks import RankError
from slimrl.resync.report import Clock
from slimrl.resync.transform import NodeTransform, Quantize, RoundToFp8

FP8 = BlockFp8(block=(16, 8))


def matrix(name: str, rows: int, columns: int) -> TensorSpec:
    return TensorSpec(name=name, shape=(rows, columns), dtype="bfloat16")


def cut(spec: TensorSpec, dimension: int, edges: list[int], holders: list[tuple[int, ...]]) -> tuple[SourcePiece, ...]:
    """Pieces between edges of rows (0) or columns (1)."""
    pieces = []
    for start, stop, ranks in zip(edges, edges[1:], holders, strict=False):
        region = [slice(0, size) for size in spec.shape]
        region[dimension] = slice(start, stop)
        pieces.append(SourcePiece(region=tuple(region), holders=ranks))
    return tuple(pieces)


ROWS = matrix("rows.weight", 70, 21)
COLUMNS = matrix("columns.weight", 37, 32)
STRADDLING = matrix("straddling.weight", 40, 24)
KEPT = matrix("kept.weight", 20, 6)
LARGE = matrix("large.weight", 200, 30)
EXPERTS = [matrix(f"layers.0.experts.{i}.up.weight", 37, 21) for i in range(8)]
QUANTISED = frozenset(spec.name for spec in (ROWS, COLUMNS, STRADDLING, LARGE, *EXPERTS))

LAYOUT = {
    ROWS: cut(ROWS, 0, [0, 32, 70], [(0, 1), (2, 3)]),
    COLUMNS: cut(COLUMNS, 1, [0, 8, 16, 24, 32], [(0,), (1,), (2,), (3,)]),
    STRADDLING: cut(STRADDLING, 0, [0, 10, 20, 30, 40], [(0,), (1,), (2,), (3,)]),
    KEPT: cut(KEPT, 0, [0, 20], [(3,)]),
    LARGE: cut(LARGE, 0, [0, 48, 96, 144, 200], [(0,), (1,), (2,), (3,)]),
    **{spec: cut(spec, 0, [0, 37], [(i // 2,)]) for i, spec in enumerate(EXPERTS)},
}


def random_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {spec.name: torch.randn(spec.shape, generator=generator).to(torch.bfloat16) for spec in LAYOUT}


class Source:
    """One rank's pieces."""

    def __init__(self, weights: dict[str, torch.Tensor], rank: int) -> None:
        self.weights, self.rank = weights, rank

    def groups(self, name):
        pieces = next(pieces for spec, pieces in LAYOUT.items() if spec.name == name)
        (piece,) = [piece for piece in pieces if self.rank in piece.holders]
        return self.weights[name][piece.region][None]


class AddingRanks:
    """Ranks that add one after the other: the last one has the sum."""

    rank, _total = -1, 0

    def add(self, values):
        self._total = self._total + values
        values.copy_(self._total)


class Play:
    """A version, played through.

    Args:
        spoil: (when, node, name of a tensor) of a fault in a node's memory: when it is `gathered`, or `exchanged`.
    """

    def __init__(self, weights, nodes, *, bucket_bytes, transform=None, spoil=None) -> None:
        self.transform = transform or Quantize(FP8, QUANTISED)
        self.plan = plan_resync(LAYOUT, nodes, bucket_bytes=bucket_bytes, transform=self.transform)
        config = ResyncConfig(verify=VerifyMode.full)
        self.expected = [ExpectedFingerprints(LAYOUT, self.transform, config, 1) for _ in nodes]
        self.sources = [Source(weights, rank) for rank in range(len(nodes))]
        self.spoil = spoil or ("", "", "")
        self.errors: list[str] = []
        self.loaded: dict[str, torch.Tensor] = {}
        self.crossed: Counter[tuple[str, int]] = Counter()
        """Bytes by (source, rail)"""
        gatherers = [Gatherer(self.plan, source, source.rank) for source in self.sources]
        on_nodes = {node: NodeTransform(self.plan, leader) for node, leader in self.plan.leaders.items()}
        for number in range(len(self.plan.buckets)):
            self._bucket(number, gatherers, on_nodes)

    def _bucket(self, number, gatherers, on_nodes) -> None:
        plan, bucket, clock = self.plan, self.plan.buckets[number], Clock()
        # NaN where nothing was written, in all of the dtypes.
        gathered, sent = (
            {node: torch.full((nbytes,), 255, dtype=torch.uint8) for node in plan.leaders}
            for nbytes in (bucket.gathered_bytes, bucket.sent_bytes)
        )
        for rank, gatherer in enumerate(gatherers):
            gatherer.write(number, gathered[plan.nodes[rank]])
        self._fault("gathered", bucket.gathered, gathered)
        for node, leader in plan.leaders.items():
            record = self.expected[leader].record
            self._note(on_nodes[node].before(number, gathered[node], sent[node], clock, record))
        for message in messages(plan, bucket):
            memory = sent if message.transformed else gathered
            if message.columns:
                part, region = message.columns
                part.region_view(memory[plan.target], region).copy_(part.region_view(memory[message.source], region))
            else:
                span = slice(message.start, message.stop)
                memory[plan.target][span] = memory[message.source][span]
            self.crossed[message.source, message.rail] += message.nbytes
        self._fault("exchanged", bucket.sent, sent)
        flat, record = sent[plan.target], self.expected[0].record
        self._note(on_nodes[plan.target].behind(number, gathered[plan.target], flat, clock, record))
        for part in bucket.sent:
            whole = torch.zeros(part.spec.shape, dtype=getattr(torch, part.spec.dtype))
            self.loaded.setdefault(part.spec.name, whole)[part.start : part.stop] = part.view(flat)

    def _fault(self, when, parts, memory) -> None:
        for part in parts:
            if (when, part.spec.name) == (self.spoil[0], self.spoil[2]):
                memory[self.spoil[1]][part.offset] ^= 1

    def _note(self, error) -> None:
        if error is not None:
            self.errors.append(str(error))

    def verdict(self) -> tuple[list[str], list[str]]:
        """(tensors that differ in the engines, tensors that were gathered wrongly)"""
        ranks = AddingRanks()
        for expected, source in zip(self.expected, self.sources, strict=True):
            ranks.rank = source.rank
            hashes, lost = expected.fingerprints(source, ranks)
        return [name for name, value in self.loaded.items() if fingerprint(value) != hashes[name]], lost


@pytest.mark.parametrize("bucket_bytes", [2500, 7000, 10**6])
@pytest.mark.parametrize("nodes", ["aaaa", "aabb", "abab", "abcc", "abcd"])
def test_engines_get_the_bits_of_quantising_whole_matrices_wherever_the_ranks_are(nodes, bucket_bytes):
    weights = random_weights()
    play = Play(weights, nodes, bucket_bytes=bucket_bytes)
    assert play.errors == []
    for name, value in weights.items():
        if name in QUANTISED:
            codes, scale = quantize(value, FP8.block)
            assert torch.equal(play.loaded[name].view(torch.uint8), codes.view(torch.uint8)), name
            assert torch.equal(play.loaded[name + "_scale_inv"], scale), name
        else:
            assert torch.equal(play.loaded[name], value), name
    assert play.verdict() == ([], [])


def quantised_bytes(rows: int, columns: int) -> int:
    return rows * columns + 4 * -(-rows // 16) * -(-columns // 8)


def test_bytes_between_nodes_halve_but_for_tensors_whose_tiles_lie_on_two_nodes():
    play = Play(random_weights(), "abcd", bucket_bytes=10**6)
    expected = (
        # Rows from 32 on, which begin and end a tile; three of four columns of tiles; experts 2 to 7.
        quantised_bytes(70 - 32, 21) + quantised_bytes(37, 24) + 6 * quantised_bytes(37, 21)
        # Rows 48 to 200.
        + quantised_bytes(200 - 48, 30)
        # Tiles of 16 rows, ranks of 10: in bfloat16; the tensor that is not quantised.
        + 2 * 30 * 24 + 2 * 20 * 6
    )  # fmt: skip
    assert play.crossed.total() == expected
    plain = 2 * ((70 - 32) * 21 + 37 * 24 + 6 * 37 * 21 + (200 - 48) * 30 + 30 * 24 + 20 * 6)
    assert expected < 0.6 * plain


def test_tiles_that_lie_on_two_ranks_of_one_node_are_whole_there():
    layout = {STRADDLING: cut(STRADDLING, 0, [0, 10, 40], [(1,), (2,)])}

    def crossing(nodes: str) -> int:
        plan = plan_resync(layout, nodes, bucket_bytes=10**6, transform=Quantize(FP8, QUANTISED))
        return sum(message.nbytes for bucket in plan.buckets for message in messages(plan, bucket))

    assert crossing("abb") == quantised_bytes(40, 24)
    assert crossing("abc") == 2 * 40 * 24


def test_values_that_do_not_get_smaller_travel_before_they_are_rounded():
    transform = RoundToFp8(FP8, QUANTISED)
    play = Play(random_weights(), "aabb", bucket_bytes=10**6, transform=transform)
    assert play.verdict() == ([], [])
    assert not any(message.transformed for bucket in play.plan.buckets for message in messages(play.plan, bucket))


@pytest.mark.parametrize("nodes", ["aabb", "abcd"])
def test_all_ranks_of_a_node_share_what_it_sends(nodes):
    play = Play(random_weights(), nodes, bucket_bytes=10**6)
    for source in set(nodes) - {"a"}:
        shares = [play.crossed[source, rail] for rail in range(len(play.plan.rails))]
        # The widest column of tiles is not cut.
        assert max(shares) - min(shares) <= CUT_BYTES + 37 * 16, shares
        assert min(shares) > 0
    assert len(play.plan.rails) == {"aabb": 2, "abcd": 1}[nodes]


def test_a_message_is_cut_at_aligned_places_into_equal_shares():
    spec = matrix("w", 64, 1024)
    layout = {spec: cut(spec, 0, [0, 64], [(4,)])}
    plan = plan_resync(layout, "aaaabbbbb", bucket_bytes=10**6)
    assert plan.rails == ({"a": 0, "b": 4}, {"a": 1, "b": 5}, {"a": 2, "b": 6}, {"a": 3, "b": 7})
    (bucket,) = plan.buckets
    quarter = 2 * 64 * 1024 // 4
    found = [(each.source, each.rail, each.start, each.stop) for each in messages(plan, bucket)]
    assert found == [("b", rail, rail * quarter, (rail + 1) * quarter) for rail in range(4)]


@pytest.mark.parametrize(
    ("spoil", "wrong", "lost"),
    [
        (("gathered", "b", EXPERTS[6].name), [], [EXPERTS[6].name]),
        (("gathered", "a", STRADDLING.name), [], [STRADDLING.name]),
        (("exchanged", "a", EXPERTS[6].name), [EXPERTS[6].name], []),
        (("exchanged", "a", COLUMNS.name), [COLUMNS.name], []),
    ],
)
def test_a_fault_on_the_way_is_found_wherever_it_happens(spoil, wrong, lost):
    play = Play(random_weights(), "aabb", bucket_bytes=10**6, spoil=spoil)
    assert play.verdict() == (wrong, lost)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_node_that_finds_nan_says_so_and_passes_its_blocks_on_all_the_same(value):
    weights = random_weights()
    weights[EXPERTS[6].name][36, 20] = value
    play = Play(weights, "aabb", bucket_bytes=10**6)
    assert play.errors == [f"{EXPERTS[6].name}: the matrix holds NaN or infinity"]
    assert fingerprint(play.loaded[EXPERTS[7].name]) == fingerprint(quantize(weights[EXPERTS[7].name], FP8.block)[0])


def test_a_rank_that_is_lost_while_rails_are_made_is_named_as_the_cause(monkeypatch):
    def new_group(ranks, timeout):
        raise dist.DistStoreError("timed out after 1 s waiting for clients. 3/4 clients joined.")

    monkeypatch.setattr(dist, "new_group", new_group)
    with pytest.raises(RankError, match="a rank of the trainer died or is late: timed out"):
        Exchange([{"a": 0, "b": 1}], "a", 0, 1.0)
