"""What a run raises when one of its parts fails."""


class RunError(Exception):
    """The run cannot go on; the message is the cause, in one or a few lines, for the user's terminal."""


class StageError(RunError):
    """A process of the run failed or outran its deadline.

    `details` holds everything that is known, tracebacks included; it goes to the driver's log, not to the terminal.
    """

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class Preempted(Exception):
    """The run made room for another job, with a checkpoint; the message says how it goes on."""


class StepDropped(Exception):
    """The step under way has been given up, before it changed any weights."""


class Interrupted(KeyboardInterrupt):
    """A signal asked the run to end.

    Not an Exception, since an event loop would hand that to whichever callback it happened to run, and go on.
    """
