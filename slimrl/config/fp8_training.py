"""FP8 training: the fields of megatron-core behind `trainer.fp8`, and what cannot go with it."""

from collections.abc import Iterator

from slimrl.config.problems import Violation
from slimrl.config.schema.precision import Fp8Scaling, Precision
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.trainer import TrainerConfig

FORMATS = {
    Fp8Scaling.blockwise: "e4m3",
    Fp8Scaling.tensorwise: "hybrid",
    Fp8Scaling.delayed: "hybrid",
    Fp8Scaling.mxfp8: "e4m3",
}
"""megatron-core's `fp8`, Transformer Engine's default for each `fp8_recipe`: `hybrid` has gradients in e5m2."""

DELAYED_FIELDS = ("fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_wgrad")
"""Fields that megatron-core passes to delayed scaling alone."""

OTHER_FIELDS = ("first_last_layers_bf16", "tp_only_amax_red")
"""Fields of FP8 training whose names do not begin with fp8_."""

NOT_EMULATED = {
    "fp8_wgrad": False,
    "fp8_dot_product_attention": True,
    "fp8_multi_head_attention": True,
    "fp8_output_proj": True,
}
"""Fields of `trainer.megatron`, and the values that change what is rounded to FP8."""


def megatron_fp8(trainer: TrainerConfig) -> dict[str, str]:
    """Fields of megatron-core's configurations.

    None with emulation: with them Megatron's own layers would look for Transformer Engine.
    """
    if trainer.fp8 is Fp8Scaling.off or trainer.fp8_emulation:
        return {}
    return {"fp8": FORMATS[trainer.fp8], "fp8_recipe": trainer.fp8.value}


def fp8_violations(recipe: Recipe) -> Iterator[Violation]:
    """Settings that contradict `trainer.fp8`, or have no effect with its value."""
    trainer, given = recipe.trainer, recipe.trainer.megatron
    if trainer.fp8 is Fp8Scaling.off:
        if trainer.fp8_emulation:
            yield "trainer.fp8_emulation", "has no effect with trainer.fp8 off. Choose blockwise, as engines have it."
        for name, value in given.items():
            if (name.startswith("fp8_") or name in OTHER_FIELDS) and value:
                yield f"trainer.megatron.{name}", "has no effect with trainer.fp8 off."
        return
    if trainer.fp8 is not Fp8Scaling.delayed:
        for name in DELAYED_FIELDS:
            if name in given:
                yield f"trainer.megatron.{name}", f"has an effect with trainer.fp8 delayed, not {trainer.fp8.value}."
    elif given.get("first_last_layers_bf16"):
        yield "trainer.megatron.first_last_layers_bf16", "megatron-core refuses it with delayed scaling. Leave it out."
    if trainer.fp8_emulation:
        yield from _emulation(recipe)
    elif trainer.precision is not Precision.bf16:
        yield (
            "trainer.fp8",
            f"FP8 needs bf16 for the other layers, not {trainer.precision.value}. Set trainer.precision to bf16.",
        )


def _emulation(recipe: Recipe) -> Iterator[Violation]:
    trainer, given = recipe.trainer, recipe.trainer.megatron
    for name, value in NOT_EMULATED.items():
        if given.get(name) is value:
            yield f"trainer.megatron.{name}", f"{str(value).lower()} is not emulated. Leave it out."
    if trainer.fp8 is Fp8Scaling.delayed and trainer.mtp.train:
        message = "with delayed scaling layers for multi-token prediction are not emulated. Use mtp.train false."
        yield "trainer.fp8_emulation", message
    if trainer.fp8 is Fp8Scaling.delayed and given.get("recompute_granularity"):
        yield (
            "trainer.fp8_emulation",
            "with delayed scaling a recomputed layer would round with later scales. Leave out "
            "trainer.megatron.recompute_granularity.",
        )
