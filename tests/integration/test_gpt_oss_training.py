"""gpt-oss: gradients of every tensor, those of the sinks too, are those of transformers under every kind of layout."""

from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import run_ranks
from small_models import apart, small_model
from trainer_cases import packed_batches, sequences, token_cross_entropy, trainer_config
from transformers import GptOssForCausalLM

from slimrl.config.schema.trainer import OptimizerConfig
from slimrl.models.family import family_of
from slimrl.models.hf_config import read_hf_config
from slimrl.trainer.weight_source import MegatronWeightSource
from slimrl.trainer.worker import TrainerWorker

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

DENOMINATOR = 100.0
LAYOUTS = {
    "one rank": (1, {}),
    "tp2": (2, {"tensor": 2, "sequence": True}),
    "cp2": (2, {"context": 2}),
    "pp2": (2, {"pipeline": 2}),
    "ep2": (2, {"expert": 2}),
    "tp2 cp2 ep2": (4, {"tensor": 2, "sequence": True, "context": 2, "expert": 2}),
}


def gradients(rank, num_ranks, port, path, settings):
    """(gradient of each tensor by its name in slimrl, their norm); the first on rank 0 alone."""
    optimizer = OptimizerConfig(lr=0.0, distributed=False)
    worker = TrainerWorker(
        trainer_config(num_ranks, optimizer=optimizer, **settings), Path(path), seed=1, rank=rank,
        world_size=num_ranks, meeting=f"tcp://127.0.0.1:{port}", total_updates=1,
    )  # fmt: skip
    worker.load_hf()
    batches = packed_batches(0, worker.layout, 128)
    worker.runner.accumulate(batches, token_cross_entropy, denominator=DENOMINATOR, temperature=1.0)
    grads = [(p, p.main_grad.clone()) for chunk in worker.chunks for p in chunk.parameters()]
    norm = worker.runner.step().grad_norm
    for parameter, grad in grads:
        parameter.data.copy_(grad)
    config = read_hf_config(Path(path))
    source = MegatronWeightSource(worker.chunks, family_of(config), config)
    found = {name: tensor.numpy().copy() for name, tensor in source.tensors() if tensor is not None}
    worker.close()
    return found, norm


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(its folder, gradients by transformers in float64, their norm)"""
    path = small_model("gpt_oss", tmp_path_factory.mktemp("gpt_oss") / "hf")
    model = GptOssForCausalLM.from_pretrained(
        path, attn_implementation="eager", experts_implementation="eager", dtype=torch.float64
    )
    loss = torch.zeros((), dtype=torch.float64)
    for segment in sequences(0)[0]:
        tokens_T, mask_T = torch.from_numpy(segment.tokens).long(), torch.from_numpy(segment.loss_mask[1:])
        logprobs_TV = model(tokens_T[None, :-1]).logits[0].log_softmax(-1)
        loss -= logprobs_TV.gather(1, tokens_T[1:, None])[:, 0][mask_T].sum()
    (loss / DENOMINATOR).backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    norm = torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt().item()
    return path, {name: grad.numpy() for name, grad in apart(grads).items()}, norm


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_transformers(model, layout):
    path, expected, norm = model
    num_ranks, settings = LAYOUTS[layout]
    results = run_ranks(gradients, num_ranks, path, settings, timeout_s=150)
    found = results[0][0]
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        np.testing.assert_allclose(found[name], grad, rtol=1e-4, atol=2e-6, err_msg=name)
    assert [result[1] for result in results] == pytest.approx([norm] * num_ranks, rel=1e-5)
    sinks = [np.abs(grad).max() for name, grad in expected.items() if name.endswith("sinks")]
    assert len(sinks) == 4
    assert min(sinks) > 1e-4
