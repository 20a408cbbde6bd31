"""State machines of the control plane: no I/O, no transport, no clock.

Times are ints in nanoseconds on one process-wide line (`now_ns`) that the caller provides; see
`kvshuttle.controlplane.clock`. The one place where events meet state is `registry.Registry`.
"""
