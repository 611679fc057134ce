"""TRL's half of a race: timed GSPO steps of its GRPOTrainer, by one of the processes that torchrun starts.

    python -m torch.distributed.run --nproc-per-node 2 benchmarks/trl_steps.py WORK.json OUT.json

It runs in TRL's environment, and benchmarks/sides.py writes WORK. OUT gets the steps of rank 0 but the first: `total_s`
from the end of the step before to the end of this one, `generation_s` of it with tools, and of all ranks `tokens` and
`turns` that were sampled and `sequence_tokens`, the tokens of all trajectories with prompts and tools' answers.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, CompileConfig, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

from slimrl.agent.calculator import calculator

# slimrl's schemas have no type of the result either, so that both sides have the same prompt.
del calculator.__annotations__["return"]


def reward(completions: list[Any], **_: Any) -> list[float]:
    """Never equal within a group, so that all trajectories are trained on."""
    return [number / len(completions) for number in range(len(completions))]


class TimedTrainer(GRPOTrainer):
    """Notes what each generation took and made."""

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        start = time.perf_counter()
        made = super()._generate(prompts)
        seconds = time.perf_counter() - start
        prompt_ids, completion_ids, tool_mask, completions, *_ = made
        sampled = map(sum, tool_mask) if self.tools else map(len, completion_ids)
        turns = [sum(message["role"] == "assistant" for message in messages) for messages in completions]
        whole = sum(map(len, [*prompt_ids, *completion_ids]))
        tokens, num_turns, whole = self.accelerator.reduce(torch.tensor([sum(sampled), sum(turns), whole])).tolist()
        self.generated = {"generation_s": seconds, "tokens": tokens, "turns": num_turns, "sequence_tokens": whole}
        return made


class Clock(TrainerCallback):
    def __init__(self, trainer: TimedTrainer) -> None:
        self._trainer, self._end = trainer, 0.0
        self.steps: list[dict[str, float]] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        start, self._end = self._end, time.perf_counter()
        if start:
            self.steps.append({"total_s": self._end - start, **self._trainer.generated})
            if self._trainer.accelerator.is_main_process:
                print(f"step {len(self.steps)}: {self.steps[-1]}", flush=True)


def trainer_of(work: dict[str, Any], folder: Path) -> TimedTrainer:
    """A trainer whose other files go into `folder`."""
    settings = work["settings"]
    tokenizer = AutoTokenizer.from_pretrained(work["checkpoint"])
    if work["tools"]:
        # Calls are written as Qwen3 writes them.
        tokenizer.response_template = qwen3_template
    trainer = TimedTrainer(
        model=work["checkpoint"],
        processing_class=tokenizer,
        reward_funcs=reward,
        args=GRPOConfig(output_dir=str(folder), model_init_kwargs=settings["model"], **settings["config"]),
        train_dataset=Dataset.from_list([{"prompt": messages} for messages in work["prompts"]]),
        tools=[calculator] if work["tools"] else None,
    )
    if "compile" in settings:
        # TRL turns compilation off, and transformers does on a CPU.
        config = trainer.generation_config
        config.disable_compile, config.compile_config = False, CompileConfig(**settings["compile"])
        config.compile_config._compile_all_devices = True
    return trainer


def main() -> None:
    work, out = (Path(argument) for argument in sys.argv[1:])
    trainer = trainer_of(json.loads(work.read_text()), out.parent)
    clock = Clock(trainer)
    trainer.add_callback(clock)
    trainer.train()
    if trainer.accelerator.is_main_process:
        out.write_text(json.dumps(clock.steps))
    trainer.accelerator.wait_for_everyone()
    # Seen once in five runs: a thread that is left aborts a process that ends in the ordinary way.
    os._exit(0)


if __name__ == "__main__":
    main()
