"""Exceptions of a run."""


class RunError(Exception):
    """The run failed; the message gives the cause in a few lines, for the user's terminal."""


class StageError(RunError):
    """A process of the run failed or missed its deadline.

    `details`, tracebacks included, go to the driver's log, not to the terminal.
    """

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class ActorLost(StageError):
    """An actor's process has ended, with all that it held."""


class NodeLost(ActorLost):
    """An actor's process has ended, with its node."""


class NoAnswer(StageError):
    """An actor missed the deadline of a call."""


class PeerLost(StageError):
    """A collective failed for want of another member, and no member says of itself that it has ended."""


class NotWritten(StageError):
    """Files of a checkpoint could not be written, which all ranks know of."""


class NotLoaded(StageError):
    """Ranks could not load a checkpoint."""


class TrainerLost(StageError):
    """A rank of the trainer, or of its critic, has ended or hangs, with its weights and the optimizer's state."""


class NotFinite(RunError):
    """Updates whose loss or gradient is not finite end the run, or weights that are not."""


class Preempted(Exception):
    """The run was preempted and saved a checkpoint; the message says how to continue."""


class StepDropped(Exception):
    """The current step was dropped before it changed any weights."""


class Interrupted(KeyboardInterrupt):
    """A signal asked the run to end.

    Not an Exception, which an event loop would swallow in whichever callback it was running.
    """
