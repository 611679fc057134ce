"""Logits of two checkpoints compared: figures against hand-computed ones, and limits by what limits the agreement."""

import math

import pytest
import torch
from slimrl_tools.open_checkpoint import find_checkpoint
from slimrl_tools.verify.logits import MAX_FLOAT32, RMS_LIMITS, compare_logits, compute_logits, random_prompts
from slimrl_tools.verify.verification import _precision
from transformers import AutoModelForCausalLM

from slimrl.data.model_weights import TensorSpec

A = torch.tensor([[[3.0, 0.0], [0.0, 4.0]], [[1.0, 2.0], [2.0, 1.0]]])


def test_figures_are_those_of_the_definition():
    b = A.clone()
    b[0, 0] = torch.tensor([0.0, 2.0])
    result = compare_logits(A, b, "bfloat16")
    assert (result.num_tokens, result.max_abs, result.largest, result.greedy_agreement) == (4, 3.0, 4.0, 0.75)
    # The squares of the larger of the two sum up to 35 over 8, those of the differences to 9 + 4.
    assert result.relative_rms == pytest.approx(math.sqrt(13 / 8) / math.sqrt(35 / 8))
    assert compare_logits(b, A, "bfloat16") == result
    assert compare_logits(A * 0, A * 0, "float32").relative_rms == 0


def test_float32_is_held_to_the_largest_difference_and_others_to_the_mean():
    for scale in (1.0, 0.01):
        limit = MAX_FLOAT32 * max(1.0, 4 * scale)
        for gap, within in ((0.9 * limit, True), (1.1 * limit, False)):
            b = scale * A
            b[1, 1, 0] -= gap
            result = compare_logits(scale * A, b, "float32")
            assert result.limit == pytest.approx(limit)
            assert result.within is within
            assert result.as_dict()["within"] is within
    for precision, limit in RMS_LIMITS.items():
        for share, within in ((0.9, True), (1.1, False)):
            result = compare_logits(A, A * (1 - share * limit), precision)
            assert result.relative_rms == pytest.approx(share * limit, rel=1e-4)
            assert (result.limit, result.within) == (limit, within)


def test_what_is_no_number_agrees_with_nothing():
    b = A.clone()
    b[0, 0, 0] = math.nan
    for precision in ("float32", *RMS_LIMITS):
        result = compare_logits(A, b, precision)
        assert (result.within, result.max_abs) == (False, math.inf)


def test_prompts_are_those_of_their_seed():
    prompts = random_prompts(50, 3, 7, seed=1)
    assert (prompts.shape, prompts.dtype) == ((3, 7), torch.int64)
    assert 0 <= prompts.min() <= prompts.max() < 50
    assert torch.equal(prompts, random_prompts(50, 3, 7, seed=1))
    assert not torch.equal(prompts, random_prompts(50, 3, 7, seed=2))


def test_the_coarsest_of_computation_casts_and_quantisation_counts():
    def specs(*dtypes):
        return [TensorSpec(name=dtype, shape=(1,), dtype=dtype) for dtype in dtypes]

    assert _precision("float32", [], False) == "float32"
    assert _precision("bfloat16", [], False) == "bfloat16"
    assert _precision("float32", specs("float32", "float16"), False) == "float16"
    assert _precision("float32", specs("bfloat16", "float16"), False) == "bfloat16"
    assert _precision("float32", [], True) == "block FP8"


def test_logits_of_a_checkpoint_are_those_of_transformers(toy):
    prompts = random_prompts(200, 2, 9, seed=0)
    model = AutoModelForCausalLM.from_pretrained(toy, dtype=torch.float32)
    with torch.no_grad():
        expected = model(prompts).logits
    done: list[int] = []
    found = compute_logits(find_checkpoint(toy), prompts, "float32", done.append)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert done == [1] * len(prompts)
