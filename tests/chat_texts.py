"""What policies of the models in chat_templates.py write, in literal words, and a scripted engine that says it."""

import asyncio
import json
from functools import partial

import numpy as np
from chat_templates import MODELS, Model

from slimrl.agent.chat.tool_prompts import PUBLISHED
from slimrl.agent.dialogue import Dialogues
from slimrl.agent.episode_runner import EpisodeRunner
from slimrl.agent.parsers import make_parser, marker_tokens
from slimrl.agent.tool_environment import ToolEnvironment
from slimrl.agent.tools import ToolBox, make_tool
from slimrl.config.schema.agent import AgentConfig, HistoryMode
from slimrl.config.schema.rollout import RolloutConfig, SamplingConfig
from slimrl.data.engine import GenerateResult
from slimrl.data.prompt import Prompt

QUESTION = {"role": "user", "content": "What is 1+2, and twice that?"}


def add(a: int, b: int, note: str = "") -> str:
    """Add.

    Args:
        a: One number.
        b: Another.
        note: Anything.
    """
    return f"{a + b}{note}"


TOOLS = ToolBox([make_tool(add)])

PLAYED = [key for key, model in MODELS.items() if model.calls]
"""Models that write calls"""
TEXT_ARGUMENTS = {key for key, model in MODELS.items() if model.calls in ("deepseekv3", "deepseekv31")}
"""Models whose templates take arguments as JSON text."""


def thought_text(key: str, thought: str, *, after_tools: bool = False) -> str:
    """Thinking before an answer, if this model thinks here."""
    model = MODELS[key]
    after = model.thought if model.thought_after_results is None else model.thought_after_results
    return (after if after_tools else model.thought).replace("{}", thought)


def call_text(key: str, *calls: dict, first_id: int = 0) -> str:
    """Calls of `add` with these arguments."""
    return WRITTEN_CALLS[MODELS[key].calls](calls, first_id)


def answer_text(key: str, words: str) -> str:
    """The last words of a turn, after its thinking."""
    return MODELS[key].answer.replace("{}", words)


def answer_end(key: str) -> str:
    return MODELS[key].ends[0] or MODELS[key].stops[0]


def call_end(key: str) -> str:
    return MODELS[key].ends[1] or MODELS[key].stops[0]


def _texts(calls) -> list[str]:
    return [json.dumps(arguments, ensure_ascii=False) for arguments in calls]


def _json(calls, first_id: int) -> str:
    return "\n".join(f'<tool_call>\n{{"name": "add", "arguments": {text}}}\n</tool_call>' for text in _texts(calls))


def _qwen3_coder(calls, first_id: int) -> str:
    pairs = ("".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items()) for arguments in calls)
    return "\n".join(f"<tool_call>\n<function=add>\n{pair}</function>\n</tool_call>" for pair in pairs)


def _glm45(calls, first_id: int) -> str:
    pairs = (
        "".join(f"\n<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>" for k, v in arguments.items())
        for arguments in calls
    )
    return "".join(f"\n<tool_call>add{pair}\n</tool_call>" for pair in pairs)


def _glm47(calls, first_id: int) -> str:
    pairs = (
        "".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in arguments.items())
        for arguments in calls
    )
    return "".join(f"<tool_call>add{pair}</tool_call>" for pair in pairs)


def _deepseekv3(calls, first_id: int) -> str:
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{text}\n```<｜tool▁call▁end｜>"
        for text in _texts(calls)
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def _deepseekv31(calls, first_id: int) -> str:
    inner = "".join(f"<｜tool▁call▁begin｜>add<｜tool▁sep｜>{text}<｜tool▁call▁end｜>" for text in _texts(calls))
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def _deepseekv32(calls, first_id: int) -> str:
    pairs = (
        "".join(f'<｜DSML｜parameter name="{k}" string="{str(isinstance(v, str)).lower()}">{v}</｜DSML｜parameter>\n'
                for k, v in arguments.items())
        for arguments in calls
    )  # fmt: skip
    inner = "".join(f'<｜DSML｜invoke name="add">\n{pair}</｜DSML｜invoke>\n' for pair in pairs)
    return f"\n\n<｜DSML｜function_calls>\n{inner}</｜DSML｜function_calls>"


def _kimi_k2(calls, first_id: int) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.add:{number}<|tool_call_argument_begin|>{text}<|tool_call_end|>"
        for number, text in enumerate(_texts(calls), first_id)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def _minimax_m2(calls, first_id: int) -> str:
    pairs = ("".join(f'<parameter name="{k}">{v}</parameter>\n' for k, v in arguments.items()) for arguments in calls)
    inner = "".join(f'<invoke name="add">\n{pair}</invoke>\n' for pair in pairs)
    return f"<minimax:tool_call>\n{inner}</minimax:tool_call>"


def _hunyuan(calls, first_id: int, suffix: str = ":opensource") -> str:
    inner = "".join(
        f"<tool_call{suffix}>add<tool_sep{suffix}>\n"
        + "".join(f"<arg_key{suffix}>{k}</arg_key{suffix}>\n<arg_value{suffix}>{v}</arg_value{suffix}>\n"
                  for k, v in arguments.items())
        + f"</tool_call{suffix}>\n"
        for arguments in calls
    )  # fmt: skip
    return f"<tool_calls{suffix}>\n{inner}</tool_calls{suffix}>"


def _harmony(calls, first_id: int) -> str:
    (text,) = _texts(calls)
    return f" to=functions.add<|channel|>commentary json<|message|>{text}"


def _llama3(calls, first_id: int) -> str:
    (text,) = _texts(calls)
    return f'{{"name": "add", "parameters": {text}}}'


WRITTEN_CALLS = {"json": _json, "qwen3_coder": _qwen3_coder, "glm45": _glm45, "glm47": _glm47,
                 "deepseekv3": _deepseekv3, "deepseekv31": _deepseekv31, "deepseekv32": _deepseekv32,
                 "kimi_k2": _kimi_k2,
                 "minimax_m2": _minimax_m2, "hunyuan": _hunyuan, "hunyuan_preview": partial(_hunyuan, suffix=""),
                 "harmony": _harmony, "llama3": _llama3}  # fmt: skip


def parser_of(key: str):
    """The parser of the model's calls, for `add`."""
    return make_parser(MODELS[key].parser, TOOLS.schemas, marker_tokens(MODELS[key].tokens))


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
    make = partial(make_parser, model.parser, tokens=marker_tokens(model.tokens))
    dialogues = Dialogues(model.chat(), make, stop_at_call=rollout.stop_at_tool_call)
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
    for message in written if key == "gpt_oss" else ():
        if "reasoning_content" in message:
            message["thinking"] = message["reasoning_content"]
    tools = TOOLS.schemas
    if model.tool_prompt:
        written, tools = [{"role": "system", "content": PUBLISHED[model.tool_prompt](tools)}, *written], None
    return model.tokenizer().apply_chat_template(
        written,
        tools=tools,
        tokenize=False,
        add_generation_prompt=generate,
        **model.kwargs,
    )
