"""Engine parameters fused and sharded here by hand, taken apart by the table."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from slimrl.data.boxes import pieces, slices_of
from slimrl.data.peer_messages import Entry
from slimrl.engines.plugin.kept_tensors import kept_regions
from slimrl.engines.plugin.peer_receiver import place
from slimrl.engines.plugin.weight_fingerprints import fingerprints, rank_hashes
from slimrl.models.engine_layout import engine_slices
from slimrl.models.engine_slice import EngineShape
from slimrl.models.fingerprint import fingerprint

HEADS, KV_HEADS, SIZE, HIDDEN, INNER, EXPERTS, VOCAB = 4, 2, 3, 8, 8, 4, 10


def hf_tensors():
    torch.manual_seed(0)
    attention, experts = "model.layers.0.self_attn", "model.layers.0.mlp.experts"
    shapes = {
        f"{attention}.q_proj.weight": (HEADS * SIZE, HIDDEN),
        f"{attention}.k_proj.weight": (KV_HEADS * SIZE, HIDDEN),
        f"{attention}.v_proj.weight": (KV_HEADS * SIZE, HIDDEN),
        f"{attention}.o_proj.weight": (HIDDEN, HEADS * SIZE),
        f"{attention}.q_norm.weight": (SIZE,),
        "model.layers.0.mlp.gate.weight": (EXPERTS, HIDDEN),
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
    }
    for expert in range(EXPERTS):
        shapes |= {f"{experts}.{expert}.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes[f"{experts}.{expert}.down_proj.weight"] = (HIDDEN, INNER)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def engine_rank(tensors, rank, world, expert_parallel=1):
    """Parameters of one rank, fused as SGLang fuses them."""
    attention, experts = "model.layers.0.self_attn", "model.layers.0.mlp.experts"
    replicas = max(1, world // KV_HEADS)

    def shard(name, dim=0, index=rank, of=world):
        return tensors[name].chunk(of, dim)[index]

    kv = {"index": rank // replicas, "of": world // replicas}
    qkv = [shard(f"{attention}.q_proj.weight"), *(shard(f"{attention}.{x}_proj.weight", **kv) for x in "kv")]
    sharers = world // expert_parallel
    inner = {"index": rank % sharers, "of": sharers}
    first, held_experts = rank // sharers * (EXPERTS // expert_parallel), EXPERTS // expert_parallel
    held = range(first, first + held_experts)
    halves = [
        torch.cat([shard(f"{experts}.{expert}.{name}_proj.weight", **inner) for name in ("gate", "up")])
        for expert in held
    ]
    padded = torch.cat([tensors["model.embed_tokens.weight"], torch.zeros(6, HIDDEN)])
    return {
        f"{attention}.qkv_proj.weight": torch.cat(qkv),
        f"{attention}.o_proj.weight": shard(f"{attention}.o_proj.weight", 1),
        f"{attention}.q_norm.weight": tensors[f"{attention}.q_norm.weight"],
        "model.layers.0.mlp.gate.weight": tensors["model.layers.0.mlp.gate.weight"],
        "model.embed_tokens.weight": padded.chunk(world)[rank],
        f"{experts}.w13_weight": torch.stack(halves),
        f"{experts}.w2_weight": torch.stack(
            [shard(f"{experts}.{expert}.down_proj.weight", 1, **inner) for expert in held]
        ),
    }


RANKS = [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (4, 4)]
"""Ranks of an engine, and parts into which its experts are divided."""


def engine_shape(world, expert_parallel):
    return EngineShape(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        num_experts=EXPERTS,
        vocab_size=VOCAB,
        tensor_parallel=world,
        expert_parallel=expert_parallel,
    )


@pytest.mark.parametrize(("world", "expert_parallel"), RANKS)
def test_the_shards_of_all_ranks_give_each_tensor_back_once(world, expert_parallel):
    tensors = hf_tensors()
    ranks = [engine_rank(tensors, rank, world, expert_parallel) for rank in range(world)]
    found = []
    for engine_name in ranks[0]:
        for piece in engine_slices(engine_name, engine_shape(world, expert_parallel)):
            held = {rank: holding for rank in range(world) if (holding := piece.holding(rank, world))}
            copies = {}
            for rank, holding in held.items():
                copies.setdefault(holding.copy, []).append((holding.shard, piece.of(ranks[rank][engine_name])))
            for shards in copies.values():
                assert [shard for shard, _ in shards] == list(range(len(shards)))
                whole = torch.cat([part for _, part in shards], dim=piece.shard_dim or 0)
                assert torch.equal(whole[: piece.size], tensors[piece.hf_name]), piece.hf_name
            assert {h.shards for h in held.values()} == {len(copies[0])}
            assert piece.num_copies(world) == len(copies)
            found.append(piece.hf_name)
    assert sorted(found) == sorted(tensors)


def engine_prints(ranks, shape):
    """Fingerprints from the sum of the ranks' tables, which modulo 2^64 is what int64 gives."""
    hashes = [rank_hashes(parameters, shape, rank, None) for rank, parameters in enumerate(ranks)]
    return fingerprints(hashes[0][0], sum(table for _, table in hashes))


@pytest.mark.parametrize(("world", "expert_parallel"), RANKS)
def test_the_hashes_of_all_ranks_add_up_to_the_fingerprints_of_whole_tensors(world, expert_parallel):
    tensors = hf_tensors()
    ranks = [engine_rank(tensors, rank, world, expert_parallel) for rank in range(world)]
    prints = engine_prints(ranks, engine_shape(world, expert_parallel))
    assert prints == {name: fingerprint(tensor) for name, tensor in tensors.items()}


NEXT = SimpleNamespace(
    model_type="qwen3_next", num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCAB, num_experts=EXPERTS,
    moe_intermediate_size=INNER, shared_expert_intermediate_size=12, linear_num_key_heads=4,
    linear_num_value_heads=8, linear_key_head_dim=2, linear_value_head_dim=3,
)  # fmt: skip
KEYS, VALUES = 4 * 2, 8 * 3


def next_tensors():
    """A gated delta net, an attention and a shared expert of Qwen3-Next."""
    torch.manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (16, HIDDEN),
        "model.layers.0.linear_attn.in_proj_qkvz.weight": (2 * KEYS + 2 * VALUES, HIDDEN),
        "model.layers.0.linear_attn.in_proj_ba.weight": (16, HIDDEN),
        "model.layers.0.linear_attn.conv1d.weight": (2 * KEYS + VALUES, 1, 4),
        "model.layers.0.linear_attn.A_log": (8,),
        "model.layers.0.linear_attn.dt_bias": (8,),
        "model.layers.0.linear_attn.norm.weight": (3,),
        "model.layers.0.linear_attn.out_proj.weight": (HIDDEN, VALUES),
        "model.layers.0.mlp.shared_expert.gate_proj.weight": (12, HIDDEN),
        "model.layers.0.mlp.shared_expert.up_proj.weight": (12, HIDDEN),
        "model.layers.0.mlp.shared_expert.down_proj.weight": (HIDDEN, 12),
        "model.layers.0.mlp.shared_expert_gate.weight": (1, HIDDEN),
        "model.layers.3.self_attn.q_proj.weight": (2 * HEADS * SIZE, HIDDEN),
        "model.layers.3.self_attn.k_proj.weight": (KV_HEADS * SIZE, HIDDEN),
        "model.layers.3.self_attn.v_proj.weight": (KV_HEADS * SIZE, HIDDEN),
        "model.layers.3.self_attn.o_proj.weight": (HIDDEN, HEADS * SIZE),
        "model.layers.3.self_attn.q_norm.weight": (SIZE,),
        "model.layers.3.self_attn.k_norm.weight": (SIZE,),
    }
    return {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}


def next_rank(tensors, rank, world):
    """As SGLang's qwen3_next.py has it: attention in the layer itself, channels of the convolution kind by kind."""

    def shard(name, dim=0, index=rank, of=world):
        return tensors[name].chunk(of, dim)[index]

    replicas = max(1, world // KV_HEADS)
    delta, attention = "model.layers.0.linear_attn.", "model.layers.3.self_attn."
    shared = "model.layers.0.mlp.shared_expert."
    kv = {"index": rank // replicas, "of": world // replicas}
    qkv = [shard(attention + "q_proj.weight"), *(shard(f"{attention}{x}_proj.weight", **kv) for x in "kv")]
    kinds = tensors[delta + "conv1d.weight"].split([KEYS, KEYS, VALUES])
    whole = [name for name in tensors if name.endswith(("linear_attn.norm.weight", "shared_expert_gate.weight"))]
    return {
        "model.embed_tokens.weight": shard("model.embed_tokens.weight"),
        **{f"{delta}{name}.weight": shard(f"{delta}{name}.weight") for name in ("in_proj_qkvz", "in_proj_ba")},
        delta + "conv1d.weight": torch.cat([kind.chunk(world)[rank] for kind in kinds]),
        delta + "A_log": shard(delta + "A_log").float(),
        delta + "dt_bias": shard(delta + "dt_bias"),
        delta + "out_proj.weight": shard(delta + "out_proj.weight", 1),
        **{name: tensors[name] for name in whole},
        shared + "gate_up_proj.weight": torch.cat([shard(f"{shared}{x}_proj.weight") for x in ("gate", "up")]),
        shared + "down_proj.weight": shard(shared + "down_proj.weight", 1),
        "model.layers.3.qkv_proj.weight": torch.cat(qkv),
        "model.layers.3.o_proj.weight": shard(attention + "o_proj.weight", 1),
        "model.layers.3.q_norm.weight": tensors[attention + "q_norm.weight"],
        "model.layers.3.k_norm.weight": tensors[attention + "k_norm.weight"],
    }


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_hashes_of_qwen3_next_s_shards_add_up_to_the_fingerprints_of_whole_tensors(world):
    tensors = next_tensors()
    shape = replace(EngineShape.of_config(NEXT, world), vocab_size=16)
    ranks = [next_rank(tensors, rank, world) for rank in range(world)]
    assert engine_prints(ranks, shape) == {name: fingerprint(tensor) for name, tensor in tensors.items()}


QWEN3_5 = SimpleNamespace(**{**vars(NEXT), "model_type": "qwen3_5_moe_text"})


def qwen3_5_tensors():
    """The same of Qwen3.5: a delta net's input in four tensors, its decay and the norm of its result in float32."""
    delta, tensors = "model.layers.0.linear_attn.", next_tensors()
    kept = {name: tensor for name, tensor in tensors.items() if "in_proj" not in name}
    rows = {"qkv": 2 * KEYS + VALUES, "z": VALUES, "b": 8, "a": 8}
    inputs = {f"{delta}in_proj_{name}.weight": torch.randn(size, HIDDEN).bfloat16() for name, size in rows.items()}
    return kept | inputs | {delta + name: torch.randn(size) for name, size in (("A_log", 8), ("norm.weight", 3))}


def qwen3_5_rank(tensors, rank, world):
    """As SGLang's qwen3_5.py has it: the input's tensors kind by kind, in two parameters."""
    delta = "model.layers.0.linear_attn."
    kinds = tensors[delta + "in_proj_qkv.weight"].split([KEYS, KEYS, VALUES])

    def shards(*whole):
        return torch.cat([tensor.chunk(world)[rank] for tensor in whole])

    return next_rank(next_tensors() | tensors, rank, world) | {
        delta + "in_proj_qkvz.weight": shards(*kinds, tensors[delta + "in_proj_z.weight"]),
        delta + "in_proj_ba.weight": shards(*(tensors[f"{delta}in_proj_{name}.weight"] for name in "ba")),
    }


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_hashes_of_qwen3_5_s_shards_add_up_to_the_fingerprints_of_whole_tensors(world):
    tensors = qwen3_5_tensors()
    shape = replace(EngineShape.of_config(QWEN3_5, world), vocab_size=16)
    ranks = [qwen3_5_rank(tensors, rank, world) for rank in range(world)]
    assert engine_prints(ranks, shape) == {name: fingerprint(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("world", [1, 2])
def test_so_do_those_of_the_scales_of_qwen3_5_in_block_fp8(world):
    """Tiles of 2 rows: 4 rows of scales of queries, as many of keys, 12 of values and of gates."""
    delta = "model.layers.0.linear_attn."
    tensors = {
        "model.embed_tokens.weight": torch.randn(16, HIDDEN),
        delta + "in_proj_qkv.weight_scale_inv": torch.randn(20, 4),
        delta + "in_proj_z.weight_scale_inv": torch.randn(12, 4),
    }
    scales = [*tensors[delta + "in_proj_qkv.weight_scale_inv"].split([4, 4, 12]), tensors[[*tensors][2]]]
    ranks = [
        {
            "model.embed_tokens.weight": tensors["model.embed_tokens.weight"].chunk(world)[rank],
            delta + "in_proj_qkvz.weight_scale_inv": torch.cat([scale.chunk(world)[rank] for scale in scales]),
        }
        for rank in range(world)
    ]
    shape = replace(EngineShape.of_config(QWEN3_5, world), vocab_size=16, tile_rows=2)
    assert engine_prints(ranks, shape) == {name: fingerprint(tensor) for name, tensor in tensors.items()}


def load_in_rows(monkeypatch, parameters, tensors, rank, world, groups, model=NEXT):
    """What one rank keeps of each tensor, at most two rows at a time, into its parameters."""
    group = SimpleNamespace(rank_in_group=rank, world_size=world)
    parallel = SimpleNamespace(tp_group=group, moe_ep_size=1, attn_dp_size=groups)
    context = SimpleNamespace(get_parallel=lambda: parallel)
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    config = SimpleNamespace(**{**vars(model), "vocab_size": 16})
    model = SimpleNamespace(config=config, named_parameters=parameters.items)
    regions = kept_regions(model)
    for name, kept in regions.items():
        whole = tensors[name]
        for region in kept if whole.ndim > 1 else ():
            for box in pieces(region.box, 2):
                rows = whole[slices_of(box, tuple((0, size) for size in whole.shape))].contiguous()
                entry = Entry(name, str(whole.dtype).removeprefix("torch."), box)
                place([entry], rows.view(torch.uint8).flatten(), regions)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_rows_of_qwen3_next_s_tensors_reach_every_shard_that_has_a_part_of_them(monkeypatch, world):
    for rank in range(world):
        expected = {name: value for name, value in next_rank(next_tensors(), rank, world).items() if value.ndim > 1}
        found = {name: torch.zeros_like(value) for name, value in expected.items()}
        load_in_rows(monkeypatch, found, next_tensors(), rank, world, 1)
        for name, value in expected.items():
            assert torch.equal(found[name], value), (rank, name)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_rows_of_qwen3_5_s_tensors_reach_every_shard_that_has_a_part_of_them(monkeypatch, world):
    for rank in range(world):
        whole = qwen3_5_rank(qwen3_5_tensors(), rank, world)
        expected = {name: value for name, value in whole.items() if value.ndim > 1}
        found = {name: torch.zeros_like(value) for name, value in expected.items()}
        load_in_rows(monkeypatch, found, qwen3_5_tensors(), rank, world, 1, QWEN3_5)
        for name, value in expected.items():
            assert torch.equal(found[name], value), (rank, name)


OF_ATTENTION = ("embed_tokens.weight", "linear_attn", "qkv_proj.weight", "o_proj.weight")


def grouped_rank(tensors, rank, world, groups):
    """A rank's tensors under attention data parallelism: only its group shards attention and the embedding."""
    size = world // groups
    alone, group = next_rank(tensors, rank, world), next_rank(tensors, rank % size, size)
    return {name: (group if any(of in name for of in OF_ATTENTION) else alone)[name] for name in alone}


@pytest.mark.parametrize(("world", "groups"), [(2, 2), (4, 2), (4, 4)])
def test_each_group_of_ranks_with_requests_of_its_own_has_the_whole_of_attention(monkeypatch, world, groups):
    tensors = next_tensors()
    shape = replace(EngineShape.of_config(NEXT, world, 1, groups), vocab_size=16)
    ranks = [grouped_rank(tensors, rank, world, groups) for rank in range(world)]
    assert engine_prints(ranks, shape) == {name: fingerprint(tensor) for name, tensor in tensors.items()}
    # Rows of tensors that are larger than a bucket reach every group.
    for rank, expected in enumerate(ranks):
        wide = {name: value for name, value in expected.items() if value.ndim > 1}
        found = {name: torch.zeros_like(value) for name, value in wide.items()}
        load_in_rows(monkeypatch, found, tensors, rank, world, groups)
        for name, value in wide.items():
            assert torch.equal(found[name], value), (rank, name)
    # A group that has not got a tensor shows in its fingerprint.
    for name, hf_name in (
        ("model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.layers.3.o_proj.weight", "model.layers.3.self_attn.o_proj.weight"),
    ):
        ranks[-1][name] = torch.zeros_like(ranks[-1][name])
        assert engine_prints(ranks, shape)[hf_name].startswith(fingerprint(tensors[hf_name]) + "/")


def test_widths_that_the_engine_pads_do_not_change_a_fingerprint():
    """Two ranks of 6 columns, of which the model has 8."""
    gate, up, down = torch.randn(8, HIDDEN), torch.randn(8, HIDDEN), torch.randn(HIDDEN, 8)
    junk = torch.full((2, HIDDEN), torch.nan)
    path = "model.layers.0.mlp"
    ranks = [
        {
            "model.embed_tokens.weight": torch.zeros(4, HIDDEN),
            f"{path}.gate_up_proj.weight": torch.cat(fused),
            f"{path}.down_proj.weight": narrow,
        }
        for fused, narrow in [
            ([gate[:6], up[:6]], down[:, :6]),
            ([gate[6:], junk, junk, up[6:], junk, junk], torch.cat([down[:, 6:], junk.t(), junk.t()], dim=1)),
        ]
    ]
    config = SimpleNamespace(
        num_attention_heads=4, num_key_value_heads=2, vocab_size=8, intermediate_size=12, original_intermediate_size=8
    )
    prints = engine_prints(ranks, EngineShape.of_config(config, 2))
    del prints["model.embed_tokens.weight"]
    expected = {"gate": gate, "up": up, "down": down}
    assert prints == {f"{path}.{name}_proj.weight": fingerprint(value) for name, value in expected.items()}


def test_an_element_that_differs_in_one_copy_or_one_expert_changes_that_fingerprint_alone():
    tensors = hf_tensors()
    expected = {name: fingerprint(tensor) for name, tensor in tensors.items()}
    for engine_name, position, hf_name in [
        ("model.layers.0.self_attn.q_norm.weight", (1,), "model.layers.0.self_attn.q_norm.weight"),
        ("model.layers.0.mlp.experts.w2_weight", (1, 0, 0), "model.layers.0.mlp.experts.3.down_proj.weight"),
        ("model.layers.0.self_attn.qkv_proj.weight", (-1, 0), "model.layers.0.self_attn.v_proj.weight"),
    ]:
        ranks = [{name: value.clone() for name, value in engine_rank(tensors, r, 4, 2).items()} for r in range(4)]
        ranks[3][engine_name][position] += 1
        prints = engine_prints(ranks, engine_shape(4, 2))
        assert [name for name in expected if prints[name] != expected[name]] == [hf_name]


def test_latent_projections_lie_one_on_the_other_and_their_expansions_are_sharded():
    shape = EngineShape(num_heads=4, num_kv_heads=4, num_experts=0, vocab_size=10, q_latent=3, kv_latent=5)
    query, key_value = torch.randn(3, 4), torch.randn(5, 4)
    fused = torch.cat([query, key_value])
    pieces = engine_slices("model.layers.1.self_attn.fused_qkv_a_proj_with_mqa.weight", shape)
    assert [piece.hf_name.rpartition("self_attn.")[2] for piece in pieces] == [
        "q_a_proj.weight",
        "kv_a_proj_with_mqa.weight",
    ]
    assert torch.equal(pieces[0].of(fused), query)
    assert torch.equal(pieces[1].of(fused), key_value)
    assert [piece.shard_dim for piece in pieces] == [None, None]
    for name in ("q_proj", "q_b_proj", "kv_b_proj"):
        (piece,) = engine_slices(f"model.layers.1.self_attn.{name}.weight", shape)
        assert (piece.hf_name, piece.shard_dim) == (f"model.layers.1.self_attn.{name}.weight", 0)


def test_the_shape_is_read_under_the_names_that_families_use():
    qwen = SimpleNamespace(
        num_attention_heads=32, num_key_value_heads=4, vocab_size=99, num_experts=128, moe_intermediate_size=768,
        intermediate_size=6144,
    )  # fmt: skip
    expected = EngineShape(
        num_heads=32, num_kv_heads=4, num_experts=128, vocab_size=99, tensor_parallel=8, expert_parallel=4,
        attention_data_parallel=2, expert_width=768, dense_width=6144,
    )  # fmt: skip
    assert EngineShape.of_config(qwen, 8, 4, 2) == expected
    deepseek = SimpleNamespace(
        num_attention_heads=16, num_key_value_heads=16, vocab_size=99, n_routed_experts=64, n_shared_experts=2,
        moe_intermediate_size=1536, original_moe_intermediate_size=1408, intermediate_size=11264,
        original_intermediate_size=10944, q_lora_rank=None, kv_lora_rank=512, qk_rope_head_dim=64,
        quantization_config={"weight_block_size": [64, 32]},
    )  # fmt: skip
    expected = EngineShape(
        num_heads=16, num_kv_heads=16, num_experts=64, vocab_size=99, tensor_parallel=2, kv_latent=576,
        expert_width=1408, shared_width=2816, dense_width=10944, tile_rows=64,
    )  # fmt: skip
    assert EngineShape.of_config(deepseek, 2) == expected
    glm = SimpleNamespace(num_attention_heads=8, num_key_value_heads=2, vocab_size=9, num_local_experts=4)
    assert EngineShape.of_config(glm, 1).num_experts == 4
    glm.shared_expert_intermediate_size = 48
    assert EngineShape.of_config(glm, 2).shared_width == 48
    glm.shared_expert_intermediate_size, glm.original_shared_expert_intermediate_size = 64, 48
    assert EngineShape.of_config(glm, 2).shared_width == 48


def test_each_mlp_keeps_the_width_that_it_has_without_the_engine_s_padding():
    shape = EngineShape(
        num_heads=1, num_kv_heads=1, num_experts=2, vocab_size=9, expert_width=5, shared_width=10, dense_width=20
    )
    layer = "model.layers.1.mlp"
    for path, width in ((layer, 20), (f"{layer}.shared_experts", 10)):
        for name in ("gate_up_proj", "down_proj"):
            assert {piece.size for piece in engine_slices(f"{path}.{name}.weight", shape)} == {width}
            assert {piece.size for piece in engine_slices(f"{path}.{name}.weight_scale_inv", shape)} == {None}
    for name in ("w13_weight", "w2_weight"):
        assert {piece.size for piece in engine_slices(f"{layer}.experts.{name}", shape)} == {5}


@pytest.mark.parametrize(("block", "tiles"), [(None, (12, 5)), ([128, 128], (12, 5)), ([64, 32], (24, 9))])
def test_scales_of_latent_projections_are_taken_apart_at_a_tile(block, tiles):
    """DeepSeek-V3's sizes: 12 tiles of queries, 4.5 of keys and values; in smaller tiles 24 and 9."""
    config = SimpleNamespace(
        num_attention_heads=128,
        num_key_value_heads=128,
        vocab_size=10,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
    )
    if block:
        config.quantization_config = {"quant_method": "fp8", "weight_block_size": block}
    shape, (query, key_value) = EngineShape.of_config(config, 1), tiles
    scales = torch.arange((query + key_value) * 56.0).reshape(-1, 56)
    pieces = engine_slices("model.layers.1.self_attn.fused_qkv_a_proj_with_mqa.weight_scale_inv", shape)
    assert [piece.hf_name.rpartition("self_attn.")[2] for piece in pieces] == [
        "q_a_proj.weight_scale_inv",
        "kv_a_proj_with_mqa.weight_scale_inv",
    ]
    assert torch.equal(pieces[0].of(scales), scales[:query])
    assert torch.equal(pieces[1].of(scales), scales[query:])


def test_the_router_alone_is_compared_in_the_precision_of_the_embedding():
    config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, n_routed_experts=3, vocab_size=10)
    names = ["mlp.gate.weight", "mlp.gate.e_score_correction_bias", "input_layernorm.weight"]
    pieces = [engine_slices(f"model.layers.1.{name}", EngineShape.of_config(config, 1))[0] for name in names]
    assert [piece.in_model_dtype for piece in pieces] == [True, False, False]


def test_a_fusion_of_another_size_is_refused():
    shape = EngineShape(num_heads=4, num_kv_heads=2, num_experts=0, vocab_size=10)
    piece = engine_slices("model.layers.0.self_attn.qkv_proj.weight", shape)[0]
    with pytest.raises(ValueError, match="do not divide"):
        piece.of(torch.zeros(9, 4))
