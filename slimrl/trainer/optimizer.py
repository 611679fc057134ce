"""The optimizer of one trainer rank: Megatron's Adam, sharded or not, its learning-rate schedule, and one safe step."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import get_model_config
from torch import Tensor

from slimrl import device
from slimrl.config.schema import Precision, TrainerConfig
from slimrl.trainer.passthrough import fields_for


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What one optimizer step did."""

    grad_norm: float
    """Global L2 norm before clipping; NaN or infinite if the step was skipped."""
    skipped: bool


class Optimizer:
    """Megatron's optimizer and schedule over this rank's model chunks."""

    def __init__(self, trainer: TrainerConfig, chunks: list[DistributedDataParallel], total_updates: int) -> None:
        """
        Args:
            total_updates: at which the linear and cosine schedules reach `min_lr`.

        Raises:
            ValueError: the warm-up is as long as the whole schedule.
        """
        self.clip_grad = trainer.optimizer.clip_grad
        self.megatron: MegatronOptimizer = get_megatron_optimizer(_optimizer_config(trainer), chunks)
        for part in self._parts():
            if isinstance(part.optimizer, HybridDeviceOptimizer):
                # Its main weights are to be found through its state alone, so it has one from the start.
                part.optimizer.dummy_step()
        self.scheduler = build_scheduler(trainer, self.megatron, total_updates)
        get_model_config(chunks[0]).grad_scale_func = self.megatron.scale_loss

    @property
    def lr(self) -> float:
        """Learning rate of the last update, or before the first one of update 0."""
        return float(self.megatron.param_groups[0]["lr"])

    def zero_grad(self) -> None:
        self.megatron.zero_grad()

    def step(self) -> StepOutcome:
        """One update from the gradients that lie ready.

        If their global norm is not finite, parameters, optimizer state and schedule stay as they are. The schedule
        moves on before the update, so that the first update of a warm-up has a rate above 0.
        """
        overflow = self.megatron.prepare_grads()
        grad_norm = float(self.megatron.get_grad_norm())
        if not _finite_everywhere(math.isfinite(grad_norm) and not overflow):
            return StepOutcome(grad_norm=grad_norm if not math.isfinite(grad_norm) else math.inf, skipped=True)
        self.scheduler.step(1)
        if self.clip_grad > 0:
            self._clip(grad_norm)
        self.megatron.step_with_ready_grads()
        return StepOutcome(grad_norm=grad_norm, skipped=False)

    def create_state(self) -> None:
        """Give an optimizer that made no update yet the zero moments that it would start from, so that it can be saved.

        Torch's Adam keeps a step with each parameter, which Megatron's own initialisation leaves out.
        """
        for part in self._parts():
            if isinstance(part.optimizer, HybridDeviceOptimizer):
                continue
            part.init_state_fn(part.optimizer, part.config)
            if isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW):
                for group in part.optimizer.param_groups:
                    for parameter in group["params"]:
                        part.optimizer.state[parameter].setdefault("step", torch.tensor(0.0))

    def tensors(self) -> Iterator[Tensor]:
        """Parameters, which are main weights or views of the model's, and moments; as they are at this moment."""
        for part in self._parts():
            for group in part.optimizer.param_groups:
                yield from group["params"]
            for state in part.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))

    def resume_schedule(self, saved: dict[str, Any]) -> None:
        """Take over the number of updates from a saved schedule; rates follow this run's own settings."""
        for group in self.megatron.param_groups:
            group["max_lr"], group["min_lr"] = self.scheduler.max_lr, self.scheduler.min_lr
        self.scheduler.num_steps = 0
        self.scheduler.load_state_dict(saved)

    def _clip(self, grad_norm: float) -> None:
        for part in self._parts():
            decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            clip_grad_by_total_norm_fp32(part.get_parameters(), self.clip_grad, grad_norm, decoupled)

    def _parts(self) -> list[Any]:
        """Megatron's optimizers of dense and of expert parameters; those that hold nothing on this rank left out."""
        parts = getattr(self.megatron, "chained_optimizers", [self.megatron])
        return [part for part in parts if not part.is_stub_optimizer]


def build_scheduler(
    trainer: TrainerConfig, optimizer: MegatronOptimizer, total_updates: int
) -> OptimizerParamScheduler:
    """The learning rate by number of updates: warm-up from 0, then constant, linear or cosine.

    Raises:
        ValueError: the warm-up is as long as the whole schedule.
    """
    settings = trainer.optimizer
    if settings.schedule.value != "constant" and settings.warmup_steps >= total_updates:
        raise ValueError(
            f"trainer.optimizer.warmup_steps: {settings.warmup_steps} updates of warm-up leave none of the "
            f"{total_updates} updates of the run for the {settings.schedule.value} schedule"
        )
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=max(total_updates, settings.warmup_steps + 1),
        lr_decay_style=settings.schedule.value,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        # A resumed run follows its recipe, and takes from the checkpoint only how far it has come.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def _optimizer_config(trainer: TrainerConfig) -> OptimizerConfig:
    settings = trainer.optimizer
    bf16 = trainer.precision == Precision.bf16
    ours = {
        "optimizer": "adam",
        "lr": settings.lr,
        "min_lr": settings.min_lr,
        "weight_decay": settings.weight_decay,
        "adam_beta1": settings.beta1,
        "adam_beta2": settings.beta2,
        "adam_eps": settings.eps,
        "clip_grad": settings.clip_grad,
        "use_distributed_optimizer": settings.distributed,
        "bf16": bf16,
        "params_dtype": torch.bfloat16 if bf16 else torch.float32,
    }
    return OptimizerConfig(**{**ours, **fields_for(OptimizerConfig, trainer.megatron)})


def _finite_everywhere(finite: bool) -> bool:
    """All ranks must skip together, or the next collective hangs."""
    flag = torch.tensor([float(finite)], device=device.compute_device())
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())
