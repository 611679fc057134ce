"""The folder of a forward synthesis: prompts, conversations, and where all of it comes from."""

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimrl_tools.synthesis.forward.execution import Executor, agent_of
from slimrl_tools.synthesis.forward.proposals import ModelPlans
from slimrl_tools.synthesis.forward.tasks import Plans, Task, Tasks, plan_json
from slimrl_tools.synthesis.forward.templates import RandomPlans, read_templates
from slimrl_tools.synthesis.synthesis import sha256_of
from slimrl_tools.toy.task_lines import call

from slimrl.base.atomic import atomic_folder, write_whole
from slimrl.base.jsonl import write_lines


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where plans come from: a file of templates, or a model.

    Raises:
        ValueError: it is neither, or both.
    """

    steps: Path | None
    url: str
    model: str
    key_env: str

    def __post_init__(self) -> None:
        if bool(self.url) != bool(self.model):
            raise ValueError("--plan-url and --plan-model: both are needed, or none")
        if bool(self.url) == bool(self.steps):
            raise ValueError("plans come from --steps, or from --plan-url and --plan-model: give one of them")

    def plans(self, executor: Executor, seed: int) -> Plans:
        """Raises ValueError: the file has broken lines."""
        if self.steps is None:
            return ModelPlans(self.url, self.model, self.key_env, executor.schemas)
        return RandomPlans(read_templates(self.steps, executor.parameters), random.Random(seed))

    def to_json(self) -> dict[str, Any]:
        if self.steps is None:
            return {"model": self.model}
        return {"file": self.steps.name, "sha256": sha256_of(self.steps)}


def synthesize_forward(
    tools: str,
    out: Path,
    source: Source,
    *,
    tool_args: str,
    num: int,
    heldout: int,
    conversations: int,
    depth: int,
    timeout_s: float,
    seed: int,
) -> dict[str, Any]:
    """Write `train.jsonl`, `heldout.jsonl`, `sft.jsonl` and `provenance.json` into a new folder.

    Args:
        tools: file of a recipe, or import paths with commas between them.
        tool_args: JSON object of arguments that the policy does not give.
        depth: most calls of a plan.
        timeout_s: deadline of a call.

    Returns:
        What is in `provenance.json`.

    Raises:
        ValueError: `out` exists, the recipe, a tool or the file of templates is broken, or there are not so many plans.
    """
    agent = agent_of(tools, _object("--tool-args", tool_args))
    executor = Executor(agent, timeout_s)
    plans = source.plans(executor, seed)
    with atomic_folder(out) as partial, executor:
        tasks = Tasks(plans, executor, random.Random(seed))
        made = {
            "heldout": tasks.draw(heldout, depth, heldout=True),
            "train": tasks.draw(num, depth, heldout=False),
        }
        for name, part in made.items():
            write_lines(partial / f"{name}.jsonl", _prompt_lines(name, part))
        told = made["train"][:conversations]
        write_lines(partial / "sft.jsonl", (_conversation(one, agent.system_prompt, executor.schemas) for one in told))
        provenance = {
            "tools": agent.tools,
            "plans": source.to_json(),
            "seed": seed,
            "counts": {name: _counts(part) for name, part in made.items()},
            "left_out": dict(sorted(tasks.left_out.items())),
            "conversations": len(told),
        }
        write_whole(partial / "provenance.json", json.dumps(provenance, indent=1))
    return provenance


def _object(option: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{option}: {text!r} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{option}: {text!r} is no JSON object")
    return value


def _prompt_lines(name: str, tasks: Sequence[Task]) -> Iterator[dict[str, Any]]:
    for number, one in enumerate(tasks):
        metadata = {"calls": len(one.calls), "plan": plan_json(one)}
        yield {"id": f"{name}-{number}", "prompt": one.plan.question, "label": one.answer, "metadata": metadata}


def _conversation(task: Task, system_prompt: str | None, schemas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The plan as an answer to its question."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": task.plan.question}]
    if system_prompt is not None:
        messages.insert(0, {"role": "system", "content": system_prompt})
    for one in task.calls:
        messages += [call(one.tool, **one.arguments), {"role": "tool", "content": one.answer}]
    messages.append({"role": "assistant", "content": f"The answer is \\boxed{{{task.answer}}}."})
    return {"messages": messages, "tools": list(schemas)}


def _counts(tasks: Sequence[Task]) -> dict[str, int]:
    counts = Counter(f"{len(one.calls)} calls" for one in tasks)
    return {"all": len(tasks), **dict(sorted(counts.items()))}
