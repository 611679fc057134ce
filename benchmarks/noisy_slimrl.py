"""The `slimrl` command, with recipes that may disturb the trainer's routers, as slimrl does not let them.

`moe_input_jitter_eps` makes the trainer another model than the engines: here on purpose, to measure what replaying the
engines' routing is worth.
"""

from slimrl.cli import app
from slimrl.config.megatron_verdicts import MEGATRON_VERDICTS
from slimrl.config.verdicts import Verdict, judged

if __name__ == "__main__":
    MEGATRON_VERDICTS.update(judged(Verdict.safe, "noise of the trainer's routers", "moe_input_jitter_eps"))
    app()
