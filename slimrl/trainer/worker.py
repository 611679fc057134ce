"""The model of one trainer rank and its optimizer: how they are built, loaded and saved, on all ranks together."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from slimrl.checkpoints.digests import FileDigest
from slimrl.config.alignment import tile_tokens
from slimrl.config.lora_rules import adapter_targets
from slimrl.config.schema.algorithm import RoutingReplay
from slimrl.config.schema.trainer import TrainerConfig
from slimrl.config.wrapper import wrapper_of
from slimrl.models.adapters import adapter_map
from slimrl.models.architecture import architecture_of, check_architecture, trained_architecture, weights_folder
from slimrl.models.family import family_of
from slimrl.models.hf_config import read_hf_config
from slimrl.models.peft_config import peft_config
from slimrl.trainer.build import build_model, unwrap
from slimrl.trainer.checkpointing import checkpoint
from slimrl.trainer.checkpointing.export import ExportedAdapters, export_hf
from slimrl.trainer.checkpointing.fetching import Fetch, fetching
from slimrl.trainer.checkpointing.writing import CheckpointWriting, storage_addresses
from slimrl.trainer.determinism import make_deterministic
from slimrl.trainer.layout.parallel import destroy_parallel, init_parallel
from slimrl.trainer.lora.attach import attach_adapters, without_adapters
from slimrl.trainer.micro_batch_runner import MicroBatchRunner, ValueRunner
from slimrl.trainer.mtp import MtpLoss
from slimrl.trainer.offload import Offload, weight_tensors
from slimrl.trainer.optimizer import Optimizer
from slimrl.trainer.reference import ReferenceWeights
from slimrl.trainer.weight_source import MegatronWeightSource
from slimrl.trainer.weights import load_hf_weights, model_weight_map


class TrainerWorker:
    """Joins the process group and builds the model with random weights; `load_hf` or `load_checkpoint` loads others."""

    def __init__(
        self,
        trainer: TrainerConfig,
        model_path: Path,
        *,
        seed: int,
        rank: int,
        world_size: int,
        meeting: str,
        total_updates: int,
        deterministic: bool = False,
        routing_replay: RoutingReplay = RoutingReplay.off,
        critic: bool = False,
    ) -> None:
        """
        Args:
            model_path: Hugging Face checkpoint folder; the model is built from its config.json.
            total_updates: length of the learning-rate schedules, in optimizer updates.
            deterministic: the same results from the same seed.
            routing_replay: experts that the updates take.
            critic: the model has values in place of logits.
        """
        if deterministic:
            trainer = make_deterministic(trainer)
        self.seed, self.model_path, self.is_critic = seed, model_path, critic
        self.hf_config = read_hf_config(model_path)
        self.dtype = trainer.precision.dtype
        self.family = family_of(self.hf_config)
        self.layout = init_parallel(
            trainer.parallel,
            rank=rank,
            world_size=world_size,
            meeting=meeting,
            timeout_s=trainer.timeout_s,
            seed=seed,
            tile=tile_tokens(trainer),
        )
        model = self.family.megatron_config(self.hf_config)
        self.lora = trainer.lora
        self.chunks = build_model(
            trainer,
            model,
            mtp=trainer.mtp.train,
            critic=critic,
            adapt=partial(attach_adapters, family=self.family, hf_config=self.hf_config, lora=trainer.lora, seed=seed),
        )
        self.optimizer = Optimizer(trainer, self.chunks, total_updates)
        self.offload = Offload(self.chunks, self.optimizer)
        self.runner = (ValueRunner if critic else MicroBatchRunner)(
            self.chunks,
            self.optimizer,
            self.layout,
            vocab_size=model.vocab_size,
            chunk_tokens=trainer.logprob_chunk_tokens,
            mtp=MtpLoss(model.mtp_layers, trainer.mtp.loss_weight) if trainer.mtp.train else None,
            replays_routing=routing_replay is not RoutingReplay.off,
        )

    def load_hf(self) -> None:
        """Load the weights of `model_path`."""
        load_hf_weights(self.chunks, self.model_path, self.family, self.hf_config, self.dtype)
        self.optimizer.megatron.reload_model_params()

    def load_megatron(self, path: Path) -> None:
        """Load the weights of a Megatron checkpoint, converted or from a run, saved under any layout.

        Raises:
            ValueError: it is a checkpoint of another model, or one with adapters.
        """
        folder = weights_folder(path)
        check_architecture(folder, architecture_of(self.hf_config))
        checkpoint.load_weights(folder, self.chunks)
        self.optimizer.megatron.reload_model_params()

    def keep_reference(self) -> Callable[[], AbstractContextManager[None]]:
        """Keep the current weights as the reference's; with adapters these are the model's own, which never change.

        Returns:
            Context manager within which the model has them.
        """
        if self.lora.rank:
            return partial(without_adapters, self.chunks)
        return ReferenceWeights(self.chunks).swapped_in

    def weight_source(self, *, mtp: bool = False) -> MegatronWeightSource:
        """The weights that engines serve as Hugging Face tensors, in the precision of the training.

        Args:
            mtp: with the layers for multi-token prediction that are trained, for the engines' draft models.
        """
        return MegatronWeightSource(self.chunks, self.family, self.hf_config, self.dtype, mtp=mtp, copies=False)

    def save_checkpoint(self, directory: Path) -> dict[str, FileDigest]:
        """Write a checkpoint; see checkpoint.save."""
        return checkpoint.save(
            directory, self.chunks, self.optimizer, self.layout, self._architecture(), self.model_path
        )

    def begin_checkpoint(
        self, directory: Path, *, leads: bool | None = None, same_layout: bool = False
    ) -> CheckpointWriting:
        """Begin a checkpoint whose `write` may run beside the training; see checkpoint.begin."""
        writing = checkpoint.begin(
            directory,
            self.chunks,
            self.optimizer,
            self.layout,
            self._architecture(),
            self.model_path,
            leads=leads,
            same_layout=same_layout,
        )
        # Such as the biases of routers, which change beside the optimizer.
        buffers = [buffer for chunk in self.chunks for buffer in unwrap(chunk).buffers()]
        writing.stage(storage_addresses([*weight_tensors(self.chunks), *buffers, *self.optimizer.tensors()]))
        return writing

    def load_checkpoint(self, directory: Path, fetch: Fetch | None = None) -> None:
        """Load a checkpoint; see checkpoint.load.

        Args:
            fetch: brings files of the folder before they are read.
        """
        with fetching(fetch):
            checkpoint.load(directory, self.chunks, self.optimizer, self.layout, self._architecture(), seed=self.seed)

    def export_hf(self, directory: Path, seen: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Write the weights in `model_path`'s dtype, with its config and tokenizer.

        Adapters are merged into them, and written in the subfolder `adapter` too, in PEFT's format.

        Args:
            seen: see `export_hf`.
        """
        source = MegatronWeightSource(self.chunks, self.family, self.hf_config)
        export_hf(source, self.model_path, directory, self._exported_adapters(), seen)

    def _architecture(self) -> dict[str, Any]:
        return trained_architecture(self.hf_config, self.lora, critic=self.is_critic)

    def _exported_adapters(self) -> ExportedAdapters | None:
        targets = adapter_targets(self.lora, self.hf_config)
        if not targets:
            return None
        weight_map = model_weight_map(self.chunks, self.family, self.hf_config)
        adapters = adapter_map(weight_map, targets, self.lora.rank, wrapper_of(self.hf_config))
        source = MegatronWeightSource(self.chunks, self.family, self.hf_config, self.dtype, adapters=adapters)
        config = peft_config(self.lora, adapters.hf_tensors, self.hf_config, str(self.model_path))
        return ExportedAdapters(source=source, config=config)

    def close(self) -> None:
        """Leave the process groups; every rank calls it."""
        destroy_parallel()
