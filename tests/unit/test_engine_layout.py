"""Engine parameters fused and sharded here by hand, taken apart by the table."""

import base64
import pickle
from types import SimpleNamespace

import pytest
import torch

from slimrl.data.protocols import BucketSpec, TensorSpec
from slimrl.models.engine_layout import EngineShape, engine_slices
from slimrl.rollout.bucket_loader import CUDA_PREFIX, after_receive, around_update, bucket_name, bucket_payload

HEADS, KV_HEADS, SIZE, HIDDEN, INNER, EXPERTS, VOCAB = 4, 2, 3, 8, 8, 3, 10


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


def engine_rank(tensors, rank, world):
    """Parameters of one tensor-parallel rank, fused as SGLang fuses them."""
    attention, experts = "model.layers.0.self_attn", "model.layers.0.mlp.experts"
    replicas = max(1, world // KV_HEADS)

    def shard(name, dim=0, index=rank, of=world):
        return tensors[name].chunk(of, dim)[index]

    kv = {"index": rank // replicas, "of": world // replicas}
    qkv = [shard(f"{attention}.q_proj.weight"), *(shard(f"{attention}.{x}_proj.weight", **kv) for x in "kv")]
    halves = [
        torch.cat([shard(f"{experts}.{expert}.{name}_proj.weight") for name in ("gate", "up")])
        for expert in range(EXPERTS)
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
            [shard(f"{experts}.{expert}.down_proj.weight", 1) for expert in range(EXPERTS)]
        ),
    }


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_shards_of_all_ranks_give_each_tensor_back_once(world):
    tensors = hf_tensors()
    ranks = [engine_rank(tensors, rank, world) for rank in range(world)]
    shape = EngineShape(
        num_heads=HEADS, num_kv_heads=KV_HEADS, num_experts=EXPERTS, vocab_size=VOCAB, tensor_parallel=world
    )
    found = []
    for engine_name in ranks[0]:
        for piece in engine_slices(engine_name, shape):
            shards = [piece.of(rank[engine_name]) for rank in ranks]
            if piece.shard_dim is not None:
                whole = torch.cat(shards[:: piece.replicas], dim=piece.shard_dim)
            else:
                whole = shards[0]
            assert torch.equal(whole[: piece.rows], tensors[piece.hf_name]), piece.hf_name
            found.append(piece.hf_name)
    assert sorted(found) == sorted(tensors)


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


def test_scales_of_latent_projections_are_taken_apart_at_a_tile():
    """DeepSeek-V3's sizes: 12 tiles of queries, 4.5 of keys and values."""
    shape = EngineShape(num_heads=128, num_kv_heads=128, num_experts=0, vocab_size=10, q_latent=1536, kv_latent=576)
    scales = torch.arange(17 * 56.0).reshape(17, 56)
    pieces = engine_slices("model.layers.1.self_attn.fused_qkv_a_proj_with_mqa.weight_scale_inv", shape)
    assert [piece.hf_name.rpartition("self_attn.")[2] for piece in pieces] == [
        "q_a_proj.weight_scale_inv",
        "kv_a_proj_with_mqa.weight_scale_inv",
    ]
    assert torch.equal(pieces[0].of(scales), scales[:12])
    assert torch.equal(pieces[1].of(scales), scales[12:])


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


class FakeModel:
    def __init__(self):
        self.loaded = {}

    def load_weights(self, tensors):
        self.loaded = {name: tensor.clone() for name, tensor in tensors}


class FakeUpdater:
    def __init__(self):
        self.model = FakeModel()

    def get_model(self):
        return self.model


def bucket_of(tensors):
    """(description, bytes), aligned to 16."""
    specs, offsets, chunks, end = [], [], [], 0
    for name, tensor in tensors.items():
        start = -(-end // 16) * 16
        chunks += [b"\xff" * (start - end), tensor.contiguous().view(torch.uint8).numpy().tobytes()]
        specs.append(TensorSpec(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch.")))
        offsets.append(start)
        end = start + tensor.nbytes
    return BucketSpec(tensors=tuple(specs), offsets=tuple(offsets), nbytes=end), b"".join(chunks)


MIXED = {"a": torch.randn(3, 5), "b": torch.arange(7, dtype=torch.bfloat16), "c": torch.randn(1)}


def test_a_bucket_in_shared_memory_is_loaded_as_it_was_written(tmp_path, monkeypatch):
    bucket, content = bucket_of(MIXED)
    segment = tmp_path / "segment"
    segment.write_bytes(content)
    updater = FakeUpdater()
    value = pickle.loads(base64.b64decode(bucket_payload(str(segment), bucket)))
    assert around_update(lambda *args: (False, "original"), updater, value) == (True, "Success")
    assert updater.model.loaded.keys() == MIXED.keys()
    assert all(torch.equal(updater.model.loaded[name], MIXED[name]) for name in MIXED)
    assert segment.read_bytes() == content


def test_payloads_of_others_go_to_the_original():
    assert around_update(lambda updater, value: (True, "original"), FakeUpdater(), {"metadata": []})[1] == "original"


def test_a_received_bucket_is_taken_apart_and_other_tensors_pass():
    bucket, content = bucket_of(MIXED)
    flat = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    other = torch.randn(2)
    tensors = dict(after_receive([("other", other), (bucket_name(bucket), flat)], FakeUpdater()))
    assert tensors.keys() == {"other", *MIXED}
    assert tensors["other"] is other
    assert all(torch.equal(tensors[name], MIXED[name]) for name in MIXED)


def test_both_sides_of_cuda_ipc_use_one_prefix():
    from slimrl.resync.transports import shared_buffer

    assert shared_buffer.CUDA_PREFIX == CUDA_PREFIX
