"""Time to first token of every turn: kvshuttle beside vLLM's own ways to move KV, in one run.

`python -m benchmarks.ttft --help`; what it measures and how is in docs/benchmarks.md.
"""
