"""Block FP8 and fingerprints: the same bits as on a CPU, and how fast they are."""

import pytest
import torch
from hard_matrices import hard_matrix
from machine import choose, copy_gb_per_s, seconds_of

from slimrl import device
from slimrl.models.fingerprint import fingerprint
from slimrl.models.hf_config import FP8_BLOCK
from slimrl.quantization.fp8 import dequantize, quantize, quantize_batch

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)
BATCH = 125
"""Experts of a layer that lie in one bucket, about"""


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.cpu().view(torch.uint8), other.cpu().view(torch.uint8))


@pytest.mark.proves("engines get from a GPU the bytes of `slimrl-tools quantize`, which runs on a CPU")
def test_codes_scales_and_dequantised_values_are_those_of_a_cpu():
    where = device.compute_device()
    for dtype in DTYPES[:2]:
        for shape in ((1100, 700), (256, 256), (5, 7), (129, 1)):
            weight = hard_matrix(*shape, dtype)
            quantized, expected = quantize(weight.to(where)), quantize(weight)
            assert all(map(same_bits, quantized, expected)), (dtype, shape)
            assert same_bits(dequantize(*quantized, torch.bfloat16), dequantize(*expected, torch.bfloat16))
        batch = torch.stack([hard_matrix(300, 200, dtype, seed) for seed in range(5)])
        out = (
            torch.empty(batch.shape, dtype=torch.float8_e4m3fn, device=where),
            torch.empty((5, 3, 2), dtype=torch.float32, device=where),
        )
        assert bool(quantize_batch(batch.to(where), FP8_BLOCK, out))
        for index, weight in enumerate(batch):
            assert all(map(same_bits, (out[0][index], out[1][index]), quantize(weight)))


@pytest.mark.proves("trainer and engine may hash on different devices")
def test_fingerprints_are_those_of_a_cpu():
    generator = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        tensor = torch.randn(300, 4099, generator=generator).to(dtype)
        assert fingerprint(tensor.to(device.compute_device())) == fingerprint(tensor)
        columns = tensor.t()
        assert fingerprint(columns.to(device.compute_device())) == fingerprint(columns)


@pytest.mark.proves("what quantising at each sync and verifying cost, against the bandwidth of the memory")
def test_two_thousand_expert_sized_matrices_are_quantised_and_hashed(figure):
    number, (rows, columns) = choose((2_000, (768, 2048)), (4, (256, 256)))
    some = min(BATCH, number)
    weight_BMN = torch.randn(some, rows, columns, device=device.compute_device()).to(torch.bfloat16)
    out = (
        torch.empty(weight_BMN.shape, dtype=torch.float8_e4m3fn, device=weight_BMN.device),
        torch.empty(some, -(-rows // 128), -(-columns // 128), device=weight_BMN.device),
    )

    def quantize_all():
        assert bool(torch.stack([quantize_batch(weight_BMN, FP8_BLOCK, out) for _ in range(number // some)]).all())

    def hash_all():
        assert len({fingerprint(weight_BMN) for _ in range(number // some)}) == 1

    gigabytes = number * rows * columns * 2 / 1e9
    quantized, hashed = gigabytes / seconds_of(quantize_all, 1), gigabytes / seconds_of(hash_all, 1)
    figure(f"of bf16 weights: FP8 {quantized:.1f} GB/s, fingerprints {hashed:.1f} GB/s")
    figure(f"a copy {copy_gb_per_s(weight_BMN.nbytes):.1f} GB/s")
    assert quantized > 0
