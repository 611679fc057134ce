"""The shared memory through which an engine's first rank tells the others what to do loses its name once all map it.

SGLang takes the name away when the queue is garbage, which it never is in a process that a signal ends: 25 MB of
/dev/shm would stay behind of each engine of several ranks.
"""

from typing import Any


def after_wait_until_ready(result: None, queue: Any) -> None:
    """Hook of MessageQueue.wait_until_ready, from which the writer returns when every reader has mapped the memory."""
    if queue._is_writer and queue.n_local_reader:
        queue.buffer.shared_memory.unlink()
        queue.buffer.is_creator = False
