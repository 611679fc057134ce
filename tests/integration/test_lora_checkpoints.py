"""A checkpoint with adapters continues under its own layout and another; other adapters are refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lora_cases import LORA, LoraRun
from ranks import run_ranks
from small_models import small_model
from weight_cases import join

from slimrl.config.schema.trainer import LoraConfig
from slimrl.models.architecture import architecture_of, trained_architecture
from slimrl.trainer.checkpointing import checkpoint

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

SAVED, OTHER = {"expert": 2}, {"tensor": 2, "sequence": True, "expert_tensor": 2}


def continued(rank, num_ranks, port, path, folder):
    """Adapters after a second update: without a break, and from the checkpoint between both under two layouts.

    Then what is refused, and the adapters of a fresh run before and after it loads only the model's own weights.
    """
    join(rank, num_ranks, port)
    run = LoraRun(Path(path), **SAVED)
    architecture = trained_architecture(run.hf_config, LORA)
    run.update(0)
    checkpoint.save(Path(folder), run.chunks, run.optimizer, run.layout, architecture)
    run.update(1)
    results = [run.adapters()]
    for layout in (SAVED, OTHER):
        run = LoraRun(Path(path), **layout)
        checkpoint.load(Path(folder), run.chunks, run.optimizer, run.layout, architecture, seed=1)
        run.update(1)
        results.append(run.adapters())
    refused = []
    for other in (architecture_of(run.hf_config), trained_architecture(run.hf_config, LoraConfig(rank=4, alpha=12.0))):
        with pytest.raises(ValueError, match="lora_rank") as caught:
            checkpoint.load(Path(folder), run.chunks, run.optimizer, run.layout, other, seed=1)
        refused.append(str(caught.value))
    run = LoraRun(Path(path), **OTHER)
    before, weights = run.adapters(), run.frozen()
    with torch.no_grad():
        for chunk in run.chunks:
            for parameter in chunk.parameters():
                parameter.mul_(1.0 if parameter.requires_grad else 2.0)
    checkpoint.load_weights(Path(folder), run.chunks)
    assert all(torch.equal(weights[name], value) for name, value in run.frozen().items())
    results += [before, run.adapters()]
    dist.destroy_process_group()
    return results, refused


@pytest.mark.full
def test_a_run_with_adapters_continues_exactly_and_under_another_layout(tmp_path):
    path = small_model("qwen3_moe", tmp_path / "model")
    (results, refused), _ = run_ranks(continued, 2, str(path), str(tmp_path / "saved"), timeout_s=200)
    whole, same, other, before, after = results
    for name, value in whole.items():
        assert np.array_equal(same[name], value), name
        np.testing.assert_allclose(other[name], value, atol=1e-6, err_msg=name)
        assert np.array_equal(before[name], after[name]), name
    assert any(abs(before[name] - whole[name]).max() > 1e-3 for name in whole)
    assert "lora_rank is 3 there and absent here" in refused[0]
    assert "lora_rank is 3 there and 4 here" in refused[1]
