"""Episodes of integration tests, in which the policy is a list of texts in the toy model's format."""

import json
from functools import partial

import numpy as np
from slimrl_tools.toy.toy_tokenizer import build_tokenizer

from slimrl.agent.chat.chat_format import ChatFormat
from slimrl.agent.chat.template import ChatTemplate
from slimrl.agent.dialogue import Dialogues
from slimrl.agent.environment import MakeEnvironment
from slimrl.agent.episode_runner import EpisodeRunner
from slimrl.agent.parsers import NoCalls, make_parser
from slimrl.agent.tool_environment import ToolEnvironment
from slimrl.agent.tools import ToolBox
from slimrl.config.schema.agent import AgentConfig
from slimrl.config.schema.rollout import RolloutConfig, SamplingConfig
from slimrl.data.engine import GenerateRequest, GenerateResult
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Trajectory

TOKENIZER = build_tokenizer()
CHAT = ChatFormat(ChatTemplate(TOKENIZER), [TOKENIZER.eos_token_id])
PROMPT = Prompt(prompt_id="p:1", messages=[{"role": "user", "content": "Begin."}], label=None)
END = "<|im_end|>"


class ScriptedEngine:
    """Answers each request with the next text."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        tokens = TOKENIZER(self.texts.pop(0), add_special_tokens=False).input_ids
        return GenerateResult(
            tokens=tokens, logprobs=[-0.5] * len(tokens), weight_versions=np.zeros(len(tokens), np.int32),
            finish_reason="stop", routed_experts=None, cached_tokens=0,
        )  # fmt: skip


def call_text(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def runner_of(
    *texts: str, tools: ToolBox | None = None, environment: MakeEnvironment | None = None, agent=None
) -> EpisodeRunner:
    """A runner of episodes with these tools or this environment."""
    agent, rollout = agent or AgentConfig(), RolloutConfig(max_trajectory_tokens=100_000, max_turns=50)
    return EpisodeRunner(
        engine=ScriptedEngine(*texts),
        dialogues=Dialogues(CHAT, lambda schemas: make_parser("qwen25", schemas) if schemas else NoCalls(),
                            stop_at_call=True),
        environment=environment or partial(ToolEnvironment, tools or ToolBox([]), agent, rollout.tool_timeout_s),
        rollout=rollout,
        agent=agent,
    )  # fmt: skip


async def played(runner: EpisodeRunner, prompt: Prompt = PROMPT, name: str = "t") -> Trajectory:
    return await runner.run(prompt, trajectory_id=name, sampling=SamplingConfig(max_new_tokens=1000), seed=1)


def told(trajectory: Trajectory, role: str) -> list[str]:
    """What the policy was told, by its role."""
    return [message["content"] for message in trajectory.messages if message["role"] == role]
