"""Hooks of an SGLang scheduler: its load, the versions of tokens, and sleep while it is idle or paused.

With attention data parallelism an engine has a scheduler for each group of ranks. All of them take part in every round
of any of them, and the first hands on what controls the engine.
"""

from collections.abc import Callable
from typing import Any

GROUPED_POLL_MS = 20
"""Longest sleep of the first of several schedulers in ms; work of the others does not wake it."""
CONTROLLER_POLL_MS = 1000
"""Wait for a message between two signs of life to SGLang's watchdog, in ms."""

RUNNING_REQUESTS = "slimrl_running_requests"
"""Key of /server_info for each scheduler's number of requests under way, exact while it is paused too.

SGLang's own figure of load is published every few forward passes."""
RETRACTIONS = "slimrl_retractions"
"""Key of /server_info for the number of times that a scheduler has taken a running request's KV cache away since it
started, because there was none left. A pause with `retract` does not count."""
TOKEN_USAGE = "slimrl_token_usage"
"""Key of /server_info for the fraction of a scheduler's KV cache that running requests hold; of other caches, such as
states of delta nets, if they are fuller. Cached prefixes of requests that have ended do not count."""


def after_get_internal_state(answer: Any, controller: Any, request: Any) -> Any:
    """Hook of SchedulerInternalStateController.get_internal_state."""
    scheduler = controller.scheduler
    requests = {*scheduler.collect_inflight_reqs(), scheduler.chunked_req} - {None}
    answer.internal_state |= {
        RUNNING_REQUESTS: sum(not request.finished() for request in requests),
        RETRACTIONS: getattr(scheduler, RETRACTIONS, 0),
        TOKEN_USAGE: scheduler.pool_stats_observer.get_pool_stats().get_max_pool_usage(),
    }
    return answer


def after_add_request_to_queue(result: None, scheduler: Any, request: Any, is_retracted: bool = False) -> None:
    """Hook of Scheduler._add_request_to_queue, which gets requests again that were retracted."""
    if is_retracted:
        setattr(scheduler, RETRACTIONS, getattr(scheduler, RETRACTIONS, 0) + 1)


def around_version_change(original: Callable[..., None], scheduler: Any, new_version: str | None) -> None:
    """Hook of Scheduler.record_weight_version_change: count tokens that the old weights have sampled unread.

    The scheduler reads a batch's tokens while the next one is computed. A pause in place leaves them in its queue, and
    SGLang, which counts those in the requests' outputs, would ascribe them to the new version.
    """
    from sglang.srt.runtime_context import get_serving
    from sglang.srt.utils.weight_versions import WeightVersionEvent

    old_version = get_serving().weight_version
    original(scheduler, new_version)
    if get_serving().weight_version == old_version:
        return
    # A scheduler without overlap has no queue.
    for batch, result in getattr(scheduler, "result_queue", ()):
        for request, count in zip(batch.reqs, _unread_tokens(batch, result), strict=True):
            if request.finished() or request.is_retracted or request.inflight_middle_chunks > 0:
                continue
            if request.output_ids:
                request.weight_version_events.pop()
            request.weight_version_events.append(
                WeightVersionEvent(old_version=old_version, num_output_tokens=len(request.output_ids) + count)
            )


def _unread_tokens(batch: Any, result: Any) -> list[int]:
    """Tokens that a computed batch adds to each of its requests; speculative decoding adds several."""
    if batch.spec_algorithm.is_none() or result.accept_lens is None:
        return [1] * len(batch.reqs)
    if result.copy_done is not None:
        result.copy_done.synchronize()
    return result.accept_lens.tolist()


def after_init_idle_sleeper(result: None, scheduler: Any) -> None:
    """Hook of Scheduler.init_idle_sleeper: of several schedulers of one engine only the first sleeps on its sockets.

    The others wait for it in the round's first exchange. If they slept on their own, up to a second, so would it.
    """
    from sglang.srt.runtime_context import get_parallel

    if scheduler.idle_sleeper is None or not get_parallel().attn_dp_enabled:
        return
    if get_parallel().tp_rank == 0:
        scheduler.idle_sleeper.poller = ShortPolls(scheduler.idle_sleeper.poller)
    else:
        scheduler.idle_sleeper = None


class ShortPolls:
    """A poller whose polls return within GROUPED_POLL_MS."""

    def __init__(self, poller: Any) -> None:
        self._poller = poller

    def poll(self, timeout_ms: int) -> Any:
        return self._poller.poll(min(timeout_ms, GROUPED_POLL_MS))


def event_loop(controller: Any) -> None:
    """Replaces DataParallelController.event_loop, which takes a core to hand requests to the schedulers."""
    from sglang.srt.managers.io_struct import sock_recv

    while True:
        controller.soft_watchdog.feed()
        if controller.recv_from_tokenizer.poll(CONTROLLER_POLL_MS):
            controller._request_dispatcher(sock_recv(controller.recv_from_tokenizer))


async def flush_cache(manager: Any, timeout_s: float | None = None) -> Any:
    """Replaces TokenizerManager.flush_cache, which answers for the first of several schedulers alone."""
    from sglang.srt.managers.io_struct import FlushCacheReqInput

    manager.auto_create_handle_loop()
    answers = await manager.flush_cache_communicator(FlushCacheReqInput(timeout_s=timeout_s))
    return next((answer for answer in answers if not answer.success), answers[0])


def after_paused_round(result: None, scheduler: Any) -> None:
    """Hook of Scheduler._record_scheduler_state_for_paused_engine, which a paused scheduler calls in every round.

    SGLang lets an idle scheduler sleep on its sockets (`sleep_on_idle`), but not a paused one: it polls and takes a
    core, which on a CPU the trainer and the loading of weights then lack.
    """
    if scheduler.idle_sleeper is not None and not scheduler._deferred_input_requests:
        scheduler.idle_sleeper.maybe_sleep()
