"""Updates of a small model of any family on one rank, shared by tests of training."""

from pathlib import Path

from trainer_cases import packed_batches, token_cross_entropy, trainer_config

from slimrl.trainer.build import unwrap
from slimrl.trainer.worker import TrainerWorker


def updates(rank, num_ranks, port, path, settings, steps, save_to=None, load_from=None):
    """Mean loss of each update, then the routers' biases of this rank by name.

    Starts from the checkpoint's weights, or from the training checkpoint `load_from`.
    """
    trainer = trainer_config(num_ranks, **settings)
    worker = TrainerWorker(
        trainer, Path(path), seed=1, rank=rank, world_size=num_ranks, meeting=f"tcp://127.0.0.1:{port}",
        total_updates=10,
    )  # fmt: skip
    if load_from is None:
        worker.load_hf()
    else:
        worker.load_checkpoint(Path(load_from))
    losses = []
    for step in steps:
        batches = packed_batches(step, worker.layout, trainer.max_tokens_per_rank)
        result = worker.runner.train_update(batches, token_cross_entropy, denominator=100.0, temperature=1.0)
        assert not result.skipped
        losses.append(result.sums["loss"] / result.sums["tokens"])
    if save_to is not None:
        worker.save_checkpoint(Path(save_to))
    biases = {
        name: buffer.float().cpu().numpy().copy()
        for chunk in worker.chunks
        for name, buffer in unwrap(chunk).named_buffers()
        if name.endswith("expert_bias")
    }
    worker.close()
    return losses, biases
