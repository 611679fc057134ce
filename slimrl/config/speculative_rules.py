"""Rules of `rollout.speculative`: what would change the tokens that the policy samples, or cannot be updated."""

from collections.abc import Iterator

from slimrl.config.problems import Violation
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.resync import TransportName
from slimrl.config.schema.speculative import DraftMode

OF_OTHER_FILES = (DraftMode.eagle, DraftMode.eagle3)
"""Modes of speculative decoding whose draft model is a checkpoint of its own"""


def speculative_violations(recipe: Recipe) -> Iterator[Violation]:
    """What no engine does with it, whatever the command."""
    rollout = recipe.rollout
    settings, mode = rollout.speculative, rollout.speculative.mode.value
    key = "rollout.speculative.mode"
    for name in rollout.sglang:
        if name.startswith("speculative_ngram_") and settings.mode is not DraftMode.ngram:
            yield f"rollout.sglang.{name}", f"has no effect with rollout.speculative.mode {mode}, only with ngram."
        elif name.startswith("speculative_") and settings.mode is DraftMode.off:
            yield f"rollout.sglang.{name}", f"has no effect with rollout.speculative.mode {mode}."
    if settings.draft_model and settings.mode not in OF_OTHER_FILES:
        yield "rollout.speculative.draft_model", f"only the modes eagle and eagle3 read it, and the mode is {mode}."
    if settings.mode is DraftMode.off:
        return
    if settings.mode in OF_OTHER_FILES and not settings.draft_model:
        yield "rollout.speculative.draft_model", f"{mode} needs the folder of its draft model."
    if recipe.deterministic:
        yield (
            key,
            f"{mode}: what is proposed depends on the clock and on other requests. Use off, or deterministic false.",
        )
    if rollout.routed_experts:
        yield (
            key,
            f"{mode}: the experts that engines report are not known to be those of the accepted tokens. Use off, or "
            "rollout.routed_experts false.",
        )
    if settings.mode is DraftMode.ngram and rollout.engine_attention_dp > 1:
        groups = rollout.engine_attention_dp
        yield key, f"ngram: SGLang has none with rollout.engine_attention_dp {groups}. Use another mode, or 1."


def own_layer_violations(recipe: Recipe, num_layers: int) -> Iterator[Violation]:
    """Refuse `mtp` for a model that has not the one layer that SGLang drafts with.

    Args:
        num_layers: the model's layers for multi-token prediction.
    """
    if recipe.rollout.speculative.mode is not DraftMode.mtp or num_layers == 1:
        return
    found = f"{recipe.model.path} has no layers for multi-token prediction."
    if num_layers:
        found = f"SGLang drafts with one layer for multi-token prediction, and config.json has {num_layers}."
    yield "rollout.speculative.mode", f"mtp: {found} Use another mode."


def sends_drafts(recipe: Recipe) -> bool:
    """Whether a resync sends the engines' draft models the layers that they hold."""
    return recipe.rollout.speculative.mode is DraftMode.mtp and recipe.trainer.mtp.train


def draft_violations(recipe: Recipe) -> Iterator[Violation]:
    """Draft models of engines whose weights change."""
    mode, key = recipe.rollout.speculative.mode, "rollout.speculative.mode"
    if mode in (DraftMode.off, DraftMode.ngram) or sends_drafts(recipe):
        return
    if recipe.resync.transport in (TransportName.disk, TransportName.delta):
        train = ", or trainer.mtp.train true" if mode is DraftMode.mtp else ""
        yield (
            key,
            f"{mode.value}: with resync.transport {recipe.resync.transport.value} SGLang would read the draft model's "
            f"weights from the policy's version, which lacks them. Use ipc or p2p{train}, or ngram.",
        )
