"""Processes of actors, on whichever nodes: they are ended, and waited for until they hold nothing any more."""

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slimrl.base.errors import StageError
from slimrl.base.processes import await_end, send_all
from slimrl.runtime.cluster.placement import Node
from slimrl.runtime.cluster.reservation import is_alive

END_TIMEOUT_S = 30.0
"""How long a killed process may take to give its memory back."""
ANSWER_TIMEOUT_S = 60.0
"""How long a node may take to say that its processes have ended, on top of that."""


@dataclass(frozen=True)
class NodeProcess:
    """A process of a node; another that gets its number later is not it."""

    pid: int
    created: float
    """Seconds since 1970, as psutil gives them on its node"""

    @classmethod
    def own(cls) -> Self:
        """This process."""
        return cls(os.getpid(), psutil.Process().create_time())


def end_processes(processes: Mapping[Node, Sequence[NodeProcess]]) -> None:
    """Kill processes and wait for their end. Those of a node that was lost have ended with it.

    Raises:
        StageError: a process lives on, or a node does not answer.
    """
    asked = {
        node.name: _kill.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False)).remote(
            list(of_node)
        )
        for node, of_node in processes.items()
        if is_alive(node)
    }
    for name, answer in asked.items():
        try:
            left = ray.get(answer, timeout=END_TIMEOUT_S + ANSWER_TIMEOUT_S)
        except ray.exceptions.RayError as error:
            raise StageError(f"{name}: its processes could not be ended: {type(error).__name__}", str(error)) from error
        if left:
            raise StageError(f"{name}: killed processes live on after {END_TIMEOUT_S:.0f} s: {left}")


@ray.remote(max_retries=0, num_cpus=0)
def _kill(processes: list[NodeProcess]) -> list[int]:
    """Pids of those that do not end."""
    found = []
    for one in processes:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(one.pid)
            if process.create_time() == one.created:
                found.append(process)
    send_all(found, signal.SIGKILL)
    return [process.pid for process in await_end(found, END_TIMEOUT_S)]
