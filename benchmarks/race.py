"""A GSPO step of slimrl beside one of TRL: the same machine, model and work, one after the other.

The model is a random Qwen3-MoE of 0.9 million parameters. The work is that of benchmarks/step.py: 16 prompts x 8
samples x exactly 48 new tokens and one update. docs/internals.md says what each side is given.
"""

import sys
from argparse import Namespace

from rounds import Race, main_of, parser_of
from slimrl_tools.toy.calculator_data import write_calculator_data
from slimrl_tools.toy.toy import ToySize, write_toy
from step import NEW_TOKENS, PROMPTS, SAMPLES

TRL = {
    "config": {
        "max_completion_length": NEW_TOKENS,
        "generation_kwargs": {"min_new_tokens": NEW_TOKENS},
        "cache_implementation": "static",
    },
    "compile": {"mode": "default"},
}


def prepare(options: Namespace) -> Race:
    """The race; its model and prompts are made unless they are there."""
    model, data = options.folder / "model", options.folder / "data"
    if not model.is_dir():
        write_toy("qwen3_moe", model, ToySize(layers=3), seed=0)
    if not data.is_dir():
        write_calculator_data(data, seed=0, num_train=PROMPTS, num_heldout=1, num_conversations=1)
    return Race(
        model=model,
        prompts=data / "train.jsonl",
        slimrl=["agent.tools=[]"],
        trl=TRL,
        tools=False,
        tokens=PROMPTS * SAMPLES * NEW_TOKENS,
        turns=PROMPTS * SAMPLES,
        tolerance=0,
    )


if __name__ == "__main__":
    title = f"{PROMPTS} prompts x {SAMPLES} samples x {NEW_TOKENS} tokens"
    sys.exit(main_of(parser_of(__doc__), title, prepare))
