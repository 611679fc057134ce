"""What policies of the models in chat_templates.py write, in literal words, and a scripted engine that says it."""

import asyncio
import json
from functools import partial

import numpy as np
from chat_templates import MODELS, Model

from slimrl.agent.dialogue import Dialogues
from slimrl.agent.episode import EpisodeRunner
from slimrl.agent.parsers import make_parser
from slimrl.agent.tool_environment import ToolEnvironment
from slimrl.agent.tools import ToolBox, make_tool
from slimrl.chat.tool_prompts import PUBLISHED
from slimrl.config.schema.agent import AgentConfig, HistoryMode
from slimrl.config.schema.rollout import RolloutConfig, SamplingConfig
from slimrl.data.engine import GenerateResult
from slimrl.data.trajectory import Prompt

QUESTION = {"role": "user", "content": "What is 1+2, and twice that?"}

TEXT_ARGUMENTS = {"deepseek_v3", "deepseek_v31", "deepseek_v31_think"}
"""Models whose templates take arguments as JSON text."""


def add(a: int, b: int, note: str = "") -> str:
    """Add.

    Args:
        a: One number.
        b: Another.
        note: Anything.
    """
    return f"{a + b}{note}"


TOOLS = ToolBox([make_tool(add)])

HEADERS_THAT_THINK = {"qwen3_thinking", "deepseek_v31_think"}

ANSWER_ENDS = {"glm45": "<|user|>", "glm45_no_think": "<|user|>", "llama31": "<|eot_id|>"}
CALL_ENDS = ANSWER_ENDS | {"glm45": "<|observation|>", "glm45_no_think": "<|observation|>"}


def thought_text(key: str, thought: str, *, after_tools: bool = False) -> str:
    """Thinking before an answer, if this model thinks here; DeepSeek does not after results."""
    model = MODELS[key]
    if not model.thinks or (key == "deepseek_v31_think" and after_tools):
        return ""
    if key == "glm45":
        return f"\n<think>{thought}</think>"
    if key == "deepseek_v31_think":
        return f"{thought}</think>"
    opening = "" if key in HEADERS_THAT_THINK else "<think>\n"
    return f"{opening}{thought}\n</think>\n\n"


def call_text(key: str, *calls: dict, first_id: int = 0) -> str:
    """Calls of `add` with these arguments."""
    texts = [json.dumps(arguments, ensure_ascii=False) for arguments in calls]
    if key.startswith("qwen"):
        return "\n".join(f'<tool_call>\n{{"name": "add", "arguments": {text}}}\n</tool_call>' for text in texts)
    if key.startswith("glm"):
        pairs = [
            "".join(f"\n<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>" for name, value in arguments.items())
            for arguments in calls
        ]
        return "".join(f"\n<tool_call>add{pair}\n</tool_call>" for pair in pairs)
    if key == "deepseek_v3":
        inner = "\n".join(
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{text}\n```<｜tool▁call▁end｜>" for text in texts
        )
        return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"
    if key.startswith("deepseek_v31"):
        inner = "".join(f"<｜tool▁call▁begin｜>add<｜tool▁sep｜>{text}<｜tool▁call▁end｜>" for text in texts)
        return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"
    if key == "kimi_k2":
        inner = "".join(
            f"<|tool_call_begin|>functions.add:{first_id + number}<|tool_call_argument_begin|>{text}<|tool_call_end|>"
            for number, text in enumerate(texts)
        )
        return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"
    (text,) = texts
    return f'{{"name": "add", "parameters": {text}}}'


def answer_text(key: str, words: str) -> str:
    """The last words of a turn, after its thinking."""
    return f"\n{words}" if key.startswith("glm") else words


def answer_end(key: str) -> str:
    return ANSWER_ENDS.get(key, MODELS[key].stops[0])


def call_end(key: str) -> str:
    return CALL_ENDS.get(key, MODELS[key].stops[0])


class Script:
    """An engine that says these texts or token ids; `contexts` has what it was asked to continue."""

    def __init__(self, model: Model, *turns: str | list[int], finish: str = "stop") -> None:
        self.turns = [model.chat().template.encode(turn) if isinstance(turn, str) else turn for turn in turns]
        self.finish = finish
        self.contexts: list[list[int]] = []
        self.said: list[list[int]] = []

    async def generate(self, request):
        self.contexts.append(request.input_ids)
        tokens = self.turns.pop(0)
        self.said.append(tokens)
        return GenerateResult(
            tokens=tokens,
            logprobs=[-1.0] * len(tokens),
            weight_versions=np.ones(len(tokens), np.int32),
            finish_reason="stop" if self.turns else self.finish,
            routed_experts=None,
            cached_tokens=0,
        )


def play(model: Model, engine: Script, *, tools=TOOLS, history="keep", messages=(QUESTION,), **limits):
    """The trajectory of an episode."""
    rollout = RolloutConfig(**{"max_trajectory_tokens": 100_000, "stop_at_tool_call": False, **limits})
    dialogues = Dialogues(model.chat(), partial(make_parser, model.parser), stop_at_call=rollout.stop_at_tool_call)
    agent = AgentConfig(history=HistoryMode(history), max_result_chars=100_000)
    environment = partial(ToolEnvironment, tools, agent, rollout.tool_timeout_s)
    runner = EpisodeRunner(engine=engine, dialogues=dialogues, environment=environment, rollout=rollout, agent=agent)
    prompt = Prompt(prompt_id="p", messages=list(messages), label=None)
    return asyncio.run(runner.run(prompt, trajectory_id="t", sampling=SamplingConfig(), seed=None))


def rendering(key: str, messages, *, generate: bool) -> str:
    """By transformers alone."""
    model = MODELS[key]
    written = json.loads(json.dumps(messages))
    for call in (call for message in written for call in message.get("tool_calls", ()) if key in TEXT_ARGUMENTS):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    tools = TOOLS.schemas
    if model.tool_prompt:
        written, tools = [{"role": "system", "content": PUBLISHED[model.tool_prompt](tools)}, *written], None
    return model.tokenizer().apply_chat_template(
        written,
        tools=tools,
        chat_template=model.template,
        tokenize=False,
        add_generation_prompt=generate,
        **model.kwargs,
    )
