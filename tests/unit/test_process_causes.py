"""What an error says of a server process that a signal ended, by its log."""

import signal

from slimrl.engines.servers.process import describe_signal, find_cause

SCHEDULER = """\
[2026-01-01 10:00:00] loading
[2026-01-01 10:00:09 TP1] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 6231, in run_scheduler_process
    scheduler.run_event_loop()
  File "backend.py", line 2014, in pad
    backend.fill_value()
    ^^^^^^^^^^^^^^^^^^
AttributeError: 'Backend' object has no attribute 'fill_value'

[2026-01-01 10:00:09] SIGQUIT received. signum=None, frame=None. It usually means one child failed.
[2026-01-01 10:00:15] No live scheduler processes found; skipping py-spy and CUDA coredump.
""".splitlines()


def test_an_engine_that_killed_itself_is_shown_with_the_error_of_its_worker():
    assert describe_signal(signal.SIGKILL, SCHEDULER) == (
        "SIGKILL; the last error in its log: AttributeError: 'Backend' object has no attribute 'fill_value'"
    )


def test_a_crash_is_shown_as_the_interpreter_names_it():
    log = ["ready", "Fatal Python error: Segmentation fault", "", "Current thread 0x7f (most recent call first):"]
    assert describe_signal(signal.SIGSEGV, log) == (
        "SIGSEGV; the last error in its log: Fatal Python error: Segmentation fault"
    )
    assert find_cause(log) == "Fatal Python error: Segmentation fault"


def test_a_log_without_an_error_is_said_to_have_none_and_memory_is_named_for_sigkill_alone():
    log = ["[2026-01-01 10:00:00] ready", "/models.py:3: UserWarning: old"]
    assert describe_signal(signal.SIGKILL, log) == "SIGKILL, without an error in its log; the memory may have run out"
    assert describe_signal(signal.SIGTERM, []) == "SIGTERM, without an error in its log"


def test_an_exception_without_a_message_is_shown_with_the_code_that_raised_it():
    log = """\
Traceback (most recent call last):
  File "parallel_hook.py", line 326, in handle_data_parallelism
    assert cfg.tp_size % cfg.attn_dp_size == 0
           ^^^^^^^^^^^^^^~~~~~~~~~~~~~~~~~~~~~
AssertionError
""".splitlines()
    assert find_cause(log) == "AssertionError: assert cfg.tp_size % cfg.attn_dp_size == 0"
