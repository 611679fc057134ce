"""Reward that a server of one's own computes: trajectories that end at about the same time go in one request.

POST {"trajectories": [{"trajectory_id", "status", "prompt", "label", "metadata", "messages"}, ...]} is answered by
{"rewards": [...]}, in the same order: a number each, or an object of named numbers. An empty list is answered by an
empty list, by which the start checks the server.
"""

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Unpack

from slimrl.base.strict_json import refuse_no_json
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Trajectory
from slimrl.rewards.http import EndpointError, EndpointSettings, JsonEndpoint
from slimrl.rewards.texts import own_messages


class Remote:
    """
    Args:
        url: of the request.
        max_batch: trajectories in one request.
        batch_s: how long a trajectory waits for others.
        api_key_env, max_running, timeout_s, retries: see JsonEndpoint.
    """

    def __init__(
        self, *, url: str, max_batch: int = 32, batch_s: float = 0.05, **settings: Unpack[EndpointSettings]
    ) -> None:
        if max_batch < 1 or not 0 <= batch_s <= 60:
            raise ValueError("max_batch is at least 1, and batch_s between 0 and 60")
        self._endpoint = endpoint(url, settings)
        self._max_batch, self._batch_s = max_batch, batch_s
        self._waiting: list[tuple[dict[str, Any], asyncio.Future[Any]]] = []
        self._sending: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Raises EndpointError, TimeoutError or ConnectionError if the server does not answer as it should."""
        await self._endpoint.start()
        await self._ask([])

    async def close(self) -> None:
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)
        await self._endpoint.close()

    async def __call__(self, trajectory: Trajectory, prompt: Prompt) -> Any:
        """
        Raises:
            EndpointError: an answer of another form; and what JsonEndpoint.post raises.
            ValueError: the prompt has a value that JSON does not have, which would spoil the whole batch.
        """
        item = _described(trajectory, prompt)
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append((item, answer))
        if len(self._waiting) >= self._max_batch:
            self._send()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._batch_s, self._send)
        return await answer

    def _send(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # One whose trajectory has met its deadline meanwhile needs no answer.
        batch = [(item, answer) for item, answer in self._waiting if not answer.done()]
        self._waiting = []
        if not batch:
            return
        task = asyncio.create_task(self._answer(batch))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _answer(self, batch: Sequence[tuple[dict[str, Any], "asyncio.Future[Any]"]]) -> None:
        try:
            rewards = await self._ask([item for item, _ in batch])
        except Exception as error:  # noqa: BLE001 - each trajectory of the batch fails with it
            for _, answer in batch:
                if not answer.done():
                    answer.set_exception(error)
            return
        for (_, answer), reward in zip(batch, rewards, strict=True):
            if not answer.done():
                answer.set_result(reward)

    async def _ask(self, items: Sequence[dict[str, Any]]) -> list[Any]:
        match await self._endpoint.post("", {"trajectories": items}):
            case {"rewards": list(rewards)} if len(rewards) == len(items):
                return rewards
            case other:
                raise EndpointError(f"{self._endpoint.url} gave no {len(items)} rewards: {str(other)[:200]}")


def endpoint(url: str, settings: EndpointSettings, *, adds: str = "") -> JsonEndpoint:
    """
    Args:
        adds: path that requests add to `url`.

    Raises:
        ValueError: settings that JsonEndpoint does not have, values that it refuses, or a URL that has the path.
    """
    base = url.rstrip("/")
    if adds and base.endswith(adds):
        raise ValueError(f"url: {url} ends with {adds}, which is added to it. Write {base.removesuffix(adds)}")
    try:
        return JsonEndpoint(url, **settings)
    except TypeError as error:
        raise ValueError(str(error)) from error


def _described(trajectory: Trajectory, prompt: Prompt) -> dict[str, Any]:
    for name in ("messages", "label", "metadata"):
        refuse_no_json(getattr(prompt, name), f"{name} of {prompt.prompt_id}")
    # Of several roles all messages, each with its role as `conversation`.
    said = trajectory.messages if "roles" in trajectory.metadata else own_messages(trajectory)
    return {
        "trajectory_id": trajectory.trajectory_id,
        "status": trajectory.status.value,
        "prompt": prompt.messages,
        "label": prompt.label,
        "metadata": prompt.metadata,
        # NaN and infinity, which a policy may write in a call, are no JSON: they would spoil the whole batch.
        "messages": json.loads(json.dumps(said), parse_constant=lambda _: None),
    }
