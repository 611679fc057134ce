"""What ranks of an engine say that they keep, against parameters that were fused and sharded by hand."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from test_engine_layout import (
    EXPERTS,
    HEADS,
    KV_HEADS,
    NEXT,
    OF_ATTENTION,
    QWEN3_5,
    RANKS,
    VOCAB,
    engine_rank,
    grouped_rank,
    hf_tensors,
    next_rank,
    next_tensors,
    qwen3_5_rank,
    qwen3_5_tensors,
)

from slimrl.engines.plugin import kept_tensors
from slimrl.engines.plugin.kept_tensors import kept_regions, kept_report, parse_kept

PADDING = 77.0


def with_vocab(config, vocab_size=16):
    return SimpleNamespace(**{**vars(config), "vocab_size": vocab_size})


QWEN3_MOE = SimpleNamespace(
    model_type="qwen3_moe", num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, num_experts=EXPERTS,
    vocab_size=VOCAB,
)  # fmt: skip


def grouped_qwen3_5_rank(tensors, rank, world, groups):
    """Only attention is sharded within the rank's group; SGLang's qwen3_5.py gives every rank the whole embedding."""
    size = world // groups
    alone, group = qwen3_5_rank(tensors, rank, world), qwen3_5_rank(tensors, rank % size, size)
    of_group = {name: (group if any(of in name for of in OF_ATTENTION) else alone)[name] for name in alone}
    return of_group | {name: tensors[name] for name in alone if "embed_tokens" in name}


CASES = [
    *((f"experts-{world}-{parts}", QWEN3_MOE, hf_tensors, engine_rank, world, parts, 1) for world, parts in RANKS),
    *((f"next-{world}", with_vocab(NEXT), next_tensors, next_rank, world, 1, 1) for world in (1, 2, 4)),
    *(
        (f"next-{world}-{groups}", with_vocab(NEXT), next_tensors, grouped_rank, world, 1, groups)
        for world, groups in [(2, 2), (4, 2), (4, 4)]
    ),
    *((f"qwen3_5-{world}", with_vocab(QWEN3_5), qwen3_5_tensors, qwen3_5_rank, world, 1, 1) for world in (1, 2, 4)),
    *(
        (f"qwen3_5-{world}-{groups}", with_vocab(QWEN3_5), qwen3_5_tensors, grouped_qwen3_5_rank, world, 1, groups)
        for world, groups in [(2, 2), (4, 2)]
    ),
]
"""(name, config, tensors, function of a rank's parameters, ranks, parts of the experts, groups)"""


def be_rank(monkeypatch, rank: int, world: int, parts: int = 1, groups: int = 1) -> None:
    group = SimpleNamespace(rank_in_group=rank, world_size=world)
    parallel = SimpleNamespace(tp_group=group, moe_ep_size=parts, attn_dp_size=groups)
    context = SimpleNamespace(get_parallel=lambda: parallel)
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)


def filled(monkeypatch, config, parameters, tensors, rank, world, parts, groups):
    """Parameters like these of one rank, filled region by region from whole tensors, and PADDING elsewhere."""
    be_rank(monkeypatch, rank, world, parts, groups)
    made = {name: torch.full_like(value, PADDING) for name, value in parameters.items()}
    model = SimpleNamespace(config=config, named_parameters=made.items)
    for name, regions in kept_regions(model).items():
        for region in regions:
            value = tensors[name][tuple(slice(*edge) for edge in region.box)]
            region.memory[tuple(slice(0, size) for size in value.shape)].copy_(value)
    return made


@pytest.mark.parametrize(
    ("config", "tensors_of", "rank_of", "world", "parts", "groups"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_every_rank_keeps_what_fills_its_parameters(monkeypatch, config, tensors_of, rank_of, world, parts, groups):
    tensors = tensors_of()
    more = (parts,) if rank_of is engine_rank else (groups,) if rank_of in (grouped_rank, grouped_qwen3_5_rank) else ()
    for rank in range(world):
        expected = rank_of(tensors, rank, world, *more)
        found = filled(monkeypatch, config, expected, tensors, rank, world, parts, groups)
        for name, value in expected.items():
            # Rows beyond the vocabulary are zeros in what was sharded by hand.
            left = found[name] == PADDING
            assert torch.equal(torch.where(left, 0, found[name]), value), (rank, name)
            assert not left.any() or "embed_tokens" in name


def test_padding_is_no_part_of_what_a_rank_keeps_and_a_rank_of_nothing_but_padding_keeps_nothing(monkeypatch):
    config = SimpleNamespace(
        num_attention_heads=4, num_key_value_heads=4, vocab_size=9, intermediate_size=8, original_intermediate_size=6
    )
    columns = []
    for rank in range(4):
        be_rank(monkeypatch, rank, 4)
        parameters = {
            "model.embed_tokens.weight": torch.zeros(4, 3),
            "model.layers.0.mlp.down_proj.weight": torch.zeros(3, 2),
        }
        regions = kept_regions(SimpleNamespace(config=config, named_parameters=parameters.items))
        columns.append({name: [one.box for one in each] for name, each in regions.items()})
    rows = [((0, 4), (0, 3)), ((4, 8), (0, 3)), ((8, 9), (0, 3))]
    assert [kept.get("model.embed_tokens.weight") for kept in columns] == [*([row] for row in rows), None]
    wide = [((0, 3), (0, 2)), ((0, 3), (2, 4)), ((0, 3), (4, 6))]
    assert [kept.get("model.layers.0.mlp.down_proj.weight") for kept in columns] == [*([row] for row in wide), None]


def test_the_report_of_all_ranks_is_read_back_in_their_order(monkeypatch):
    boxes = [{"a": [((0, 2), (0, 3))], "scalar": [()]}, {"a": [((2, 4), (0, 3)), ((8, 9), (0, 3))]}]
    regions = [{name: [SimpleNamespace(box=box) for box in each] for name, each in one.items()} for one in boxes]
    monkeypatch.setattr(kept_tensors, "kept_regions", lambda model: regions[model])
    answers = []
    ranks = SimpleNamespace(exchange=lambda value: answers.append(value) or answers)
    monkeypatch.setitem(sys.modules, "slimrl.engines.plugin.engine_ranks", SimpleNamespace(EngineRanks=lambda: ranks))
    kept_report(0)
    report = kept_report(1)
    assert json.loads(report["1"]) == {"a": [[[2, 4], [0, 3]], [[8, 9], [0, 3]]]}
    # A twelfth rank comes after the second, not after the first.
    assert parse_kept(report) == boxes
    assert parse_kept({"10": report["1"], **{str(rank): report["0"] for rank in range(10)}})[10] == boxes[1]
