"""The optimizer of one trainer rank: Megatron's Adam, sharded or not, its learning-rate schedule, and one safe step."""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import GRAD_NORM_GROUP_ATTR, MTP_GRAD_NORM_GROUP
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import get_model_config
from torch import Tensor

from slimrl import device
from slimrl.config.fp8_training import megatron_fp8
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.trainer import TrainerConfig
from slimrl.trainer.passthrough import fields_for


class Optimizer:
    """Megatron's optimizer and schedule over this rank's model chunks."""

    def __init__(self, trainer: TrainerConfig, chunks: list[DistributedDataParallel], total_updates: int) -> None:
        """
        Args:
            total_updates: when the linear and cosine schedules reach `min_lr`.
        """
        self.clip_grad = trainer.optimizer.clip_grad
        self.megatron: MegatronOptimizer = get_megatron_optimizer(_optimizer_config(trainer), chunks)
        for part in self._parts():
            if isinstance(part.optimizer, HybridDeviceOptimizer):
                # Its main weights are reachable only through its state, so create that at once.
                part.optimizer.dummy_step()
        self.scheduler = build_scheduler(trainer, self.megatron, total_updates)
        self.has_mtp = bool(get_model_config(chunks[0]).mtp_num_layers)
        self.mtp_grad_norm = 0.0
        """Gradient norm of the layers for multi-token prediction at the last update, before clipping"""
        get_model_config(chunks[0]).grad_scale_func = self.megatron.scale_loss

    @property
    def lr(self) -> float:
        """Learning rate of the last update; before the first update that of update 0."""
        return float(self.megatron.param_groups[0]["lr"])

    def step(self, *, finite: bool = True) -> float:
        """Do one update with the current gradients; returns their global L2 norm before clipping.

        The gradients of layers for multi-token prediction have a norm of their own, by which they are clipped.

        If it is NaN or infinite, the update was skipped: parameters, optimizer state and schedule are unchanged. The
        schedule advances before the update, so the first update of a warm-up has a rate above 0.

        Args:
            finite: False to skip the update whatever the gradients; on one rank is enough.
        """
        grad_norm = self.gradient_norm(finite=finite)
        if not math.isfinite(grad_norm):
            return grad_norm
        self.scheduler.step(1)
        if self.clip_grad > 0:
            for part in self._parts():
                decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
                own, mtp = _split_mtp(part.get_parameters())
                for parameters, norm in ((own, grad_norm), (mtp, self.mtp_grad_norm)):
                    if parameters:
                        clip_grad_by_total_norm_fp32(parameters, self.clip_grad, norm, decoupled)
        self.megatron.step_with_ready_grads()
        return grad_norm

    def gradient_norm(self, *, finite: bool = True) -> float:
        """The global L2 norm of the current gradients before clipping, ready for the update.

        NaN or infinite on every rank if a gradient is on any, or if one says that it is not `finite`.
        """
        overflow = self.megatron.prepare_grads()
        grad_norm = float(self.megatron.get_grad_norm())
        self.mtp_grad_norm = self._mtp_grad_norm()
        finite = finite and math.isfinite(grad_norm) and math.isfinite(self.mtp_grad_norm)
        # All must skip together, or the next collective hangs.
        if not _everywhere(finite and not overflow):
            return math.inf if math.isfinite(grad_norm) else grad_norm
        return grad_norm

    def create_state(self) -> None:
        """Create the zero moments of an optimizer without updates, so that it can be saved.

        Torch's Adam has a step for each parameter, which Megatron's initialisation leaves out.
        """
        for part in self._parts():
            if isinstance(part.optimizer, HybridDeviceOptimizer):
                continue
            part.init_state_fn(part.optimizer, part.config)
        for part in self._torch_adams():
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    part.optimizer.state[parameter].setdefault("step", torch.tensor(0.0))

    def is_on_all_ranks(self) -> bool:
        """Whether every rank has states of each of its buckets, on its device; every rank calls it, and gets the same.

        Megatron can neither save an empty bucket as it is, nor load an offloaded optimizer that was saved so.
        """
        return _everywhere(
            all(
                not isinstance(part.optimizer, HybridDeviceOptimizer)
                and all(bucket["param_map"] for ranges in part.gbuf_ranges for of in ranges.values() for bucket in of)
                for part in self._parts()
                if isinstance(part, DistributedOptimizer)
            )
        )

    def tensors(self) -> Iterator[Tensor]:
        """The current parameters, which are main weights or views of the model's, and moments."""
        for part in self._parts():
            for group in part.optimizer.param_groups:
                yield from group["params"]
            for state in part.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))

    def load_state_dict(self, saved: dict[Any, Any], schedule: dict[str, Any]) -> None:
        """Load main weights, moments and the number of updates; learning rates follow this run's settings.

        Megatron matches saved parameter groups by their learning rates, so these are set to this run's first.
        """
        for group in _saved_groups(saved):
            group["max_lr"], group["min_lr"] = self.scheduler.max_lr, self.scheduler.min_lr
        # Those that each rank wrote as it had them (BY_RANK in checkpoint.py) are loaded into views of the weights, and
        # lack the steps of torch's Adam.
        with torch.no_grad():
            self.megatron.load_state_dict(saved)
            for part in self._torch_adams():
                for group in part.optimizer.param_groups:
                    for parameter in group["params"]:
                        if "step" in group:
                            part.optimizer.state[parameter]["step"].fill_(group["step"])
        self.scheduler.num_steps = 0
        self.scheduler.load_state_dict(schedule)

    def _mtp_grad_norm(self) -> float:
        """Gradient norm of the layers for multi-token prediction, which Megatron leaves out of its own; 0 without such
        layers."""
        if not self.has_mtp:
            return 0.0
        parts = getattr(self.megatron, "chained_optimizers", [self.megatron])
        norms = [
            get_grad_norm_fp32(
                part.get_grads_for_grad_norm(MTP_GRAD_NORM_GROUP),
                grad_stats_parallel_group=part.get_grad_stats_parallel_group(),
            )
            for part in parts
        ]
        return math.hypot(*map(float, norms))

    def _torch_adams(self) -> list[Any]:
        """Megatron's optimizers that have torch's, with a step for each parameter."""
        return [part for part in self._parts() if isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW)]

    def _parts(self) -> list[Any]:
        """Megatron's optimizers of dense and of expert parameters, without those that are empty on this rank."""
        parts = getattr(self.megatron, "chained_optimizers", [self.megatron])
        return [part for part in parts if not part.is_stub_optimizer]


def _saved_groups(saved: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    """Parameter groups of one of Megatron's optimizers, or of several that are saved by number."""
    if "param_groups" in saved:
        yield from saved["param_groups"]
    else:
        parts = [saved["optimizer"]] if "optimizer" in saved else saved.values()
        yield from (group for part in parts for group in _saved_groups(part))


def _split_mtp(parameters: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """(those of the model's own layers, those of layers for multi-token prediction)"""
    is_mtp = [getattr(parameter, GRAD_NORM_GROUP_ATTR, None) == MTP_GRAD_NORM_GROUP for parameter in parameters]
    split = [[p for p, mtp in zip(parameters, is_mtp, strict=True) if mtp is wanted] for wanted in (False, True)]
    return split[0], split[1]


def build_scheduler(
    trainer: TrainerConfig, optimizer: MegatronOptimizer, total_updates: int
) -> OptimizerParamScheduler:
    """The learning rate by number of updates: warm-up from 0, then constant, linear or cosine."""
    settings = trainer.optimizer
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_updates,
        lr_decay_steps=max(total_updates, settings.warmup_updates + 1),
        lr_decay_style=settings.schedule.value,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        # A resumed run follows its recipe; the checkpoint only gives the number of updates.
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
        "fp8_recipe": megatron_fp8(trainer).get("fp8_recipe"),
        "bf16": bf16,
        "params_dtype": torch.bfloat16 if bf16 else torch.float32,
    }
    return OptimizerConfig(**{**ours, **fields_for(OptimizerConfig, trainer.megatron)})


def _everywhere(holds: bool) -> bool:
    """Whether it holds on all ranks."""
    flag = torch.tensor([float(holds)], device=device.compute_device())
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())
