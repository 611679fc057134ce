"""A start on a GPU, rehearsed without one: what SGLang, megatron-core and Transformer Engine decide on a given card.

`python -m gpu_rehearsal CARD RECIPE...` does it for one card, in a process of its own: the libraries ask for the device
as they are imported, and remember the answer. Nothing is computed: what runs is the resolution of settings, the choice
of kernels and the construction of what refuses some of them.
"""
