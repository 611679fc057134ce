"""Supervised training on conversations: the loss is on the assistant's messages, tool calls included.

Each step takes the next conversations, packs them for the data-parallel ranks and runs one optimizer update.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from slimrl.agent.call_schemas import refuse_wrong_calls
from slimrl.agent.chat.chat_format import ChatFormat
from slimrl.algorithms.objective import cross_entropy
from slimrl.base.rows import BrokenRows
from slimrl.config.load import LoadedRecipe
from slimrl.config.problem_collector import ProblemCollector
from slimrl.config.problems import RecipeError
from slimrl.config.schema.recipe import Recipe
from slimrl.data.packing import pack_for
from slimrl.data.prompts import read_conversations
from slimrl.data.trajectory import Segment
from slimrl.rollout.task.dialogue import load_chat_format
from slimrl.runtime.cluster.rank_batches import RankBatches
from slimrl.runtime.not_finite import Owner, SkippedUpdates, Work
from slimrl.runtime.run import Run
from slimrl.runtime.step_metrics import Step, update_metrics


@dataclass(frozen=True, kw_only=True, eq=False)
class Example:
    """What an update learns from a conversation, or from a part of it."""

    segment: Segment
    source: str
    """Place of the conversation, `file:line`"""


def read_examples(loaded: LoadedRecipe) -> dict[str, list[Example]]:
    """The conversations of each training file as tokens with loss masks; several examples of one that the chat template
    rewrites as it goes on.

    Raises:
        RecipeError: the file, some of its lines or the tokenizer are broken, or conversations are longer than
            `sft.max_tokens`; names the lines.
    """
    data, chat = loaded.recipe.data, load_chat_format(loaded)
    collector = ProblemCollector(loaded)
    examples = {
        name: collector.get(data.train_key(name), partial(_read_file, Path(path), loaded.recipe, chat)) or []
        for name, path in data.train_files.items()
    }
    if collector.problems:
        raise RecipeError(collector.problems)
    return examples


def _read_file(path: Path, recipe: Recipe, chat: ChatFormat) -> list[Example]:
    """Raises ValueError: see read_examples."""
    examples, problems = [], []
    for conversation in read_conversations(path, recipe.data.keys):
        try:
            refuse_wrong_calls(conversation.messages, conversation.tools)
            sequences = chat.training_sequences(conversation.messages, conversation.tools)
        except ValueError as error:
            problems.append(f"{conversation.source}: {error}")
            continue
        longest = max(len(tokens) for tokens, _ in sequences)
        if longest > recipe.sft.max_tokens:
            problems.append(f"{conversation.source}: {longest} tokens, sft.max_tokens is {recipe.sft.max_tokens}")
        segments = [Segment.not_sampled(tokens, mask) for tokens, mask in sequences]
        examples += [Example(segment=segment, source=conversation.source) for segment in segments]
    if problems:
        raise BrokenRows(problems)
    return examples


def update(step: Step, examples: Sequence[Example], run: Run) -> None:
    """Do one optimizer update on these conversations.

    Raises:
        NotFinite: as SkippedUpdates.count.
    """
    recipe, trainers, state = run.recipe, run.trainers, run.state
    segments = [example.segment for example in examples]
    batch = pack_for(recipe.trainer, trainers.layout, [segments], np.zeros(1, np.float32))
    num_targets = sum(int(m.mask.sum()) for part in batch for m in part)
    work = Work(
        number=0,
        batch=batch,
        owners=[Owner(name=example.source, item=example.source) for example in examples],
        loss=cross_entropy,
        denominator=num_targets,
        temperature=1.0,
        noun="conversations",
    )
    trainers.put_batches([batch])
    trainers.call(RankBatches.accumulate, 0, work.loss, denominator=work.denominator, temperature=work.temperature)
    result = trainers.call(RankBatches.step)
    skipped = SkippedUpdates(trainers, state, recipe.trainer.max_skipped_updates, run.progress.say)
    skipped.count(result, step.number, "update", work)
    skipped.check_weights(step.number)
    step.count_experts([result])
    step.record(
        {
            **update_metrics([result]),
            "sft/loss": result.sums["loss"] / num_targets,
            "sft/tokens": result.num_tokens,
            "train/skipped_steps": state.skipped_steps,
        }
    )
