"""Supervised training on conversations: the loss is on what the assistant writes, tool calls included.

Each step takes the next conversations, packs them over the data-parallel ranks and makes one optimizer update.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from slimrl.config.load import LoadedRecipe
from slimrl.config.problems import Problem, RecipeError
from slimrl.config.schema import Recipe
from slimrl.data.jsonl import summary
from slimrl.data.packing import PackedSequence, pack
from slimrl.data.prompts import Sampler, read_conversations
from slimrl.observability.progress import Progress
from slimrl.observability.run_folder import RunFolder
from slimrl.observability.trackers import Trackers
from slimrl.runtime.learner import count_skipped
from slimrl.runtime.preemption import Preemption
from slimrl.runtime.state import CheckpointFolder, RunState
from slimrl.runtime.step import Step, update_metrics
from slimrl.runtime.task import load_chat_format
from slimrl.runtime.trainer_group import TrainerGroup


def read_examples(loaded: LoadedRecipe) -> list[PackedSequence]:
    """The conversations of `data.train` as token ids with their loss masks.

    Raises:
        RecipeError: the file, lines of it or the tokenizer are broken, or conversations are longer than
            `sft.max_tokens`; names the lines.
    """
    recipe = loaded.recipe
    try:
        chat = load_chat_format(Path(recipe.model.path))
    except ValueError as error:
        raise _refusal(loaded, "model.path", str(error)) from error
    try:
        conversations = read_conversations(Path(recipe.data.train))
    except ValueError as error:
        raise _refusal(loaded, "data.train", str(error)) from error
    examples, problems = [], []
    for conversation in conversations:
        try:
            tokens, mask = chat.conversation_tokens(conversation.messages, conversation.tools)
        except ValueError as error:
            problems.append(f"{conversation.source}: {error}")
            continue
        if len(tokens) > recipe.sft.max_tokens:
            problems.append(f"{conversation.source}: {len(tokens)} tokens, sft.max_tokens is {recipe.sft.max_tokens}")
        examples.append(
            PackedSequence(
                tokens=np.array(tokens, np.int32),
                loss_mask=np.array(mask, np.bool_),
                rollout_logprobs=np.zeros(len(tokens), np.float32),
                trajectory=0,
            )
        )
    if problems:
        raise _refusal(loaded, "data.train", summary(problems))
    return examples


def sft_loop(
    recipe: Recipe,
    examples: Sampler[PackedSequence],
    trainers: TrainerGroup,
    folder: RunFolder,
    trackers: Trackers,
    progress: Progress,
    state: RunState,
    preemption: Preemption,
) -> None:
    """Steps until the recipe's number is reached, then the export; or until the run has to make room."""
    checkpoints = CheckpointFolder(folder.checkpoints)
    every = recipe.checkpoint.every_steps
    while state.step < recipe.steps and not preemption.asked:
        step = Step(state.step + 1)
        with step.timed("train"):
            _update(recipe, examples.take(recipe.sft.batch_conversations), trainers, state, step)
        state.step, state.cursor = step.number, examples.state()
        step.close()
        trackers.log(step.number, step.metrics)
        if step.number % recipe.sft.summary_every_steps == 0 or step.number in (1, recipe.steps):
            progress.summary(step.number, step.metrics)
        if state.step == recipe.steps or preemption.asked or (every > 0 and state.step % every == 0):
            checkpoints.save(state, recipe.checkpoint.keep, trainers.save_checkpoint)
            folder.note_checkpoint(state.step)
    if state.step < recipe.steps:
        return
    trainers.export_hf(folder.fresh_export())
    progress.say(f"model: {folder.export}")


def _update(
    recipe: Recipe, examples: Sequence[PackedSequence], trainers: TrainerGroup, state: RunState, step: Step
) -> None:
    layout = trainers.layout
    batch = pack(
        examples,
        np.zeros(1, np.float32),
        budget_tokens=recipe.trainer.max_tokens_per_rank * recipe.trainer.parallel.context,
        alignment=layout.alignment,
        data_parallel=layout.data,
        micro_batch_multiple=layout.micro_batch_multiple,
    )
    num_targets = sum(int(m.mask.sum()) for part in batch for m in part)
    result = trainers.train_update(batch, "sft", denominator=num_targets, temperature=1.0)
    count_skipped(state, result, recipe.trainer.max_skipped_steps)
    step.record(
        {
            **update_metrics([result]),
            "sft/loss": result.sums["loss"] / num_targets,
            "sft/tokens": result.num_tokens,
            "train/skipped_steps": state.skipped_steps,
        }
    )


def _refusal(loaded: LoadedRecipe, key: str, message: str) -> RecipeError:
    return RecipeError([Problem(key=key, message=message, where=loaded.provenance.get(key, ""))])
