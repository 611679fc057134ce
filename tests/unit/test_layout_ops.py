"""Layout operations: exact inverses, the layouts that Megatron documents, and equal under any sharding."""

from itertools import pairwise

import pytest
import torch

from slimrl.models.layout_ops import DeltaNetInput, DeltaNetParts, GateUp, GroupedQKV, Identity
from slimrl.models.weight_map import Entry, HfTensor, Rule, Shard, WeightMap

HIDDEN, GROUPS, QUERIES, DIM, WIDE = 12, 4, 3, 5, 8
QKV = Rule(
    megatron=("qkv",),
    hf=(
        HfTensor(name="q", shape=(GROUPS * QUERIES * DIM, HIDDEN)),
        HfTensor(name="k", shape=(GROUPS * DIM, HIDDEN)),
        HfTensor(name="v", shape=(GROUPS * DIM, HIDDEN)),
    ),
    op=GroupedQKV(QUERIES, DIM),
    shard=Shard(dim=0),
)
GATED_QKV = Rule(
    megatron=("gated",),
    hf=(HfTensor(name="qg", shape=(GROUPS * QUERIES * 2 * DIM, HIDDEN)), *QKV.hf[1:]),
    op=GroupedQKV(QUERIES, DIM, gated=True),
    shard=Shard(dim=0),
)
KEY_DIM, VALUE_DIM, VALUES = 2, 3, 2
DELTA_NET = Rule(
    megatron=("delta",),
    hf=(
        HfTensor(name="qkvz", shape=(GROUPS * (2 * KEY_DIM + 2 * VALUES * VALUE_DIM), HIDDEN)),
        HfTensor(name="ba", shape=(GROUPS * 2 * VALUES, HIDDEN)),
    ),
    op=DeltaNetInput(VALUES, KEY_DIM, VALUE_DIM),
    shard=Shard(dim=0),
)
CONV = Rule(
    megatron=("conv",),
    hf=(HfTensor(name="conv", shape=(32, 1, 3), sections=(8, 8, 16)),),
    op=DeltaNetParts((32,)),
    shard=Shard(dim=0),
)
IN_PARTS = Rule(
    megatron=("parts",),
    hf=(
        HfTensor(name="qkv", shape=(32, HIDDEN), sections=(8, 8, 16)),
        HfTensor(name="z", shape=(16, HIDDEN)),
        HfTensor(name="b", shape=(4, HIDDEN)),
        HfTensor(name="a", shape=(4, HIDDEN)),
    ),
    op=DeltaNetParts((32, 16, 4, 4)),
    shard=Shard(dim=0),
)
GATE_UP = Rule(
    megatron=("fc1",),
    hf=(HfTensor(name="gate", shape=(WIDE, HIDDEN)), HfTensor(name="up", shape=(WIDE, HIDDEN))),
    op=GateUp(),
    shard=Shard(dim=0),
)
DOWN = Rule(megatron=("fc2",), hf=(HfTensor(name="down", shape=(HIDDEN, WIDE)),), op=Identity(), shard=Shard(dim=1))
NORM = Rule(megatron=("norm",), hf=(HfTensor(name="norm", shape=(HIDDEN,)),))
EMBED = Rule(megatron=("embed",), hf=(HfTensor(name="embed", shape=(13, HIDDEN)),), shard=Shard(dim=0, padded_size=24))


def entry_of(rule: Rule) -> Entry:
    (entry,) = WeightMap([rule]).entries
    return entry


def random_weights(rule: Rule) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {tensor.name: torch.randn(tensor.shape, generator=generator) for tensor in rule.hf}


def shards(rule: Rule, weights: dict[str, torch.Tensor], count: int) -> list[torch.Tensor]:
    entry = entry_of(rule)
    return [entry.to_megatron(lambda name, where: weights[name][where], i, count) for i in range(count)]


@pytest.mark.parametrize(
    "rule", [QKV, GATED_QKV, DELTA_NET, IN_PARTS, CONV, GATE_UP, DOWN, EMBED], ids=lambda rule: rule.megatron[0]
)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_shards_turn_back_into_the_tensors_they_came_from(rule, count):
    weights = random_weights(rule)
    back = entry_of(rule).to_hf(shards(rule, weights, count))
    for tensor, result in zip(rule.hf, back, strict=True):
        assert torch.equal(result, weights[tensor.name])


def test_grouped_qkv_puts_each_group_s_queries_before_its_key_and_value():
    weights = random_weights(QKV)
    (fused,) = shards(QKV, weights, 1)
    rows = []
    for group in range(GROUPS):
        rows.append(weights["q"][group * QUERIES * DIM : (group + 1) * QUERIES * DIM])
        rows.append(weights["k"][group * DIM : (group + 1) * DIM])
        rows.append(weights["v"][group * DIM : (group + 1) * DIM])
    assert torch.equal(fused, torch.cat(rows))


def test_a_group_s_gate_heads_follow_its_query_heads():
    """Row 10 h + d of the queries' tensor is dimension d of query head h, row 10 h + 5 + d of its gate."""
    weights = random_weights(GATED_QKV)
    (fused,) = shards(GATED_QKV, weights, 1)
    rows = []
    for group in range(GROUPS):
        heads = range(group * QUERIES, (group + 1) * QUERIES)
        for gate in (0, DIM):
            rows += [weights["qg"][2 * DIM * head + gate : 2 * DIM * head + gate + DIM] for head in heads]
        rows += [weights[name][group * DIM : (group + 1) * DIM] for name in ("k", "v")]
    assert torch.equal(fused, torch.cat(rows))


def test_the_input_of_a_delta_net_holds_all_heads_of_a_kind_one_after_the_other():
    weights = random_weights(DELTA_NET)
    for count in (1, 2):
        heads = GROUPS // count
        for index, shard in enumerate(shards(DELTA_NET, weights, count)):
            qkvz, ba = (weights[name].view(GROUPS, -1, HIDDEN)[index * heads : (index + 1) * heads] for name in weights)
            edges = [0, KEY_DIM, 2 * KEY_DIM, 2 * KEY_DIM + VALUES * VALUE_DIM, 2 * KEY_DIM + 2 * VALUES * VALUE_DIM]
            kinds = [qkvz[:, a:b] for a, b in pairwise(edges)] + [ba[:, :VALUES], ba[:, VALUES:]]
            assert torch.equal(shard, torch.cat([kind.reshape(-1, HIDDEN) for kind in kinds]))


def test_a_rank_has_its_part_of_each_part_of_a_delta_net_s_input():
    weights = random_weights(IN_PARTS)
    query, key, value = weights["qkv"].split([8, 8, 16])
    kinds = (query, key, value, weights["z"], weights["b"], weights["a"])
    for index, shard in enumerate(shards(IN_PARTS, weights, 2)):
        assert torch.equal(shard, torch.cat([kind.chunk(2)[index] for kind in kinds]))
        back = IN_PARTS.op.groups(shard)
        expected = [torch.cat([kind.chunk(2)[index] for kind in kinds[:3]]), *(k.chunk(2)[index] for k in kinds[3:])]
        assert all(torch.equal(groups[0], part) for groups, part in zip(back, expected, strict=True))


def test_every_section_of_a_convolution_is_sharded_by_itself():
    weights = random_weights(CONV)
    query, key, value = weights["conv"].split([8, 8, 16])
    assert torch.equal(shards(CONV, weights, 2)[1], torch.cat([query[4:], key[4:], value[8:]]))
    with pytest.raises(ValueError, match="conv: dimension 0 of 8 does not divide over 3 ranks"):
        shards(CONV, weights, 3)


def test_every_part_of_a_delta_net_is_stored_or_refused():
    assert CONV.op.stored_parts(CONV.hf) == {".query": 8, ".key": 8, ".value": 16}
    assert IN_PARTS.op.stored_parts(IN_PARTS.hf) == {
        ".query": 8, ".key": 8, ".value": 16, ".z": 16, ".beta": 4, ".alpha": 4,
    }  # fmt: skip
    for tensors in (IN_PARTS.hf[:2], IN_PARTS.hf[:3], (*IN_PARTS.hf, IN_PARTS.hf[3])):
        with pytest.raises(ValueError, match="zip"):
            IN_PARTS.op.stored_parts(tensors)


def test_a_shard_of_fc1_holds_a_piece_of_gate_and_a_piece_of_up():
    weights = random_weights(GATE_UP)
    _, second = shards(GATE_UP, weights, 2)
    assert torch.equal(second, torch.cat([weights["gate"][4:], weights["up"][4:]]))


def test_query_key_value_shards_are_row_blocks_of_the_fused_tensor():
    weights = random_weights(QKV)
    (whole,) = shards(QKV, weights, 1)
    assert torch.equal(torch.cat(shards(QKV, weights, 2)), whole)


def test_padding_rows_are_zero_even_where_a_shard_is_padding_alone():
    weights = random_weights(EMBED)
    parts = shards(EMBED, weights, 4)
    assert [tuple(part.shape) for part in parts] == [(6, HIDDEN)] * 4
    assert torch.equal(torch.cat(parts)[:13], weights["embed"])
    assert not torch.cat(parts)[13:].any()


def test_biases_take_the_same_operation_as_weights():
    op = GroupedQKV(QUERIES, DIM)
    query, key, value = torch.arange(60), torch.arange(100, 120), torch.arange(200, 220)
    back = op.to_hf(op.to_megatron(query, key, value))
    assert all(torch.equal(a, b) for a, b in zip(back, (query, key, value), strict=True))


def test_a_dimension_that_does_not_divide_is_refused_by_name():
    with pytest.raises(ValueError, match="gate: dimension 0 of 8 does not divide over 3 ranks"):
        shards(GATE_UP, random_weights(GATE_UP), 3)


def test_columns_are_padded_on_the_side_where_the_last_shards_lie():
    tensor = torch.arange(1.0, 31.0).view(2, 3, 5)
    rule = Rule(megatron=("w",), hf=(HfTensor(name="w", shape=(2, 3, 5)),), shard=Shard(dim=1, padded_size=8))
    shards = [entry_of(rule).to_megatron(lambda _, part: tensor[part], index, 4) for index in range(4)]
    assert [tuple(shard.shape) for shard in shards] == [(2, 2, 5)] * 4
    assert torch.equal(torch.cat(shards, dim=1)[:, :3], tensor)
    assert not torch.cat(shards, dim=1)[:, 3:].any()
    assert torch.equal(entry_of(rule).to_hf(shards)[0], tensor)


def test_groups_are_views_of_the_weight_with_the_rows_of_each_tensor():
    q, k, v = (torch.randn(rows, HIDDEN) for rows in (GROUPS * QUERIES * DIM, GROUPS * DIM, GROUPS * DIM))
    fused = GroupedQKV(QUERIES, DIM).to_megatron(q, k, v)
    for groups, tensor in zip(GroupedQKV(QUERIES, DIM).groups(fused), (q, k, v), strict=True):
        assert groups.shape[0] == GROUPS
        assert torch.equal(groups.flatten(0, 1), tensor)
    gate, up = torch.randn(2, WIDE, HIDDEN)
    both = GateUp().to_megatron(gate, up)
    assert [groups.shape for groups in GateUp().groups(both)] == [(1, WIDE, HIDDEN)] * 2
    assert all(torch.equal(g[0], t) for g, t in zip(GateUp().groups(both), (gate, up), strict=True))
    assert [tuple(Identity().groups(torch.ones(shape))[0].shape) for shape in ((), (3,), (2, 3))] == [
        (1, 1), (1, 3), (1, 2, 3),
    ]  # fmt: skip
    for rule in (GATED_QKV, DELTA_NET):
        weights = random_weights(rule)
        groups = rule.op.groups(rule.op.to_megatron(*weights.values()))
        assert [g.shape[0] for g in groups] == [GROUPS] * len(weights)
        assert all(torch.equal(g.flatten(0, 1), t) for g, t in zip(groups, weights.values(), strict=True))
    both_views = GateUp().groups(both)
    both.zero_()
    assert not any(groups.any() for groups in both_views)
