"""Comparing two checkpoints, on readers that hold their tensors in memory."""

import math
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from slimrl_tools.verify import compare
from slimrl_tools.verify.compare import (
    EXACT,
    Limit,
    compare_checkpoints,
    compare_tensors,
    fp8_limit,
    limit_of,
    rounding_limit,
)

from slimrl.data.model_weights import TensorSpec


class MemoryReader:
    def __init__(self, tensors: dict[str, torch.Tensor]):
        self.path, self.tensors = Path("memory"), tensors
        self.specs = {
            name: TensorSpec(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
            for name, tensor in tensors.items()
        }

    def read(self, name, slices):
        return self.tensors[name][slices]


def compared(a, b, **options):
    def stored_alike(x, y):
        return limit_of(x, y, quantised=False)

    return compare_checkpoints(MemoryReader(a), MemoryReader(b), stored_alike, **options)


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_equal_checkpoints_have_no_difference_and_every_byte_is_counted():
    tensors = {"a": random(3, 5), "b": random(7, dtype=torch.bfloat16), "scalar": torch.tensor(2.0)}
    done = []
    result = compared(tensors, {name: tensor.clone() for name, tensor in tensors.items()}, advance=done.append)
    assert result.same
    assert (result.num_tensors, result.differences) == (3, [])
    assert sum(done) == 3 * 5 * 4 + 7 * 2 + 4


def test_one_changed_element_is_found_wherever_it_lies(monkeypatch):
    monkeypatch.setattr(compare, "BAND_ELEMENTS", 8)
    for row, column in [(0, 0), (2, 3), (8, 4)]:
        a = {"w": random(9, 5), "other": random(4)}
        b = {name: tensor.clone() for name, tensor in a.items()}
        b["w"][row, column] += 0.25
        result = compared(a, b)
        (difference,) = result.differences
        assert not result.same
        assert (difference.name, difference.where) == ("w", (row, column))
        expected = (a["w"] - b["w"]).abs().max().item()
        assert difference.max_abs == expected
        x, y = a["w"][row, column].item(), b["w"][row, column].item()
        assert difference.max_relative == pytest.approx(abs(x - y) / max(abs(x), abs(y)))


def test_no_more_than_one_tensor_of_each_checkpoint_is_held():
    tensors = {f"layer{number}": random(50, seed=number) for number in range(5)}
    alive, most = [], []

    class Tracked(MemoryReader):
        def read(self, name, slices):
            tensor = super().read(name, slices).clone()
            alive.append(weakref.ref(tensor))
            most.append(sum(reference() is not None for reference in alive))
            return tensor

    compare_checkpoints(Tracked(tensors), Tracked(tensors), lambda a, b: EXACT)
    assert max(most) == 2


def test_names_shapes_and_dtypes_are_reported():
    a = {"gone": random(2), "shape": random(2, 3), "dtype": random(4).bfloat16(), "same": random(2)}
    b = {"new": random(2), "shape": random(3, 2), "dtype": a["dtype"].float(), "same": a["same"]}
    result = compared(a, b)
    assert (result.missing, result.extra) == (["gone"], ["new"])
    assert result.shapes == [("shape", (2, 3), (3, 2))]
    assert result.dtypes == [("dtype", "bfloat16", "float32")]
    assert not result.same


def test_a_cast_keeps_the_limit_of_its_rounding_and_only_the_dtype_differs():
    for dtype in (torch.bfloat16, torch.float16):
        # Over the whole range, float16's subnormals included.
        a = {"w": random(1000) * torch.logspace(-9, 4, 1000)}
        result = compared(a, {"w": a["w"].to(dtype)})
        assert (result.same, len(result.dtypes), result.num_exceeding) == (False, 1, 0)
        assert result.differences[0].max_relative > 0
        truncated = a["w"].to(dtype)
        truncated[-1] = torch.nextafter(torch.nextafter(truncated[-1], torch.tensor(0, dtype=dtype)), truncated[-1] * 0)
        assert compared(a, {"w": truncated}).num_exceeding == 1


def test_nan_agrees_with_nan_and_with_nothing_else():
    a, b = torch.tensor([1.0, math.nan, math.inf]), torch.tensor([1.0, math.nan, math.inf])
    assert compare_tensors("w", a, b, EXACT) is None
    for index, value in [(0, math.nan), (0, -math.inf), (1, 0.0), (2, -math.inf), (2, 3.0)]:
        changed = b.clone()
        changed[index] = value
        difference = compare_tensors("w", a, changed, Limit(reason="loose", absolute=1e9, relative=1))
        assert difference is not None
        assert not difference.within
        assert (difference.max_abs, difference.where) == (math.inf, (index,))


def test_zero_and_negative_zero_differ_by_nothing():
    difference = compare_tensors("w", torch.zeros(3), -torch.zeros(3), EXACT)
    assert difference is not None
    assert difference.within
    assert (difference.max_abs, difference.max_relative) == (0, 0)


def test_a_copy_that_one_side_lacks_is_compared_with_its_original():
    original, other = random(4), random(4, seed=1)
    copies = {"mtp.embed": "embed"}
    without = {"embed": original}
    for copy, same in [(original, True), (other, False)]:
        given = {"embed": original, "mtp.embed": copy}
        assert compared(given, without, copies=copies).same is same
        assert compared(without, given, copies=copies).same is same
        assert not compared(given, without).same


def test_the_limit_of_block_fp8_holds_for_numpy_s_tiles_and_is_nearly_reached():
    rng = np.random.default_rng(0)
    weight = (rng.standard_normal((256, 256)) * np.exp(rng.normal(0, 3, (256, 256)))).astype(np.float32)
    back = np.zeros_like(weight)
    for i in range(0, 256, 128):
        for j in range(0, 256, 128):
            tile = weight[i : i + 128, j : j + 128]
            scale = np.float32(np.abs(tile).max() / 448)
            exponent = np.floor(np.log2(np.maximum(np.abs(tile / scale), 2.0**-6)))
            step = 2.0 ** (exponent - 3)
            back[i : i + 128, j : j + 128] = np.round(tile / scale / step) * step * scale
    limit = fp8_limit("float32")
    difference = compare_tensors("w", torch.from_numpy(weight), torch.from_numpy(back), limit)
    assert difference is not None
    assert difference.within
    # A quarter less would not do.
    tight = Limit(reason="tight", relative=0.75 * limit.relative, of_largest=limit.of_largest)
    assert not compare_tensors("w", torch.from_numpy(weight), torch.from_numpy(back), tight).within


def test_the_worst_comes_first_and_what_exceeds_its_limit_before_what_keeps_it():
    a = {"cast": random(5) * 1e6, "small": random(5), "large": random(5)}
    b = {"cast": a["cast"].bfloat16(), "small": a["small"] + 0.1, "large": a["large"] + 1}
    result = compared(a, b)
    assert [difference.name for difference in result.differences] == ["large", "small", "cast"]
    assert result.num_exceeding == 2


def test_rounding_limits_are_half_units_in_the_last_place():
    assert rounding_limit("bfloat16").relative == 2.0**-8
    assert rounding_limit("float16").relative == 2.0**-11
    assert rounding_limit("float16").absolute == 2.0**-25
