"""What a refusal says, taken apart."""

from __future__ import annotations

from typing import Any

import grpc
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status


def details(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    """Details of a status by type name, from the trailing metadata that any client gets."""
    metadata = error.trailing_metadata() or ()
    raw = next(value for key, value in metadata if key == "grpc-status-details-bin")
    from google.rpc import status_pb2

    status = status_pb2.Status.FromString(raw)
    assert rpc_status.to_status(status).details == error.details()
    found = {}
    for packed in status.details:
        kind = getattr(error_details_pb2, packed.type_url.rpartition(".")[2])
        message = kind()
        assert packed.Unpack(message)
        found[kind.__name__] = message
    return found


def reason(error: grpc.aio.AioRpcError) -> str:
    """The ErrorInfo's reason."""
    info = details(error)["ErrorInfo"]
    assert info.domain == "kvshuttle"
    return str(info.reason)
