"""A paused engine waits for what it is told next, instead of asking for it again and again.

SGLang lets an idle scheduler sleep on its sockets (`sleep_on_idle`), but not a paused one: it takes a core, which on a
CPU the trainer and the loading of weights then lack.
"""

from typing import Any


def after_paused_round(result: None, scheduler: Any) -> None:
    """Hook of Scheduler._record_scheduler_state_for_paused_engine, which every round of a paused scheduler calls."""
    if scheduler.idle_sleeper is not None and not scheduler._deferred_input_requests:
        scheduler.idle_sleeper.maybe_sleep()
