"""Quantisation at sync against the checkpoint tools' quantiser, and what fingerprints of such a resync must be."""

import pytest
import torch

from slimrl.config.schema.resync import ResyncConfig, VerifyMode
from slimrl.data.model_weights import SourcePiece, TensorSpec
from slimrl.models.family import family_of
from slimrl.models.fingerprint import fingerprint
from slimrl.models.hf_config import published_config
from slimrl.quantization.fp8 import BlockFp8, dequantize, quantize
from slimrl.resync.buckets import cut_buckets
from slimrl.resync.expected_fingerprints import ExpectedFingerprints
from slimrl.resync.ranks import Ranks
from slimrl.resync.transform import Quantize, RoundToFp8, quantize_transform

FP8 = BlockFp8(block=(16, 8))
FULL = ResyncConfig(verify=VerifyMode.full)


def random_weights(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Matrices with partial tiles at both edges, one of them larger than the buckets below, and a vector."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (37, 21), "norm.weight": (21,), "large.weight": (133, 30), "kept.weight": (40, 9)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


class Source:
    """All of the weights on one rank."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights

    def groups(self, name):
        return self.weights[name][None]

    def layout(self):
        return {
            TensorSpec(name=name, shape=tuple(value.shape), dtype=str(value.dtype).removeprefix("torch.")): (
                SourcePiece(region=tuple(slice(0, size) for size in value.shape), holders=(0,)),
            )
            for name, value in self.weights.items()
        }


def send(source, transform, expectation, bucket_bytes: int, spoil: str | None = None) -> dict[str, torch.Tensor]:
    """What engines put together of the buckets; `spoil` names a tensor that is gathered with a fault."""
    loaded: dict[str, torch.Tensor] = {}
    for bucket in cut_buckets(list(source.layout()), bucket_bytes, transform):
        assert max(bucket.gathered_bytes, bucket.sent_bytes) <= bucket_bytes
        gathered = torch.zeros(bucket.gathered_bytes, dtype=torch.uint8)
        slot = torch.zeros(bucket.sent_bytes, dtype=torch.uint8)
        for part in bucket.gathered:
            value = part.view(gathered).copy_(source.weights[part.spec.name][part.start : part.stop])
            if part.spec.name == spoil:
                value[-1] += 1
        transform.apply(bucket, gathered, slot)
        for part in bucket.gathered:
            outputs = bucket.outputs(transform, part)
            views = [output.view(slot) for output in outputs]
            places = [(output, output.region) for output in outputs]
            expectation.record((part, part.region), part.view(gathered), list(zip(places, views, strict=True)))
            for output, view in zip(outputs, views, strict=True):
                spec = output.spec
                whole = loaded.setdefault(spec.name, torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)))
                whole[output.start : output.stop] = view
    return loaded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket_bytes", [4000, 100_000])
def test_engines_get_the_bytes_that_the_checkpoint_tools_write(dtype, bucket_bytes):
    weights = random_weights(dtype)
    transform = Quantize(FP8, {"a.weight", "large.weight"})
    source = Source(weights)
    expectation = ExpectedFingerprints(source.layout(), transform, FULL, 1)
    loaded = send(source, transform, expectation, bucket_bytes)
    assert list(loaded) == list(dict.fromkeys(loaded))
    for name, value in weights.items():
        if name in ("a.weight", "large.weight"):
            codes, scale = quantize(value, FP8.block)
            assert torch.equal(loaded[name].view(torch.uint8), codes.view(torch.uint8))
            assert torch.equal(loaded[name + "_scale_inv"], scale)
        else:
            assert torch.equal(loaded[name], value)
    expected, lost = expectation.fingerprints(source, Ranks("", 5))
    assert expected == {name: fingerprint(value) for name, value in loaded.items()}
    assert lost == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_engines_without_fp8_get_the_same_values_in_their_own_dtype(dtype):
    weights = random_weights(dtype)
    transform = RoundToFp8(FP8, {"a.weight", "large.weight"})
    source = Source(weights)
    expectation = ExpectedFingerprints(source.layout(), transform, FULL, 1)
    loaded = send(source, transform, expectation, 4000)
    assert list(loaded) == list(weights)
    for name in ("a.weight", "large.weight"):
        assert torch.equal(loaded[name], dequantize(*quantize(weights[name], FP8.block), dtype, FP8.block))
        assert not torch.equal(loaded[name], weights[name])
    assert torch.equal(loaded["kept.weight"], weights["kept.weight"])
    expected, lost = expectation.fingerprints(source, Ranks("", 5))
    assert expected == {name: fingerprint(value) for name, value in loaded.items()}
    assert lost == []


def test_what_was_gathered_wrongly_before_it_was_quantised_is_named():
    source = Source(random_weights())
    transform = Quantize(FP8, {"a.weight", "large.weight"})
    expectation = ExpectedFingerprints(source.layout(), transform, FULL, 1)
    send(source, transform, expectation, 4000, spoil="large.weight")
    _, lost = expectation.fingerprints(source, Ranks("", 5))
    assert lost == ["large.weight"]


def test_a_tensor_left_as_it_is_is_expected_as_the_trainer_holds_it_whatever_was_gathered():
    source = Source(random_weights())
    transform = Quantize(FP8, {"a.weight"})
    expectation = ExpectedFingerprints(source.layout(), transform, FULL, 1)
    loaded = send(source, transform, expectation, 4000, spoil="kept.weight")
    expected, _ = expectation.fingerprints(source, Ranks("", 5))
    assert [name for name, value in loaded.items() if fingerprint(value) != expected[name]] == ["kept.weight"]


def test_a_version_that_starts_again_expects_what_it_would_have_at_once():
    source = Source(random_weights())
    transform = Quantize(FP8, {"a.weight", "large.weight"})
    once, twice = (ExpectedFingerprints(source.layout(), transform, FULL, 1) for _ in range(2))
    for expectation in (once, twice, twice):
        send(source, transform, expectation, 4000)
    assert once.fingerprints(source, Ranks("", 5)) == twice.fingerprints(source, Ranks("", 5))


def test_samples_of_consecutive_versions_cover_every_sent_tensor():
    source = Source(random_weights())
    transform = Quantize(FP8, {"a.weight", "large.weight"})
    config = ResyncConfig(verify=VerifyMode.sampled, sampled_versions=3, sampled_bytes=1)
    seen: list[str] = []
    for version in range(7, 10):
        expectation = ExpectedFingerprints(source.layout(), transform, config, version)
        loaded = send(source, transform, expectation, 4000)
        expected, _ = expectation.fingerprints(source, Ranks("", 5))
        assert expected == {name: fingerprint(loaded[name]) for name in expectation.names}
        seen += expectation.names
    assert sorted(seen) == sorted(loaded)


def test_without_verification_nothing_is_expected():
    source = Source(random_weights())
    assert ExpectedFingerprints(source.layout(), None, ResyncConfig(verify=VerifyMode.off), 1).names == []


def test_a_matrix_with_nan_is_refused_by_its_name():
    weights = random_weights()
    weights["a.weight"][3, 3] = float("nan")
    source = Source(weights)
    transform = Quantize(FP8, {"a.weight"})
    with pytest.raises(ValueError, match=r"a\.weight: the matrix holds NaN or infinity"):
        send(source, transform, ExpectedFingerprints(source.layout(), transform, FULL, 1), 4000)


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "DeepSeek-V3"])
def test_what_is_quantised_follows_the_config_of_the_engine_s_checkpoint(name):
    config = published_config(name)
    config["quantization_config"] = BlockFp8(not_converted=("lm_head", "model.layers.3.self_attn.o_proj")).as_config()
    weight_map = family_of(config).weight_map(config, mtp=True)
    transform = quantize_transform(config, weight_map, fp8_engines=True)
    assert transform is not None
    changed = {spec.name for spec in weight_map.specs("bfloat16") if transform.changes(spec)}
    assert "model.layers.4.self_attn.o_proj.weight" in changed
    assert "model.layers.4.mlp.experts.7.down_proj.weight" in changed
    assert "model.layers.3.self_attn.o_proj.weight" not in changed
    assert not any(part in name for name in changed for part in ("norm", "embed_tokens", "mlp.gate.", "lm_head"))


def test_a_plain_checkpoint_needs_no_transform():
    config = published_config("Qwen3-30B-A3B")
    assert quantize_transform(config, family_of(config).weight_map(config), fp8_engines=True) is None
