"""The trainer: one rank of Megatron. Importing it patches megatron-core, before any name of it is bound here."""

import megatron_patches

megatron_patches.apply()
