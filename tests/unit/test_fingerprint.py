"""Fingerprints: an independent computation with Python integers, additivity over shards, and the faults they catch."""

import pytest
import torch

from slimrl.models.fingerprint import CHUNK_ELEMENTS, add_hashes, as_hex, fingerprint, partial_hash

WORD = 2**64


def reference_hash(tensor: torch.Tensor) -> int:
    """The same mixing in unbounded integers, element by element."""
    bits = tensor.contiguous().view(-1).view({2: torch.int16, 4: torch.int32}[tensor.element_size()]).tolist()
    total = 0
    for position, value in enumerate(bits):
        mixed = ((position + 1) * 0x9E3779B97F4A7C15 + value) % WORD
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % WORD
        mixed = (mixed ^ (mixed >> 27)) * 0x9E3779B97F4A7C15 % WORD
        total += mixed
    return total % WORD


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_hash_equals_the_same_arithmetic_in_python_integers(dtype):
    tensor = random_tensor(7, 31, dtype=dtype)
    assert fingerprint(tensor) == as_hex(reference_hash(tensor))


def test_cutting_the_work_into_chunks_changes_nothing():
    tensor = random_tensor(CHUNK_ELEMENTS + 77, dtype=torch.bfloat16)
    assert fingerprint(tensor) == as_hex(reference_hash(tensor))


def test_row_shards_add_up_to_the_whole():
    whole = random_tensor(8, 6)
    assert add_hashes(partial_hash(whole[:3]), partial_hash(whole[3:], offset=18)) == partial_hash(whole)


def test_column_shards_add_up_to_the_whole():
    whole = random_tensor(8, 6)
    parts = (partial_hash(whole[:, :2], 0, row_stride=6), partial_hash(whole[:, 2:], 2, row_stride=6))
    assert add_hashes(*parts) == partial_hash(whole)


def test_one_flipped_bit_is_seen():
    tensor = random_tensor(100, 100)
    changed = tensor.clone()
    changed.view(torch.int32)[50, 50] ^= 1
    assert fingerprint(changed) != fingerprint(tensor)


def test_two_swapped_elements_are_seen():
    tensor = random_tensor(100)
    changed = tensor.clone()
    changed[[3, 4]] = tensor[[4, 3]]
    assert fingerprint(changed) != fingerprint(tensor)


def test_two_swapped_rows_are_seen():
    tensor = random_tensor(10, 10)
    changed = tensor.clone()
    changed[[0, 9]] = tensor[[9, 0]]
    assert fingerprint(changed) != fingerprint(tensor)


def test_negative_zero_differs_from_zero():
    assert fingerprint(torch.zeros(5)) != fingerprint(torch.tensor([0.0, 0.0, -0.0, 0.0, 0.0]))


def test_zeros_of_another_length_differ():
    assert fingerprint(torch.zeros(5)) != fingerprint(torch.zeros(6))


def test_memory_layout_does_not_matter():
    tensor = random_tensor(4, 9)
    assert fingerprint(tensor.t().contiguous().t()) == fingerprint(tensor)


def test_a_scalar_and_an_empty_tensor_have_fingerprints():
    assert fingerprint(torch.empty(0)) == "0" * 16
    assert fingerprint(torch.tensor(1.5)) == fingerprint(torch.tensor([1.5]))


def test_random_tensors_never_collide():
    generator = torch.Generator().manual_seed(2)
    seen = {fingerprint(torch.randint(0, 4, (6,), generator=generator, dtype=torch.int32)) for _ in range(2000)}
    generator.manual_seed(2)
    distinct = {tuple(torch.randint(0, 4, (6,), generator=generator).tolist()) for _ in range(2000)}
    assert len(seen) == len(distinct)
