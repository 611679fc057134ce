"""One rank's work on a small model with adapters, shared by the tests of them."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from trainer_cases import packed_batches, token_cross_entropy, trainer_config
from weight_cases import change_layout, join

from slimrl.base.seeds import derive_seed
from slimrl.config.lora_rules import adapter_targets
from slimrl.config.schema.trainer import LoraConfig, OptimizerConfig
from slimrl.models.adapters import adapter_map, layer_name
from slimrl.models.family import family_of
from slimrl.models.hf_config import read_hf_config
from slimrl.trainer.build import build_model, unwrap
from slimrl.trainer.lora.attach import adapters_of, attach_adapters
from slimrl.trainer.micro_batch_runner import MicroBatchRunner
from slimrl.trainer.optimizer import Optimizer
from slimrl.trainer.weight_source import MegatronWeightSource
from slimrl.trainer.weights import load_hf_weights, model_weight_map, shard_place

LORA = LoraConfig(rank=3, alpha=12.0)
LINEAR_STEPS = OptimizerConfig(lr=0.5, eps=10.0, clip_grad=0.0)
"""So large an epsilon makes Adam's step proportional to the gradient: a wrong gradient shows, rounding does not."""


class LoraRun:
    """A model with adapters whose B are not 0, on this rank."""

    def __init__(self, path: Path, lora: LoraConfig = LORA, **settings: Any) -> None:
        self.path, self.lora = path, lora
        self.trainer = trainer_config(dist.get_world_size(), **{"optimizer": LINEAR_STEPS, **settings}, lora=lora)
        self.hf_config = read_hf_config(path)
        self.family = family_of(self.hf_config)
        self.layout = change_layout(self.trainer.parallel)
        model = self.family.megatron_config(self.hf_config)
        adapt = partial(attach_adapters, family=self.family, hf_config=self.hf_config, lora=lora, seed=5)
        self.chunks = build_model(self.trainer, model, adapt=adapt)
        load_hf_weights(self.chunks, path, self.family, self.hf_config)
        fill_b(self.chunks)
        self.optimizer = Optimizer(self.trainer, self.chunks, total_updates=10)
        self.runner = MicroBatchRunner(
            self.chunks, self.optimizer, self.layout, vocab_size=model.vocab_size, chunk_tokens=48
        )

    def update(self, step: int) -> Any:
        batches = packed_batches(step, self.layout, self.trainer.max_tokens_per_rank)
        return self.runner.train_update(batches, token_cross_entropy, denominator=100.0, temperature=0.7)

    def adapters(self) -> dict[str, np.ndarray]:
        """Whole adapters under PEFT's names on rank 0; every rank calls it."""
        targets = adapter_targets(self.lora, self.hf_config)
        adapters = adapter_map(model_weight_map(self.chunks, self.family, self.hf_config), targets, self.lora.rank)
        source = MegatronWeightSource(self.chunks, self.family, self.hf_config, "float32", adapters=adapters)
        return {name: tensor.numpy().copy() for name, tensor in source.tensors() if tensor is not None}

    def merged(self) -> dict[str, np.ndarray]:
        """Whole weights on rank 0; every rank calls it."""
        source = MegatronWeightSource(self.chunks, self.family, self.hf_config, "float32")
        return {name: tensor.numpy().copy() for name, tensor in source.tensors() if tensor is not None}

    def frozen(self) -> dict[str, torch.Tensor]:
        """Copies of the weights without gradient, by name on this rank."""
        return {
            f"{number}.{name}": parameter.detach().clone()
            for number, chunk in enumerate(self.chunks)
            for name, parameter in unwrap(chunk).named_parameters()
            if not parameter.requires_grad
        }


@torch.no_grad()
def fill_b(chunks: Any) -> None:
    """Random values in every B, the same in every layout."""
    for _, adapters in adapters_of(chunks):
        index, count = shard_place(adapters.entry)
        for tensor in adapters.entry.hf:
            name = layer_name(tensor)
            if name not in adapters.names:
                continue
            generator = torch.Generator().manual_seed(derive_seed(3, tensor.name))
            whole = 0.05 * torch.randn(tensor.shape[0], adapters.rank, generator=generator)
            parameter = adapters.get_parameter(f"{name}_B")
            parameter.copy_(whole.chunk(count)[index] if adapters.by_rows else whole)


def two_updates(rank: int, num_ranks: int, port: int, path: str, cases: list[dict[str, Any]]) -> list[Any]:
    """For each layout: (results of two updates, whole adapters after them, names of frozen weights that changed)."""
    join(rank, num_ranks, port)
    results = []
    for settings in cases:
        run = LoraRun(Path(path), **settings)
        before = run.frozen()
        updates = [run.update(step) for step in range(2)]
        after = run.frozen()
        changed = [name for name, value in before.items() if not torch.equal(value, after[name])]
        results.append((updates, run.adapters(), changed))
    dist.destroy_process_group()
    return results
