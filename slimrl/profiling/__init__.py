"""Where the time of a run's steps goes: `slimrl train --profile` and `slimrl report` (docs/profiling.md)."""
