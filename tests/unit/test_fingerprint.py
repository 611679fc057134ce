"""Fingerprints: an independent computation with Python integers, additivity over shards, and the faults they catch."""

import pytest
import torch

from slimrl.models.fingerprint import CHUNK_UNITS, add_hashes, as_hex, fingerprint, partial_hash

WORD = 2**64
UNITS = {1: torch.int8, 2: torch.int16, 4: torch.int16, 8: torch.int16}


def key(place: int) -> int:
    """Output `place` of splitmix64 by its definition, made odd."""
    mixed = (place + 1) * 0x9E3779B97F4A7C15 % WORD
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % WORD
    return (mixed ^ (mixed >> 31)) | 1


def reference_hash(tensor: torch.Tensor) -> int:
    """The sum in unbounded integers, unit by unit."""
    rows = tensor.reshape(-1, tensor.shape[-1]).contiguous().view(UNITS[tensor.element_size()]).tolist()
    return (
        sum(key(2**48 + r) * key(u) * (value + 1) for r, row in enumerate(rows) for u, value in enumerate(row)) % WORD
    )


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_the_hash_equals_the_same_arithmetic_in_python_integers(dtype):
    tensor = random_tensor(7, 31, dtype=dtype)
    assert fingerprint(tensor) == as_hex(reference_hash(tensor))


@pytest.mark.parametrize("shape", [(CHUNK_UNITS + 77,), (3, CHUNK_UNITS // 2), (CHUNK_UNITS // 5, 7), (2, 3, 5, 4)])
def test_cutting_the_work_into_chunks_changes_nothing(shape):
    tensor = random_tensor(*shape, dtype=torch.bfloat16)
    assert fingerprint(tensor) == as_hex(reference_hash(tensor))


def test_row_shards_add_up_to_the_whole():
    whole = random_tensor(8, 6)
    assert add_hashes(partial_hash(whole[:3]), partial_hash(whole[3:], offset=18)) == partial_hash(whole)


def test_column_shards_add_up_to_the_whole():
    whole = random_tensor(8, 6)
    parts = (partial_hash(whole[:, :2], 0, row_stride=6), partial_hash(whole[:, 2:], 2, row_stride=6))
    assert add_hashes(*parts) == partial_hash(whole)


def test_shards_of_a_vector_add_up_wherever_they_are_cut():
    whole = random_tensor(11)
    assert add_hashes(partial_hash(whole[:4]), partial_hash(whole[4:], offset=4)) == partial_hash(whole)


def test_shards_of_an_odd_number_of_bytes_add_up():
    whole = random_tensor(6, 7).to(torch.float8_e4m3fn)
    columns = (partial_hash(whole[:, :3], 0, row_stride=7), partial_hash(whole[:, 3:], 3, row_stride=7))
    rows = (partial_hash(whole[:1]), partial_hash(whole[1:], offset=7))
    assert add_hashes(*columns) == add_hashes(*rows) == partial_hash(whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sign_flips_of_any_two_elements_are_seen(dtype):
    # Differences that are multiples of a high power of two leave the fewest bits of the keys to tell them apart.
    tensor = random_tensor(8, 8, dtype=dtype)
    prints = set()
    for first in range(64):
        for second in range(first):
            changed = tensor.clone().view(-1)
            changed[[first, second]] *= -1
            prints.add(fingerprint(changed.view(8, 8)))
    assert len(prints) == 64 * 63 // 2
    assert fingerprint(tensor) not in prints


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
