"""One rank of a trainer that does nothing but send weights: for tests of resyncs."""

from pathlib import Path

import torch.distributed as dist
from weight_cases import TIMEOUT_S, change_layout, trainer_config

from slimrl.config.schema.precision import Precision
from slimrl.config.schema.trainer import ParallelConfig
from slimrl.models.family import family_of
from slimrl.models.hf_config import read_hf_config
from slimrl.trainer.build import build_model
from slimrl.trainer.layout.parallel import init_parallel
from slimrl.trainer.weight_source import MegatronWeightSource
from slimrl.trainer.weights import load_hf_weights


class WeightSender:
    """Joins the process group and builds the model of a checkpoint under a layout; `load` gives it weights.

    Args:
        model: whose config.json says what is built.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        port: int,
        model: Path,
        parallel: ParallelConfig,
        precision: Precision = Precision.fp32,
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.rank, self.hf_config, self._precision = rank, read_hf_config(model), precision
        self.family = family_of(self.hf_config)
        init_parallel(
            parallel, rank=rank, world_size=world_size, meeting=f"tcp://127.0.0.1:{port}",
            timeout_s=timeout_s, seed=0,
        )  # fmt: skip
        self._build(parallel)

    def load(self, checkpoint: Path) -> None:
        load_hf_weights(self.chunks, checkpoint, self.family, self.hf_config)

    def use_layout(self, parallel: ParallelConfig) -> None:
        """Build the model anew under another layout of the same ranks, without weights."""
        change_layout(parallel)
        self._build(parallel)

    def close(self) -> None:
        dist.destroy_process_group()

    def _build(self, parallel: ParallelConfig) -> None:
        dtype = "bfloat16" if self._precision is Precision.bf16 else "float32"
        self.chunks = build_model(
            trainer_config(parallel, self._precision), self.family.megatron_config(self.hf_config)
        )
        self.source = MegatronWeightSource(self.chunks, self.family, self.hf_config, dtype)
