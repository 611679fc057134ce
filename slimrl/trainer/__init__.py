"""The trainer: one rank of Megatron. Importing it first patches megatron-core."""

import megatron_patches

megatron_patches.apply()
