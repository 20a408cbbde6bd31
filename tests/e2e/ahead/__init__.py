"""Some of the end-to-end tests again, on engines that schedule a step while the one before runs.

It is what vLLM does on GPUs, and not on CPUs: see `tests.support.ahead`.
"""
