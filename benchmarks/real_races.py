"""The three races of a pretrained model: what each step does, and what each side is given for it."""

import shutil
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from children_memory import INTERVAL_S, children_bytes
from race_agents import after_cold_start, write_data
from rounds import Race
from sides import NUM_RANKS, Steps
from slimrl_tools.toy.toy_tokenizer import CHAT_TEMPLATE
from step import SAMPLES

from slimrl.base.atomic import atomic_folder
from slimrl.base.jsonl import write_lines
from slimrl.observability.memory import PeakWatch

QUESTIONS = (
    "What is 17 + 25? Answer with the number alone.",
    "A box holds 12 eggs. How many eggs are in 7 boxes? Answer with the number alone.",
    "How many days are in three weeks? Answer with the number alone.",
    "Is 91 a prime number? Answer yes or no.",
    "Tom has 15 apples and gives 6 of them to his sister. How many apples does he have left? Answer in one sentence.",
    "A train travels 60 miles in an hour. How far does it travel in two and a half hours? Answer in one sentence.",
    "Which is larger, 3/4 or 2/3? Answer in one sentence.",
    "What is the greatest common divisor of 12 and 18?",
    "Spell the word 'planet' backward.",
    "A notebook costs 3 dollars and a pen costs 2 dollars. What do 4 notebooks and 5 pens cost together?",
    "How many legs do 3 chickens and 2 cows have in total?",
    "How many times does the letter r occur in the word strawberry?",
    "Write the numbers 9, 4, 17, 1 and 12 in ascending order.",
    "What is the next number in the sequence 2, 6, 18, 54?",
    "A tank holds 240 litres and loses 8 litres every hour. After how many hours is it empty? Explain each step.",
    "Anna is twice as old as Ben, and together they are 36 years old. How old is each of them? Explain each step.",
)
"""Answers to them are of a few words to several paragraphs."""
MAX_PROMPT_TOKENS = 128
"""Room for a question with the system prompt, which have at most 52 tokens, and more of a smaller vocabulary"""
FIXED_FRACTION = 3 / 8
"""Length of each answer over the limit, where all have one length: 96 of 256"""

TURNS = (1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 4, 5, 6)
LENGTHS = (1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 9, 11, 14, 19, 28, 56)
"""As those of benchmarks/race_agents.py, but with fewer tokens in the mean: of this model each takes far longer"""
MAX_TRAJECTORY_TOKENS = 768
"""Limit of a trajectory with the calculator and its prompt; 99 of 100 demonstrations have fewer"""
SFT_UPDATES, SFT_CONVERSATIONS = 24, 400
LONGEST_DEMONSTRATION = 1024
SFT = (
    f"sft.max_tokens={LONGEST_DEMONSTRATION}",
    "sft.batch_conversations=8",
    f"trainer.max_tokens_per_rank={LONGEST_DEMONSTRATION}",
    "trainer.optimizer.lr=3e-4",
    "trainer.optimizer.min_lr=3e-5",
    "checkpoint.every_steps=6",
)

LEARNING_RATE = 1e-7
"""It leaves the model what it is, so that answers keep their lengths."""
MICRO_BATCH, MICRO_BATCH_OF_TURNS = 4, 2
"""Trajectories that a rank of TRL trains on at once, without and with the calculator: fewer than 2,000 tokens, padding
included, whose activations are in memory together"""
SLIMRL = (
    "reward.function=step:counted_reward",
    f"rollout.samples_per_prompt={SAMPLES}",
    # About as many as TRL's micro-batch.
    "trainer.max_tokens_per_rank=1024",
    f"trainer.optimizer.lr={LEARNING_RATE}",
    "trainer.optimizer.min_lr=0",
)
HALF_AT_A_TIME = "rollout.max_concurrency_per_engine=32"
"""With 64, 24 GiB were not enough to write the checkpoint at the end of race a."""
COMPILED: Mapping[str, Any] = {"config": {"cache_implementation": "static"}, "compile": {"mode": "default"}}
"""TRL's generation with a static cache, which can be compiled"""
PAGE_TOKENS, RUNNING, BATCH_TOKENS = 32, 16, 256
"""Continuous batching of transformers. Tokens of a page of its cache, of which a prompt fills one that its samples
share; trajectories of a process at a time, few, since each token is multiplied with the keys of all of them; and tokens
of a batch."""


@dataclass(frozen=True, kw_only=True)
class WatchedRace(Race):
    """A race whose steps also have `peak_bytes` of the run, of all processes of a side, and on slimrl's side the
    `sequence_tokens` that TRL's have."""

    def run_trl(self, python: Path, repeats: int, changes: Sequence[str]) -> Steps:
        with PeakWatch(children_bytes, INTERVAL_S) as memory:
            steps = super().run_trl(python, repeats, changes)
        return [{**step, "peak_bytes": memory.peak_bytes} for step in steps]

    def run_slimrl(self, repeats: int, changes: Sequence[str]) -> Steps:
        with PeakWatch(children_bytes, INTERVAL_S) as memory:
            steps = super().run_slimrl(repeats, changes)
        return [
            {
                **step,
                "sequence_tokens": step["rollout/trajectories"] * step["reward/parts/tokens"],
                "peak_bytes": memory.peak_bytes,
            }
            for step in steps
        ]


def free_answers(options: Namespace) -> WatchedRace:
    """Answers as they come, up to the limit."""
    return _answers(options, options.max_new_tokens, fixed=False)


def fixed_answers(options: Namespace) -> WatchedRace:
    """Answers of one length."""
    return _answers(options, round(FIXED_FRACTION * options.max_new_tokens), fixed=True)


def _answers(options: Namespace, new_tokens: int, *, fixed: bool) -> WatchedRace:
    data = options.folder / f"questions{options.prompts}"
    if not data.is_dir():
        with atomic_folder(data) as partial:
            lines = ({"prompt": text, "label": None} for text in QUESTIONS[: options.prompts])
            write_lines(partial / "train.jsonl", lines)
    slimrl = (
        "agent.tools=[]",
        f"rollout.sampling.max_new_tokens={new_tokens}",
        f"rollout.sampling.ignore_end_of_turn={str(fixed).lower()}",
        f"rollout.max_trajectory_tokens={MAX_PROMPT_TOKENS + new_tokens}",
        *(() if fixed else (HALF_AT_A_TIME,)),
    )
    trajectories = options.prompts * SAMPLES
    # Continuous batching heeds no least length.
    generation = COMPILED if fixed else {"config": continuous_batching(MAX_PROMPT_TOKENS + new_tokens)}
    trl: dict[str, Any] = {"max_completion_length": new_tokens}
    if fixed:
        trl["generation_kwargs"] = {"min_new_tokens": new_tokens}
    return WatchedRace(
        model=options.model,
        prompts=data / "train.jsonl",
        slimrl=[*SLIMRL, f"rollout.prompts_per_step={options.prompts}", *slimrl],
        trl={**generation, "config": {**generation["config"], **_batch(options.prompts, MICRO_BATCH), **trl}},
        tools=False,
        tokens=trajectories * new_tokens if fixed else None,
        turns=trajectories,
        tolerance=0 if fixed else options.tolerance,
        warmup=1,
    )


def with_calculator(options: Namespace) -> WatchedRace:
    """Trajectories of several turns; the model after its cold start is made unless it is there."""
    folder = options.folder / f"calculator{options.prompts}"
    if not (folder / "data").is_dir():
        write_data(folder / "data", TURNS, LENGTHS, prompts=options.prompts, conversations=SFT_CONVERSATIONS)
    if not (folder / "start").is_dir():
        write_model_with_tools(options.model, folder / "start")
    slimrl = (
        f"rollout.max_turns={max(TURNS)}",
        HALF_AT_A_TIME,
        f"rollout.max_trajectory_tokens={MAX_TRAJECTORY_TOKENS}",
        f"rollout.sampling.max_new_tokens={options.max_new_tokens}",
        "rollout.sampling.ignore_end_of_turn=false",
        # TRL's turns end there too.
        "rollout.stop_at_tool_call=false",
    )
    trl = {
        "max_completion_length": MAX_TRAJECTORY_TOKENS,
        "generation_kwargs": {"max_new_tokens": options.max_new_tokens},
        "max_tool_calling_iterations": max(TURNS) - 1,
    }
    # TRL looks at the limit of a trajectory before a turn, which then goes on to its own.
    generation = continuous_batching(MAX_TRAJECTORY_TOKENS + options.max_new_tokens)
    return WatchedRace(
        model=after_cold_start(folder, folder / "start", options.sft_updates, SFT),
        prompts=folder / "data" / "train.jsonl",
        slimrl=[*SLIMRL, f"rollout.prompts_per_step={options.prompts}", *slimrl],
        trl={"config": {**generation, **_batch(options.prompts, MICRO_BATCH_OF_TURNS), **trl}},
        tools=True,
        tokens=None,
        turns=None,
        tolerance=options.tolerance,
        warmup=1,
    )


def continuous_batching(max_tokens: int) -> Mapping[str, Any]:
    """TRL's words for generation in which a finished trajectory leaves the batch and another one takes its place.

    Args:
        max_tokens: of a trajectory with its prompt.
    """
    return {
        "use_transformers_continuous_batching": True,
        "transformers_continuous_batching_config": {
            "page_size": PAGE_TOKENS,
            # Left to itself, the cache takes most of the memory, and a batch a mask of gigabytes.
            "num_blocks": RUNNING * -(-max_tokens // PAGE_TOKENS),
            "max_requests_per_batch": RUNNING,
            "max_batch_tokens": BATCH_TOKENS,
        },
    }


def _batch(prompts: int, micro_batch: int) -> Mapping[str, Any]:
    """TRL's words for the batch of a step in micro-batches of so many trajectories, which divide SAMPLES."""
    return {
        "learning_rate": LEARNING_RATE,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": prompts * SAMPLES // NUM_RANKS // micro_batch,
    }


def write_model_with_tools(model: Path, out: Path) -> None:
    """A copy of a model with <|im_start|> and <|im_end|> around turns, whose template shows tools as the toy's does."""
    with atomic_folder(out) as partial:
        shutil.copytree(model, partial, dirs_exist_ok=True)
        (partial / "chat_template.jinja").write_text(CHAT_TEMPLATE.strip())
