"""SGLang's arguments for `rollout.speculative`."""

from pathlib import Path
from typing import Any

from slimrl.config.schema.rollout import RolloutConfig
from slimrl.config.schema.speculative import DraftMode

ALGORITHMS = {DraftMode.ngram: "NGRAM", DraftMode.mtp: "NEXTN", DraftMode.eagle: "EAGLE", DraftMode.eagle3: "EAGLE3"}


def speculative_arguments(rollout: RolloutConfig, model: Path | str) -> dict[str, Any]:
    """Fields of ServerArgs; none if the mode is off.

    A draft model proposes one chain of tokens, each by a step of its own, and no tree.
    """
    settings = rollout.speculative
    if settings.mode is DraftMode.off:
        return {}
    values: dict[str, Any] = {
        "speculative_algorithm": ALGORITHMS[settings.mode],
        "speculative_num_draft_tokens": settings.num_draft_tokens,
        # By default SGLang then runs no more than 48.
        "max_running_requests": rollout.max_concurrency_per_engine,
    }
    if settings.mode is not DraftMode.ngram:
        values |= {
            # SGLang finds the layers of some families alone; their weights are in the model's own checkpoint.
            "speculative_draft_model_path": str(model) if settings.mode is DraftMode.mtp else settings.draft_model,
            "speculative_num_steps": settings.num_draft_tokens - 1,
            # A release of the engine's memory would lose what no resync sends.
            "enable_draft_weights_cpu_backup": rollout.colocated,
            "speculative_eagle_topk": 1,
        }
    return values
