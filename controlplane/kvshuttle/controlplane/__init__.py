"""The control plane: who may move which session's KV cache from where to where."""

__all__ = ["__version__"]

__version__ = "0.1.0"
