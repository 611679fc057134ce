"""How many requests an engine has under way, exact while it is paused too.

SGLang's own figure of load is published every few forward passes. The hook here adds the number to what a scheduler
says of itself in /server_info.
"""

from typing import Any

KEY = "slimrl_running_requests"


def after_get_internal_state(answer: Any, controller: Any, request: Any) -> Any:
    """Hook of SchedulerInternalStateController.get_internal_state."""
    scheduler = controller.scheduler
    requests = {*scheduler.collect_inflight_reqs(), scheduler.chunked_req} - {None}
    answer.internal_state[KEY] = sum(not request.finished() for request in requests)
    return answer
