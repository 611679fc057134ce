"""One made-up episode through the real path, so that a user sees which tokens the policy will be trained on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np

from slimrl.agent.chat.chat_format import ChatFormat
from slimrl.agent.chat.template import Schemas
from slimrl.agent.dialogue import Dialogue, Dialogues
from slimrl.agent.environment import EnvironmentFailure, MakeEnvironment, Observation, Turn, answers
from slimrl.agent.environment_host import EnvironmentHost
from slimrl.agent.episode_runner import EpisodeRunner
from slimrl.agent.example_arguments import example_arguments
from slimrl.config.schema.agent import AgentConfig, CompactionConfig
from slimrl.config.schema.rollout import RolloutConfig, SamplingConfig
from slimrl.data.engine import GenerateRequest, GenerateResult
from slimrl.data.preview import Preview, PreviewToken, Source
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Segment, Status

RESULT = "(the tool's answer)"
THINKING = "(thinking)"
CALLING, ANSWERING = "(words before a call)", "(the answer)"


async def preview_episode(
    dialogues: Dialogues, make: MakeEnvironment, rollout: RolloutConfig, agent: AgentConfig, prompt: Prompt
) -> Preview:
    """Play an episode in which the policy calls the first tool, if there is one, and then answers.

    The environment starts for real; what it answers is made up.

    Raises:
        ValueError: the environment cannot start, or the chat template cannot write such an episode or leaves a part of
            its prompt out.
    """
    host = EnvironmentHost(make, agent)
    try:
        first = await host.start(prompt, seed=0, scratch={})
    except EnvironmentFailure as failure:
        raise ValueError(str(failure)) from failure
    finally:
        await host.close()
    schemas = list(first.tools or ())
    dialogue = dialogues.of(schemas)
    turns = [_call_turn(schemas[0])] if schemas else []
    turns.append({"role": "assistant", "content": ANSWERING, "reasoning_content": THINKING})
    runner = EpisodeRunner(
        engine=_ScriptedEngine(dialogue, list(first.messages), turns),
        dialogues=dialogues,
        # The policy stands for whoever plays the role that begins.
        environment=lambda: _ScriptedEnvironment(replace(first, role="")),
        rollout=replace(rollout, max_turns=len(turns), max_trajectory_tokens=2**31 - 1),
        agent=replace(agent, compaction=CompactionConfig(), subagents={}),
    )
    sampling = SamplingConfig(max_new_tokens=2**30)
    trajectory = await runner.run(prompt, trajectory_id="preview", sampling=sampling, seed=None)
    if trajectory.status is Status.failed:
        raise ValueError(trajectory.metadata["error"])
    return Preview(
        stop_token_ids=dialogue.stop_token_ids,
        segments=[_tokens(segment, dialogue.chat) for segment in trajectory.segments],
        not_repeated=dialogue.chat.not_repeated(schemas),
        rewrites_results=bool(schemas) and dialogue.chat.rewrites_results(schemas),
    )


def preview_example(tokens: Sequence[int], mask: Sequence[bool], chat: ChatFormat) -> list[PreviewToken]:
    """An example of supervised training; what is not learned from is its prompt."""
    return [
        PreviewToken(
            id=token, text=chat.template.decode([token]), source="policy" if learned else "prompt", trained=learned
        )
        for token, learned in zip(tokens, mask, strict=True)
    ]


class _ScriptedEngine:
    """Writes each turn as the chat template would, up to the first token that ends it."""

    def __init__(self, dialogue: Dialogue, messages: list[dict[str, Any]], turns: list[dict[str, Any]]) -> None:
        self._dialogue = dialogue
        self._messages = messages
        self._num_prompt = len(messages)
        self._turns = turns
        self._opened = dialogue.chat.prompt(messages, dialogue.schemas, whole=True).opens_thinking

    def open(self, session_ids: Sequence[str], *, at_once: int) -> None:
        return

    def close(self, session_id: str) -> None:
        return

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        turn = self._turns.pop(0)
        chat = self._dialogue.chat
        try:
            text = _text_of_turn(chat, self._messages, turn, self._dialogue.schemas, opened=self._opened)
        except ValueError:
            # Some templates write what is before a turn anew once there is the turn: Kimi-K2-Thinking's drops thinking.
            before = self._messages[: self._num_prompt]
            text = _text_of_turn(chat, before, turn, self._dialogue.schemas, opened=self._opened)
        tokens = chat.template.encode(text)
        ends = self._dialogue.call_ends if turn.get("tool_calls") else chat.stop_token_ids
        tokens = tokens[: next(place for place, token in enumerate(tokens) if token in ends) + 1]
        self._messages = [*self._messages, turn, *_results(turn)]
        self._opened = bool(self._turns) and chat.opens_thinking_after_results
        return GenerateResult(
            tokens=tokens,
            logprobs=[0.0] * len(tokens),
            weight_versions=np.zeros(len(tokens), np.int32),
            finish_reason="stop",
            routed_experts=None,
            cached_tokens=0,
        )

    async def aclose(self) -> None:
        return


@dataclass(frozen=True)
class _ScriptedEnvironment:
    """Answers the first turn, if it is a call."""

    first: Observation

    async def start(self, prompt: Prompt, *, seed: int, scratch: dict[str, Any]) -> Observation:
        return self.first

    async def step(self, turn: Turn) -> Observation:
        return Observation(messages=answers(turn, [RESULT] * len(turn.calls)), done=not turn.calls)

    async def close(self) -> None:
        return


def _call_turn(schema: dict[str, Any]) -> dict[str, Any]:
    function = schema["function"]
    call = {"name": function["name"], "arguments": example_arguments(function.get("parameters") or {})}
    return {
        "role": "assistant",
        "content": CALLING,
        "reasoning_content": THINKING,
        "tool_calls": [{"id": f"functions.{function['name']}:0", "type": "function", "function": call}],
    }


def _results(turn: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"role": "tool", "name": call["function"]["name"], "tool_call_id": call["id"], "content": RESULT}
        for call in turn.get("tool_calls", ())
    ]


def _text_of_turn(
    chat: ChatFormat, messages: list[dict[str, Any]], turn: dict[str, Any], schemas: Schemas, *, opened: bool
) -> str:
    """What a policy would write, with thinking where the model thinks."""
    plain = {key: value for key, value in turn.items() if key != "reasoning_content"}
    try:
        text = chat.written_turn([*messages, turn], schemas)
    except ValueError:
        text = _without_thinking(chat, messages, plain, schemas, opened=opened)
    # Some templates leave out the thinking that the header has opened.
    close = chat.thinking_tags.close
    return f"{THINKING}{close}{text}" if opened and close not in text else text


def _without_thinking(
    chat: ChatFormat, messages: list[dict[str, Any]], turn: dict[str, Any], schemas: Schemas, *, opened: bool
) -> str:
    if not opened:
        return chat.written_turn([*messages, turn], schemas)
    before = chat.template.render(messages, schemas, generate=True).rstrip().removesuffix(chat.thinking_tags.open)
    after = chat.template.render([*messages, turn], schemas, generate=False)
    if not after.startswith(before):
        raise ValueError("the chat template writes a finished turn differently from the prompt before it")
    return after[len(before) :].removeprefix(chat.thinking_tags.close)


def _tokens(segment: Segment, chat: ChatFormat) -> list[PreviewToken]:
    ids = segment.tokens.tolist()
    texts = [chat.template.decode([token]) for token in ids]
    sources: list[Source] = [
        "policy" if sampled else "prompt" if turn < 0 else "template"
        for sampled, turn in zip(segment.loss_mask, segment.turn_ids, strict=True)
    ]
    for place in _places_of_result(texts, sources):
        sources[place] = "tool"
    return [
        PreviewToken(id=token, text=text, source=source, trained=source == "policy")
        for token, text, source in zip(ids, texts, sources, strict=True)
    ]


def _places_of_result(texts: list[str], sources: list[Source]) -> list[int]:
    """Places of the tokens that hold the tool's answer, among those between turns."""
    places = [place for place, source in enumerate(sources) if source == "template"]
    ends = list(accumulate(len(texts[place]) for place in places))
    start = "".join(texts[place] for place in places).find(RESULT)
    if start < 0:
        return []
    return [
        place
        for place, end in zip(places, ends, strict=True)
        if end > start and end - len(texts[place]) < start + len(RESULT)
    ]
