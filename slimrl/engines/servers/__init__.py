"""The processes that serve a rollout: SGLang engines."""
