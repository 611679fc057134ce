"""A GSPO step of slimrl beside one of TRL with a tool: trajectories with a heavy tail of turns and tokens.

1. A cold start teaches the model of benchmarks/race.py to answer a question in 1 to 6 turns: a turn counts down from a
   number, then calls the calculator; the last one answers. The number of turns and the numbers to count from are drawn
   from TURNS and LENGTHS, for each turn anew, so that the model draws them from there too.
2. From then on the model decides how long a turn is and whether it calls the tool, on both sides alike: all text is
   sampled, parsed and answered by the same tool.
3. Each side samples 16 questions x 8 and trains on them, at a learning rate that leaves the model what it is.

A side whose steps have other means of tokens and turns than the demonstrations ends the benchmark.
"""

import random
import statistics
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rounds import Race, main_of, parser_of
from sides import slimrl
from slimrl_tools.toy.task_lines import asked, call
from slimrl_tools.toy.toy import ToySize, write_toy
from slimrl_tools.toy.toy_tokenizer import build_tokenizer
from step import PROMPTS, RECIPE, SAMPLES

from slimrl.agent.calculator import calculator
from slimrl.agent.chat.chat_format import ChatFormat
from slimrl.agent.chat.template import ChatTemplate
from slimrl.agent.tools import make_tool
from slimrl.base.atomic import atomic_folder
from slimrl.base.jsonl import write_lines

TURNS = (1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6)
LENGTHS = (1, 2, 2, 3, 4, 5, 6, 7, 9, 11, 13, 16, 20, 27, 39, 75)
"""Sixteenths of a lognormal distribution with the median 8 and a deviation of the logarithm of 1.2"""
MAX_TURNS = max(TURNS)
MAX_NEW_TOKENS, MAX_TRAJECTORY_TOKENS = 320, 2048
"""Token limits of a turn, and of a trajectory with its prompt; the longest demonstration has fewer"""
SFT_UPDATES, SFT_CONVERSATIONS = 500, 8000
LEARNING_RATE = 1e-7
SLIMRL = (
    f"rollout.max_turns={MAX_TURNS}",
    f"rollout.max_trajectory_tokens={MAX_TRAJECTORY_TOKENS}",
    f"rollout.sampling.max_new_tokens={MAX_NEW_TOKENS}",
    "rollout.sampling.ignore_end_of_turn=false",
    # TRL's turns end there too.
    "rollout.stop_at_tool_call=false",
    f"trainer.optimizer.lr={LEARNING_RATE}",
    "trainer.optimizer.min_lr=0",
)
TRL = {
    "config": {
        "max_completion_length": MAX_TRAJECTORY_TOKENS,
        "generation_kwargs": {"max_new_tokens": MAX_NEW_TOKENS},
        "max_tool_calling_iterations": MAX_TURNS - 1,
        "learning_rate": LEARNING_RATE,
    },
}
TOOLS = [make_tool(calculator).schema]
Conversation = list[dict[str, Any]]


def conversation(rng: random.Random, lengths: Sequence[int]) -> Conversation:
    """A random product, and what the model is to say to it in turns of these lengths, with the tool's answers."""
    expression = f"{rng.randint(12, 99)}*{rng.randint(12, 99)}"
    value = calculator(expression)
    messages = asked(f"Compute {expression}.")
    for left, length in zip(range(len(lengths), 0, -1), lengths, strict=True):
        text = f"{left}: {' '.join(map(str, range(length, 0, -1)))}"
        if left > 1:
            messages.append({**call("calculator", expression=expression), "content": text})
            messages.append({"role": "tool", "content": value})
        else:
            messages.append({"role": "assistant", "content": f"{text} {expression} = \\boxed{{{value}}}."})
    return messages


def write_data(out: Path, turns: Sequence[int], lengths: Sequence[int], *, prompts: int, conversations: int) -> None:
    """`train.jsonl`, the questions, and `sft.jsonl`, the demonstrations: the number of turns of each is drawn from
    `turns`, the length of each turn from `lengths`."""
    rng = random.Random(0)
    drawn = ([rng.choice(lengths) for _ in range(rng.choice(turns))] for _ in range(conversations))
    demonstrations = ({"messages": conversation(rng, each), "tools": TOOLS} for each in drawn)
    questions = [conversation(rng, [1])[1]["content"] for _ in range(prompts)]
    with atomic_folder(out) as partial:
        write_lines(partial / "train.jsonl", ({"prompt": text, "label": None} for text in questions))
        write_lines(partial / "sft.jsonl", demonstrations)


def mean_tokens() -> float:
    """Expected tokens of the model in a demonstration, those that end its turns included."""
    tokenizer = build_tokenizer()
    chat = ChatFormat(ChatTemplate(tokenizer), [tokenizer.eos_token_id])

    def mean(turns: int) -> float:
        shown = (conversation(random.Random(0), [length] * turns) for length in LENGTHS)
        sequences = (chat.training_sequences(messages, TOOLS) for messages in shown)
        return statistics.mean(sum(learned) for ((_, learned),) in sequences)

    answer, with_call = mean(1), mean(2)
    return answer + (statistics.mean(TURNS) - 1) * (with_call - answer)


def after_cold_start(folder: Path, start: Path, updates: int, settings: Sequence[str]) -> Path:
    """The model after a cold start of so many updates on the demonstrations of `folder / "data"`, made in `folder`
    unless it is there.

    Args:
        start: the model before it.
        settings: over those of the recipe for the cold start.
    """
    name = f"sft{updates}"
    model = folder / name / "export" / "hf"
    if not model.is_dir():
        first = [
            f"steps={updates}", f"run.dir={folder}", f"run.name={name}", "tracking.wandb=disabled",
            f"model.path={start}", f"data.train={folder / 'data' / 'sft.jsonl'}",
            f"trainer.optimizer.warmup_updates={max(1, min(20, updates // 6))}", "checkpoint.keep=1",
        ]  # fmt: skip
        slimrl("sft", str(RECIPE.with_name("sft.yaml")), *first, *settings, "--resume-or-start")
    return model


def prepare(options: Namespace) -> Race:
    """The race; its data, and the model after its cold start, are made unless they are there."""
    folder = options.folder / "agents"
    data, start = folder / "data", folder / "random"
    if not data.is_dir():
        write_data(data, TURNS, LENGTHS, prompts=PROMPTS, conversations=SFT_CONVERSATIONS)
    if not start.is_dir():
        write_toy("qwen3_moe", start, ToySize(layers=3, max_position=MAX_TRAJECTORY_TOKENS), seed=0)
    settings = [f"sft.max_tokens={MAX_TRAJECTORY_TOKENS}", "checkpoint.every_steps=100"]
    return Race(
        model=after_cold_start(folder, start, options.sft_updates, settings),
        prompts=data / "train.jsonl",
        slimrl=SLIMRL,
        trl=TRL,
        tools=True,
        tokens=PROMPTS * SAMPLES * mean_tokens(),
        turns=PROMPTS * SAMPLES * statistics.mean(TURNS),
        tolerance=options.tolerance,
    )


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--sft-updates", type=int, default=SFT_UPDATES, help="of the cold start")
    parser.add_argument("--tolerance", type=float, default=0.1, help="largest relative difference of tokens and turns")
    return main_of(parser, f"{PROMPTS} prompts x {SAMPLES} samples, 1 to {MAX_TURNS} turns", prepare)


if __name__ == "__main__":
    sys.exit(main())
