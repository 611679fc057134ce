"""Hooks of an SGLang scheduler: the number of requests under way, and sleep while it is paused."""

from typing import Any

RUNNING_REQUESTS = "slimrl_running_requests"
"""What /server_info says of each scheduler: its requests under way, exact while it is paused too.

SGLang's own figure of load is published every few forward passes."""


def after_get_internal_state(answer: Any, controller: Any, request: Any) -> Any:
    """Hook of SchedulerInternalStateController.get_internal_state."""
    scheduler = controller.scheduler
    requests = {*scheduler.collect_inflight_reqs(), scheduler.chunked_req} - {None}
    answer.internal_state[RUNNING_REQUESTS] = sum(not request.finished() for request in requests)
    return answer


def after_paused_round(result: None, scheduler: Any) -> None:
    """Hook of Scheduler._record_scheduler_state_for_paused_engine, which a paused scheduler calls in every round.

    SGLang lets an idle scheduler sleep on its sockets (`sleep_on_idle`), but not a paused one: it polls and takes a
    core, which on a CPU the trainer and the loading of weights then lack.
    """
    if scheduler.idle_sleeper is not None and not scheduler._deferred_input_requests:
        scheduler.idle_sleeper.maybe_sleep()
