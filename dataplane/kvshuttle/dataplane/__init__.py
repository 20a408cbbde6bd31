"""The agent inside a vLLM worker: holds blocks, and moves them under leases only.

vLLM loads :class:`kvshuttle.dataplane.connector.KVShuttleConnector`; nothing here is imported by
clients or by the control plane.
"""
