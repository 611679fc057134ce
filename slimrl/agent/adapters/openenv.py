"""Environments behind a server of OpenEnv, through its WebSocket protocol (docs/agents.md#openenv).

A connection is a session with an environment of its own. Each message to the server is `{"type": "reset" | "step",
"data": {...}}`; it answers with an observation, a reward and whether the episode is done, or with an error.
"""

import asyncio
import json
from typing import Any

import httpx
from aiohttp import ClientSession, ClientWebSocketResponse

from slimrl.agent.adapters.first_observation import first_observation, reset_seed, user
from slimrl.agent.environment import Observation, Turn, answers, error_text
from slimrl.agent.tool_call import MalformedCall, ToolCall
from slimrl.config.import_path import resolve
from slimrl.data.prompt import Prompt

TOOL = "act"
"""Name of the tool whose arguments are the action"""
CHECK_TIMEOUT_S = 10.0
FULL_POLL_S = 0.5
"""Seconds between attempts to get a session of a server that is full"""


class ServerRefusal(Exception):
    """A request that the server answered with an error."""

    def __init__(self, data: dict[str, Any]) -> None:
        errors = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in data.get("errors", ()))
        super().__init__(errors or data.get("message", "no cause given"))
        self.code = data.get("code", "")


class OpenEnvEnvironment:
    """The prompt's metadata may have `seed`, with which all its trajectories begin alike, and `reset_options`, which
    are given to the environment's reset.

    Args:
        url: of the server, `http://` or `https://`.
        action_field: field of the action that a turn's text becomes. Without it, the policy is shown a tool with the
            server's schema of an action; a turn without calls ends the episode.
        observation_field: field of the observation that the policy is shown; all of them as JSON without it.
        render: import path of a function observation -> text instead, of the dict that the server sent.
        max_message_bytes: largest message of the server.
    """

    def __init__(
        self, url: str, action_field: str = "", observation_field: str = "", render: str = "",
        max_message_bytes: int = 16 * 1024**2,
    ) -> None:  # fmt: skip
        self._url = url.rstrip("/")
        self._action_field, self._observation_field = action_field, observation_field
        self._render = resolve(render) if render else self._shown
        self._max_message_bytes = max_message_bytes
        self._session: ClientSession | None = None
        self._socket: ClientWebSocketResponse | None = None
        self._state = ""
        """The last observation, as the policy was shown it"""
        self._invalid_actions = 0

    @classmethod
    def check(cls, **arguments: Any) -> None:
        """Ask the server for the schema of its actions.

        Raises:
            ValueError: there is no server, or its action has not the field.
        """
        made = cls(**arguments)
        try:
            answer = httpx.get(f"{made._url}/schema", timeout=CHECK_TIMEOUT_S)
            schema = made._action_schema(answer.raise_for_status().json())
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError) as error:
            raise ValueError(f"{made._url}/schema: no server of OpenEnv answers: {error!r}") from error
        fields = schema.get("properties", {})
        if made._action_field and made._action_field not in fields:
            raise ValueError(f"an action of {made._url} has no field {made._action_field}; it has {', '.join(fields)}")

    async def start(self, prompt: Prompt, *, seed: int, scratch: dict[str, Any]) -> Observation:
        self._session = ClientSession()
        reset = {"seed": reset_seed(prompt, seed), **prompt.metadata.get("reset_options", {})}
        answer = await self._reset(reset)
        self._state = self._render(answer["observation"])
        return first_observation(prompt, self._state, tools=await self._tools())

    async def step(self, turn: Turn) -> Observation:
        if self._action_field:
            return await self._step_by_text(turn)
        if not turn.calls:
            return Observation(done=True)
        return await self._step_by_calls(turn)

    async def close(self) -> None:
        if self._socket is not None:
            await self._socket.close()
        if self._session is not None:
            await self._session.close()

    async def _step_by_text(self, turn: Turn) -> Observation:
        try:
            answer = await self._ask("step", {self._action_field: turn.text})
        except ServerRefusal as refusal:
            problem = f"Invalid action: {self._invalid(refusal)}"
            return Observation(messages=[user(problem)], reward=0.0, state_id=self._state, metrics=self._metrics)
        self._state = self._render(answer["observation"])
        return Observation(
            messages=[user(self._state)],
            reward=answer.get("reward"),
            done=bool(answer.get("done")),
            state_id=self._state,
            metrics=self._metrics,
        )

    async def _step_by_calls(self, turn: Turn) -> Observation:
        """A step for each call, in order, until the episode is done."""
        texts, errors, rewards, done = [], [], [], False
        for call in turn.calls:
            if done:
                texts.append("the episode is over")
                continue
            try:
                answer = await self._ask("step", _action(call))
            except (ServerRefusal, ValueError) as error:
                problem = self._invalid(error) if isinstance(error, ServerRefusal) else str(error)
                texts.append(error_text(problem))
                errors.append(call.name)
                continue
            self._state = self._render(answer["observation"])
            texts.append(self._state)
            rewards.append(answer.get("reward"))
            done = bool(answer.get("done"))
        given = [reward for reward in rewards if reward is not None]
        return Observation(
            messages=answers(turn, texts),
            reward=sum(given) if given else None,
            done=done,
            state_id=self._state,
            tool_errors=errors,
            metrics=self._metrics,
        )

    def _invalid(self, refusal: ServerRefusal) -> str:
        """What is wrong with the action; raises the refusal if it is of another kind."""
        if refusal.code != "VALIDATION_ERROR":
            raise refusal
        self._invalid_actions += 1
        return str(refusal)

    @property
    def _metrics(self) -> dict[str, float]:
        return {"invalid_actions": self._invalid_actions}

    async def _reset(self, data: dict[str, Any]) -> dict[str, Any]:
        """The first answer; a server that is full is asked again until the deadline of the start."""
        assert self._session is not None
        while True:
            self._socket = await self._session.ws_connect(f"{self._url}/ws", max_msg_size=self._max_message_bytes)
            try:
                return await self._ask("reset", data)
            except ServerRefusal as refusal:
                if refusal.code != "CAPACITY_REACHED":
                    raise
            await self._socket.close()
            await asyncio.sleep(FULL_POLL_S)

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        assert self._socket is not None
        await self._socket.send_json({"type": kind, "data": data})
        message = await self._socket.receive_json()
        if message["type"] == "error":
            raise ServerRefusal(message["data"])
        return message["data"]

    async def _tools(self) -> list[dict[str, Any]] | None:
        if self._action_field:
            return None
        assert self._session is not None
        async with self._session.get(f"{self._url}/schema", raise_for_status=True) as response:
            parameters = self._action_schema(await response.json())
        description = parameters.get("description", "Act in the environment.")
        return [{"type": "function", "function": {"name": TOOL, "description": description, "parameters": parameters}}]

    def _action_schema(self, schemas: dict[str, Any]) -> dict[str, Any]:
        """The schema of an action without the field `metadata`, which each action has and no policy should fill."""
        action = schemas["action"]
        fields = {name: field for name, field in action.get("properties", {}).items() if name != "metadata"}
        return {**action, "properties": fields}

    def _shown(self, observation: dict[str, Any]) -> str:
        if self._observation_field:
            return str(observation[self._observation_field])
        return json.dumps(observation, ensure_ascii=False)


def _action(call: ToolCall | MalformedCall) -> dict[str, Any]:
    """Raises ValueError: the call is not one of the tool."""
    if isinstance(call, MalformedCall):
        raise ValueError(call.problem)
    if call.name != TOOL:
        raise ValueError(f"unknown tool {call.name}; known: {TOOL}")
    return call.arguments
