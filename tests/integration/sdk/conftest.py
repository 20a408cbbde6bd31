"""With the control plane of the tests beside."""

from tests.integration.controlplane.conftest import cluster, limits

__all__ = ["cluster", "limits"]
