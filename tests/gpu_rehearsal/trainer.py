"""A trainer rank's start, up to what needs a device: megatron-core's settings, and its modules on the meta device."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gpu_rehearsal.recipe import environment
from slimrl.config.env_vars import trainer_variables
from slimrl.config.schema.trainer import TrainerConfig
from slimrl.models.family import family_of
from slimrl.models.megatron_config import MegatronModelConfig
from slimrl.models.offline_recipe import OfflineRecipe


def rehearse_trainer(planned: OfflineRecipe, hf_config: dict[str, Any]) -> dict[str, Any]:
    """What megatron-core builds of Transformer Engine's modules, on the first and the last pipeline stage.

    Raises what either of them raises.
    """
    import megatron_patches

    megatron_patches.apply()
    from slimrl.trainer import build

    _stay_off_the_device()
    trainer, model = planned.recipe.trainer, family_of(hf_config).megatron_config(hf_config)
    build.check_kernels(trainer)
    with environment({**trainer_variables(planned.recipe, {}), **trainer.env}):
        built = [_stage(trainer, model, stage) for stage in sorted({0, trainer.parallel.pipeline - 1})]
    return {"modules": sorted(set().union(*(kinds for kinds, _ in built))), "fp8_copies": [left for _, left in built]}


def _stay_off_the_device() -> None:
    """Random states and streams are the CPU's."""
    from megatron_patches import cuda_calls, rng

    for patch in (cuda_calls.replace_torch_cuda, cuda_calls.make_cuda_moves_identity, rng.track_the_cpu_generator):
        if patch.__name__ not in _done:
            patch()
            _done.add(patch.__name__)


_done: set[str] = set()


class _OnMeta(TorchFunctionMode):
    """What is made on the GPU by name is made on the meta device; host memory is not pinned, which a GPU would do."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        moved = {name: _meta_for_cuda(value) for name, value in (kwargs or {}).items()}
        moved.pop("pin_memory", None)
        return function(*map(_meta_for_cuda, args), **moved)


def _meta_for_cuda(value: Any) -> Any:
    """A device that is a GPU, or its name, replaced by the meta device."""
    return "meta" if isinstance(value, torch.device | str) and str(value).startswith("cuda") else value


def _stage(trainer: TrainerConfig, model: MegatronModelConfig, stage: int) -> tuple[set[str], tuple[int, int]]:
    """Classes of a rank's leaf modules; how many keep copies in FP8, before and after they are to be forgotten."""
    from slimrl.trainer import build, offload, optimizer
    from slimrl.trainer.layout.fake_world import fake_world

    parallel = trainer.parallel
    rank = stage * (trainer.num_ranks // parallel.pipeline)
    with fake_world(parallel, rank=rank, world_size=trainer.num_ranks), _OnMeta():
        config = build.transformer_config(trainer, model, mtp=trainer.mtp.train)
        config.init_model_with_meta_device = True  # Else Transformer Engine would allocate on the device.
        build.ddp_config(trainer)
        optimizer._optimizer_config(trainer)
        chunks = [build._gpt(parallel, model, config, index) for index in range(parallel.virtual_pipeline or 1)]
    modules = [module for chunk in chunks for module in chunk.modules()]
    kinds = {type(module).__name__ for module in modules if next(module.children(), None) is None}
    copies = [module._fp8_workspaces for module in modules if hasattr(module, "_fp8_workspaces")]
    for kept in copies:
        kept["weight"] = torch.empty(1)
    full = sum(map(bool, copies))
    offload.forget_quantized_weights(chunks)
    return kinds, (full, sum(map(bool, copies)))
