"""Buckets: every byte once, bounded, aligned, in an order that both sides know."""

import pytest
import torch

from slimrl.data.protocols import TensorSpec
from slimrl.models.family import family_of
from slimrl.models.hf_config import published_config
from slimrl.resync.packing import BucketPacker
from slimrl.resync.plan import plan_buckets


def spec(name: str, *shape: int, dtype: str = "float32", atomic: str | None = None) -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype=dtype, atomic=atomic)


def names(buckets) -> list[list[str]]:
    return [[part.spec.name for part in bucket.parts] for bucket in buckets]


def test_tensors_fill_buckets_in_their_order():
    specs = [spec("a", 10), spec("b", 10), spec("c", 5), spec("d", 20)]
    assert names(plan_buckets(specs, 100)) == [["a", "b", "c"], ["d"]]


def test_a_tensor_larger_than_a_bucket_travels_alone():
    buckets = plan_buckets([spec("a", 1), spec("big", 100), spec("b", 1)], 16)
    assert names(buckets) == [["a"], ["big"], ["b"]]
    assert [bucket.nbytes for bucket in buckets] == [4, 400, 4]


def test_an_atomic_group_stays_together_even_where_it_overfills():
    specs = [spec("a", 3), spec("q", 3, atomic="g"), spec("kv", 3, atomic="g"), spec("b", 3)]
    assert names(plan_buckets(specs, 16)) == [["a"], ["q", "kv"], ["b"]]


def test_deepseek_s_down_projections_which_sglang_fuses_travel_together():
    hf_config = {**published_config("DeepSeek-V3"), "num_hidden_layers": 5, "n_routed_experts": 8}
    buckets = names(plan_buckets(family_of(hf_config).hf_tensor_specs(hf_config), 1))
    together = [bucket for bucket in buckets if len(bucket) > 1]
    assert together == [
        [f"model.layers.{layer}.self_attn.{name}.weight" for name in ("q_a_proj", "kv_a_proj_with_mqa")]
        for layer in range(5)
    ]


def test_an_atomic_group_that_is_torn_apart_is_refused():
    with pytest.raises(ValueError, match="not neighbours: g"):
        plan_buckets([spec("q", 3, atomic="g"), spec("a", 3), spec("kv", 3, atomic="g")], 16)


def test_mixed_dtypes_are_aligned_without_gaps():
    specs = [spec("half", 3, dtype="bfloat16"), spec("full", 2), spec("byte", 1, dtype="uint8"), spec("wide", 1)]
    (bucket,) = plan_buckets(specs, 1000)
    for part in bucket.parts:
        assert part.offset % getattr(torch, part.spec.dtype).itemsize == 0
    assert bucket.nbytes == 3 * 2 + 2 * 4 + 1 + 4


def test_a_published_model_is_covered_once_within_the_bound():
    hf_config = published_config("Qwen3-30B-A3B")
    specs = family_of(hf_config).hf_tensor_specs(hf_config)
    buckets = plan_buckets(specs, 256 * 1024**2)
    assert [part.spec.name for bucket in buckets for part in bucket.parts] == [tensor.name for tensor in specs]
    embedding_bytes = 151936 * 2048 * 2
    assert sorted(bucket.nbytes for bucket in buckets)[-2:] == [embedding_bytes, embedding_bytes]
    assert all(bucket.nbytes <= 256 * 1024**2 for bucket in buckets if bucket.nbytes != embedding_bytes)
    assert sum(bucket.nbytes for bucket in buckets) == 2 * 30_532_122_624


def test_packing_lays_tensors_where_the_plan_says_whatever_their_order_and_strides():
    values = {
        "half": torch.randn(3, 2).to(torch.bfloat16),
        "full": torch.randn(4, 5).t(),
        "tail": torch.randn(2),
    }
    specs = [spec(n, *t.shape, dtype=str(t.dtype).removeprefix("torch.")) for n, t in values.items()]
    (bucket,) = plan_buckets(specs, 1000)
    buffer = torch.zeros(bucket.nbytes, dtype=torch.uint8)
    packer = BucketPacker(bucket, buffer)
    for name in ("tail", "half", "full"):
        assert not packer.is_full
        packer.put(name, values[name])
    assert packer.is_full
    expected = [values[part.spec.name].contiguous().view(-1).view(torch.uint8) for part in bucket.parts]
    assert torch.equal(buffer, torch.cat(expected))


def test_packing_refuses_what_was_not_declared():
    (bucket,) = plan_buckets([spec("a", 2)], 1000)
    packer = BucketPacker(bucket, torch.zeros(8, dtype=torch.uint8))
    with pytest.raises(AssertionError, match=r"a: .*declared"):
        packer.put("a", torch.zeros(3))
    with pytest.raises(AssertionError, match="b is not due"):
        packer.put("b", torch.zeros(2))
