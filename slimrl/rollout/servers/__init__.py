"""The processes that serve a rollout: SGLang engines and the router in front of them."""
