"""A child of the server: serves one connection, which is one trajectory's environment.

The requests are OpenEnv's: `reset` with a seed and the prompt, `step` with a turn, `state` and `close`. Each is
answered with an observation, the state, or an error that says what the environment raised.
"""

import json
import socket
import traceback
from collections.abc import Callable
from typing import Any

from slimrl.agent.environment import Observation
from slimrl.agent.isolation.instance import Instance
from slimrl.agent.isolation.messages import observation_json, read_turn
from slimrl.agent.isolation.websocket import Connection
from slimrl.data.prompt import Prompt


def serve(connected: socket.socket, make: Callable[[], Any]) -> None:
    """Answer the requests of a connection until it is closed, and close the environment."""
    connection, session = Connection(connected), _Session(make)
    try:
        for message in connection.messages():
            answer = session.answer(message)
            if answer is None:
                break
            connection.send(answer)
    finally:
        session.instance.close()


class _Session:
    def __init__(self, make: Callable[[], Any]) -> None:
        self.instance = Instance(make)
        self._scratch: dict[str, Any] = {}
        self._num_steps = 0

    def answer(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """The answer to a request; None for one that ends the connection."""
        kind, data = message["type"], message.get("data", {})
        if kind == "close":
            return None
        if kind == "state":
            return {"type": "state", "data": {"step_count": self._num_steps}}
        try:
            observation = self._observation(kind, data)
            answer = {
                "type": "observation",
                "data": {
                    "observation": {**observation_json(observation), "scratch": self._scratch},
                    # Of numpy, too.
                    "reward": None if observation.reward is None else float(observation.reward),
                    "done": bool(observation.done),
                },
            }
            _check_json("scratch", self._scratch)
            _check_json("the observation", answer)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the task's own code may raise anything
            traceback.print_exc()
            return {"type": "error", "data": {"message": f"{error!r}", "code": "EXECUTION_ERROR"}}
        return answer

    def _observation(self, kind: str, data: dict[str, Any]) -> Observation:
        if kind == "reset":
            self._scratch |= data.get("scratch", {})
            observation = self.instance.start(Prompt(**data["prompt"]), seed=data["seed"], scratch=self._scratch)
        elif kind == "step":
            observation = self.instance.step(read_turn(data))
            self._num_steps += 1
        else:
            raise ValueError(f"no request of this protocol: {kind!r}")
        if not isinstance(observation, Observation):
            raise TypeError(f"gave {observation!r}, not an Observation")
        return observation


def _check_json(what: str, value: Any) -> None:
    """Raises TypeError: it holds what JSON cannot say, so that it cannot leave this process."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what} holds what JSON cannot say, and must be plain data here: {error}") from error
