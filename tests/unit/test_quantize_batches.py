"""Experts of a layer that are quantised together: the same bits as one by one, and few operations for them all."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slimrl.data.model_weights import TensorSpec
from slimrl.quantization import fp8
from slimrl.quantization.fp8 import BlockFp8, quantize, quantize_batch
from slimrl.resync.buckets import cut_buckets
from slimrl.resync.transform import Quantize, equally_apart

FP8 = BlockFp8(block=(16, 8))


def layer_of(num_experts: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """A layer's tensors in the order of an export; partial tiles at both edges."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"layers.3.self_attn.o_proj.weight": (40, 24), "layers.3.mlp.gate.weight": (num_experts, 21)}
    for expert in range(num_experts):
        for name, shape in {"gate": (37, 21), "up": (37, 21), "down": (21, 37)}.items():
            shapes[f"layers.3.mlp.experts.{expert}.{name}_proj.weight"] = shape
    return {
        name: (torch.randn(shape, generator=generator) * 10.0 ** (index % 7 - 3)).to(dtype)
        for index, (name, shape) in enumerate(shapes.items())
    }


def quantised(weights) -> set[str]:
    return {name for name in weights if "_proj" in name}


def sent(weights, bucket_bytes: int = 10**6, watch: TorchDispatchMode | None = None) -> dict[str, torch.Tensor]:
    """What engines put together; `watch` sees the work of the transform alone."""
    specs = [
        TensorSpec(name=name, shape=tuple(value.shape), dtype=str(value.dtype).removeprefix("torch."))
        for name, value in weights.items()
    ]
    transform, loaded = Quantize(FP8, quantised(weights)), {}
    for bucket in cut_buckets(specs, bucket_bytes, transform):
        gathered = torch.zeros(bucket.gathered_bytes, dtype=torch.uint8)
        slot = torch.zeros(bucket.sent_bytes, dtype=torch.uint8)
        for part in bucket.gathered:
            part.view(gathered).copy_(weights[part.spec.name][part.start : part.stop])
        if watch is None:
            transform.apply(bucket, gathered, slot)
        else:
            with watch:
                transform.apply(bucket, gathered, slot)
        for part in bucket.sent:
            spec = part.spec
            whole = loaded.setdefault(spec.name, torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)))
            whole[part.start : part.stop] = part.view(slot)
    return loaded


class Counting(TorchDispatchMode):
    """Counts operations, each of which is a launch or more on a GPU unless it is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bucket_bytes", [1_000_000, 30_000, 9_000])
@pytest.mark.parametrize("band_bytes", [1 << 22, 4 * 37 * 21 * 3, 1])
def test_experts_together_get_the_bits_that_each_gets_alone(monkeypatch, dtype, bucket_bytes, band_bytes):
    weights = layer_of(7, dtype)
    expected = {name: quantize(value, FP8.block) for name, value in weights.items() if name in quantised(weights)}
    monkeypatch.setattr(fp8, "BAND_BYTES", band_bytes)
    loaded = sent(weights, bucket_bytes)
    for name, value in weights.items():
        if name in expected:
            codes, scale = expected[name]
            assert torch.equal(loaded[name].view(torch.uint8), codes.view(torch.uint8)), name
            assert torch.equal(loaded[name + "_scale_inv"], scale), name
        else:
            assert torch.equal(loaded[name], value)


def test_more_experts_of_a_layer_need_no_more_operations_and_the_host_waits_once_for_a_bucket():
    counts = []
    for num_experts in (2, 12):
        watch = Counting()
        sent(layer_of(num_experts), watch=watch)
        counts.append(watch.calls)
    assert counts[0] == counts[1]
    assert counts[0]["_local_scalar_dense"] == 1
    # Gate, up and down of the experts, and attention's output, twice each: tile rows, and a partial one.
    assert counts[0]["amax"] <= 2 * 2 * 4


def test_a_batch_ends_where_the_distance_changes():
    specs = [
        TensorSpec(name=name, shape=shape, dtype="bfloat16")
        for name, shape in {
            "x.experts.0.a.weight": (16, 8), "x.experts.1.a.weight": (16, 8), "x.experts.2.a.weight": (16, 8),
            "x.other.weight": (32, 8), "x.experts.3.a.weight": (16, 8), "y.experts.0.a.weight": (16, 8),
        }.items()
    ]  # fmt: skip
    transform = Quantize(FP8, {spec.name for spec in specs})
    (bucket,) = cut_buckets(specs, 10**6, transform)
    batches = equally_apart([(part, *bucket.outputs(transform, part)) for part in bucket.gathered])
    assert [[parts[0].spec.name for parts in batch] for batch in batches] == [
        ["x.experts.0.a.weight", "x.experts.1.a.weight", "x.experts.2.a.weight"],
        ["x.experts.3.a.weight"],
        ["x.other.weight"],
        ["y.experts.0.a.weight"],
    ]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("expert", [0, 4])
def test_an_expert_that_is_not_finite_is_named(wrong, expert):
    weights = layer_of(5)
    weights[f"layers.3.mlp.experts.{expert}.up_proj.weight"][36, 20] = wrong
    with pytest.raises(ValueError, match=rf"^layers\.3\.mlp\.experts\.{expert}\.up_proj\.weight: the matrix holds NaN"):
        sent(weights)


def test_matrices_that_lie_apart_are_quantised_where_they_are():
    weight_BMN = torch.randn(3, 2, 37, 21)[:, 1]
    quantized_BMN = torch.zeros(3, 50, 21, dtype=torch.float8_e4m3fn)[:, :37]
    scale_BRC = torch.zeros(3, 2, 3, 3)[:, 0]
    assert bool(quantize_batch(weight_BMN, FP8.block, (quantized_BMN, scale_BRC)))
    for index, weight_MN in enumerate(weight_BMN):
        codes, scale = quantize(weight_MN, FP8.block)
        assert torch.equal(quantized_BMN[index].view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(scale_BRC[index], scale)
