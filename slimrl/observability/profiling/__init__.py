"""Profiles of a run's steps: `slimrl train --profile` and `slimrl report` (docs/observing.md#a-profile)."""
