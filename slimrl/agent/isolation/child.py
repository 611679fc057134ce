"""A child of the server: serves one connection, which is one trajectory's environment with its copies.

The requests are OpenEnv's: `reset` with a seed and the prompt, `step` with a turn, `state` and `close`; and `copy`.
Each is answered with an observation, the state, the number of the copy, or an error that says what the environment
raised. `instance` is the number of the environment that a request means, 0 without it.
"""

import json
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from slimrl.agent.environment import Observation
from slimrl.agent.isolation.instances import Instances
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
        session.instances.close_all()


@dataclass(kw_only=True)
class _Instance:
    """What is known here of an environment or a copy."""

    scratch: dict[str, Any]
    episode_id: str = ""
    num_steps: int = 0
    state_id: str | None = None


class _Session:
    def __init__(self, make: Callable[[], Any]) -> None:
        self.instances = Instances(make)
        self._by_number: dict[int, _Instance] = {}

    def answer(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """The answer to a request; None for one that ends the connection."""
        try:
            return self._answer(message["type"], message.get("instance", 0), message.get("data", {}))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the task's own code may raise anything
            traceback.print_exc()
            return {"type": "error", "data": {"message": f"{error!r}", "code": "EXECUTION_ERROR"}}

    def _answer(self, kind: str, number: int, data: dict[str, Any]) -> dict[str, Any] | None:
        match kind:
            case "reset":
                prompt = Prompt(**data["prompt"])
                made = self._by_number[0] = _Instance(scratch=data.get("scratch", {}), episode_id=prompt.prompt_id)
                return _observed(made, self.instances.start(prompt, seed=data["seed"], scratch=made.scratch))
            case "step":
                this = self._by_number[number]
                observation = self.instances.step(number, read_turn(data))
                this.num_steps += 1
                return _observed(this, observation)
            case "copy":
                other = self.instances.copy(number, scratch=data["scratch"])
                if other is not None:
                    self._by_number[other] = replace(self._by_number[number], scratch=data["scratch"])
                return {"type": "copy", "data": {"instance": other}}
            case "state":
                this = self._by_number[number]
                facts = {"episode_id": this.episode_id, "step_count": this.num_steps, "state_id": this.state_id}
                return {"type": "state", "data": facts}
            case "close":
                return None if self.instances.close(number) else {"type": "close", "data": {}}
        raise ValueError(f"no request of this protocol: {kind!r}")


def _observed(instance: _Instance, observation: Observation) -> dict[str, Any]:
    """The answer with an observation; raises TypeError if it is none, or not plain data."""
    if not isinstance(observation, Observation):
        raise TypeError(f"gave {observation!r}, not an Observation")
    instance.state_id = observation.state_id
    answer = {
        "type": "observation",
        "data": {
            "observation": {**observation_json(observation), "scratch": instance.scratch},
            # Of numpy, too.
            "reward": None if observation.reward is None else float(observation.reward),
            "done": bool(observation.done),
        },
    }
    _check_json("scratch", instance.scratch)
    _check_json("the observation", answer)
    return answer


def _check_json(what: str, value: Any) -> None:
    """Raises TypeError: it holds what JSON cannot say, so that it cannot leave this process."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what} holds what JSON cannot say, and must be plain data here: {error}") from error
