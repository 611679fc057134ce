"""BFCL's function calling over several turns as an environment.

1. The policy is shown the functions of the entry's classes and the first request.
2. It calls functions; each turn with calls is a step. A turn without calls ends the user turn: the next request comes.
3. After the last one the package's checker compares states and answers with those of the ground truth.
4. More than `max_steps` steps in one user turn end the episode, and the entry has failed.
"""

import copy
from typing import Any, Literal, Self, get_args

from slimrl.agent.environment import UNKNOWN_TOOL, Observation, Turn, answers
from slimrl.agent.tool_call import MalformedCall, ToolCall
from slimrl.data.prompt import Prompt
from slimrl.environments.bfcl.calls import FAILED, Instances, is_error
from slimrl.environments.bfcl.entry import Entry
from slimrl.environments.bfcl.functions import Descriptions, added_functions, added_text, first_functions, first_tools
from slimrl.environments.bfcl.later import CALL_LATER
from slimrl.environments.bfcl.state import state_id
from slimrl.environments.bfcl.verdict import judge

Reward = Literal["outcome", "progress"]

MAX_STEPS = 20
"""Steps in one user turn that the package allows; it gives up after the step beyond them"""
NOT_RUN = f"{FAILED}another call of this turn is malformed, so none of them was run"


class BfclEnvironment:
    """One entry of BFCL.

    Args:
        reward: `outcome`: 1 if the package's checker finds the episode valid, else 0. `progress`: the fraction of the
            user turns that passed before the first one that did not.
        max_steps: in one user turn.
        descriptions: `full` as in the package, or `short`: names and types alone.
    """

    def __init__(
        self, reward: Reward = "outcome", max_steps: int = MAX_STEPS, descriptions: Descriptions = "full"
    ) -> None:
        self._reward, self._max_steps, self._descriptions = reward, max_steps, descriptions
        self._calls: list[list[list[str]]] = [[]]
        """Calls that were made, by user turn and step"""
        self._num_steps = 0

    @classmethod
    def check(cls, reward: str = "outcome", max_steps: int = MAX_STEPS, descriptions: str = "full") -> None:
        """Raises ValueError for arguments that __init__ does not take."""
        for name, value, choices in (
            ("reward", reward, get_args(Reward)),
            ("descriptions", descriptions, get_args(Descriptions)),
        ):
            if value not in choices:
                raise ValueError(f"{name} is {value!r}. Use {' or '.join(choices)}.")
        if not isinstance(max_steps, int) or max_steps < 1:
            raise ValueError(f"max_steps is {max_steps!r}. Use a whole number from 1; BFCL has {MAX_STEPS}.")

    def start(self, prompt: Prompt, *, seed: int, scratch: dict[str, Any]) -> Observation:
        """The first request. Raises ValueError if the prompt is not of BFCL."""
        self._entry = Entry.from_metadata(prompt.metadata)
        self._instances = Instances(self._entry, [each["name"] for each in first_functions(self._entry)])
        tools = first_tools(self._entry, self._descriptions)
        return Observation(messages=prompt.messages, tools=tools, state_id=self._state_id())

    def step(self, turn: Turn) -> Observation:
        """The answers to the calls, or the next request."""
        if not turn.calls:
            return self._next_request(turn)
        results = self._results(turn.calls)
        self._num_steps += 1
        if turn.is_last or turn.finish_reason == "end" or self._num_steps > self._max_steps:
            return self._over(finished=False)
        failed = [
            call.name or UNKNOWN_TOOL for call, result in zip(turn.calls, results, strict=True) if is_error(result)
        ]
        return Observation(messages=answers(turn, results), state_id=self._state_id(), reward=0.0, tool_errors=failed)

    def copy(self, *, scratch: dict[str, Any]) -> Self:
        return copy.deepcopy(self)

    def close(self) -> None:
        """Nothing is held but objects of Python."""

    @property
    def _user_turn(self) -> int:
        return len(self._calls) - 1

    def _state_id(self) -> str:
        return state_id(self._instances.by_class, self._user_turn)

    def _results(self, calls: tuple[ToolCall | MalformedCall, ...]) -> list[str]:
        """Run the calls of a turn, all or, where one is malformed, none: so the messages show all that was run."""
        if any(isinstance(call, MalformedCall) for call in calls):
            return [FAILED + call.problem if isinstance(call, MalformedCall) else NOT_RUN for call in calls]
        results, step = [], []
        for call in calls:
            assert isinstance(call, ToolCall)
            result, text = self._instances.call(*self._called(call))
            results.append(result)
            step += [] if text is None else [text]
        if step:
            self._calls[-1].append(step)
        return results

    def _called(self, call: ToolCall) -> tuple[str, dict[str, Any]]:
        """Name and arguments of the function that a call means."""
        name, arguments = call.arguments.get("name"), call.arguments.get("arguments")
        if call.name == CALL_LATER and isinstance(name, str) and isinstance(arguments, dict):
            return name, arguments
        return call.name, call.arguments

    def _next_request(self, turn: Turn) -> Observation:
        if self._user_turn + 1 == len(self._entry.questions):
            return self._over(finished=True)
        self._calls.append([])
        self._num_steps = 0
        if turn.is_last or turn.finish_reason == "end":
            return self._over(finished=False)
        messages = list(self._entry.questions[self._user_turn])
        if added := added_functions(self._entry, self._user_turn):
            self._instances.offer([each["name"] for each in added])
            messages.append({"role": "user", "content": added_text(added, self._descriptions)})
        return Observation(messages=messages, state_id=self._state_id(), reward=0.0)

    def _over(self, *, finished: bool) -> Observation:
        """The end, with the verdict on the user turns that the policy finished."""
        verdict = judge(self._entry, self._calls if finished else self._calls[:-1])
        return Observation(
            done=finished,
            truncated=not finished,
            reward=verdict.progress if self._reward == "progress" else float(verdict.valid),
            state_id=self._state_id(),
            metrics={"success": float(verdict.valid), "progress": verdict.progress},
        )
