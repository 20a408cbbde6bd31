"""Messages that no sane client sends: made from the descriptors, so that a new RPC is covered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from kvshuttle.v1 import (
    agent_service_pb2,
    cluster_service_pb2,
    lease_service_pb2,
    session_service_pb2,
)

__all__ = [
    "enum_paths",
    "message_bytes",
    "methods",
    "mutated",
    "path_of",
    "request_class",
    "with_enum",
]

FILES = (agent_service_pb2, cluster_service_pb2, lease_service_pb2, session_service_pb2)

_SIGNED = (0, 1, -1, 2, 77, 1_000, 2**31 - 1, -(2**31))
_WIDE = (*_SIGNED, 2**53, 2**63 - 1, -(2**63))
_UNSIGNED = (0, 1, 2, 5, 77, 1_000, 2**31, 2**32 - 1)
_UNSIGNED_WIDE = (*_UNSIGNED, 2**40, 2**63, 2**64 - 1)
_INTS: dict[int, tuple[int, ...]] = {
    FieldDescriptor.TYPE_INT32: _SIGNED,
    FieldDescriptor.TYPE_SINT32: _SIGNED,
    FieldDescriptor.TYPE_SFIXED32: _SIGNED,
    FieldDescriptor.TYPE_INT64: _WIDE,
    FieldDescriptor.TYPE_SINT64: _WIDE,
    FieldDescriptor.TYPE_SFIXED64: _WIDE,
    FieldDescriptor.TYPE_UINT32: _UNSIGNED,
    FieldDescriptor.TYPE_FIXED32: _UNSIGNED,
    FieldDescriptor.TYPE_UINT64: _UNSIGNED_WIDE,
    FieldDescriptor.TYPE_FIXED64: _UNSIGNED_WIDE,
    FieldDescriptor.TYPE_ENUM: (0, 1, 2, 3, 4, 77, -1, 2**31 - 1),
}
_TEXTS = ("", "s", "d", "p", "hostile", "x" * 300, "\x00", "a\nb", "🦀", "\u202e", "١")


def methods() -> list[MethodDescriptor]:
    """Every RPC of kvshuttle.v1, by name."""
    found = [
        method
        for file in FILES
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]
    return sorted(found, key=lambda method: method.full_name)


def path_of(method: MethodDescriptor) -> str:
    """What a channel calls it."""
    return f"/{method.containing_service.full_name}/{method.name}"


def request_class(method: MethodDescriptor) -> type[Message]:
    """The generated class of its request."""
    return GetMessageClass(method.input_type)


def enum_paths(descriptor: Descriptor, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of all enum fields in a message, nested ones too."""
    for field in descriptor.fields:
        path = (*prefix, field.name)
        if field.type == FieldDescriptor.TYPE_ENUM:
            yield path
        elif field.message_type is not None and len(path) < 6:
            yield from enum_paths(field.message_type, path)


def with_enum(message: Message, path: tuple[str, ...], value: int) -> Message:
    """A copy with one enum set."""
    copy = type(message)()
    copy.CopyFrom(message)
    inner: Any = copy
    for name in path[:-1]:
        inner = getattr(inner, name)
        if not isinstance(inner, Message):  # a repeated field
            inner = inner[0] if len(inner) else inner.add()
    last: Any = getattr(inner, path[-1])
    if isinstance(last, int):
        setattr(inner, path[-1], value)
    else:
        last.append(value)
    return copy


def _value(field: FieldDescriptor, texts: tuple[str, ...], depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return _message(field.message_type, texts, depth - 1)
    if field.type == FieldDescriptor.TYPE_STRING:
        return st.sampled_from((*texts, *texts, *_TEXTS))
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.sampled_from((b"", b"\x00", b"h" * 32, b"h" * 31, b"x" * 100))
    if field.type == FieldDescriptor.TYPE_BOOL:
        return st.booleans()
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return st.floats(width=32)
    return st.sampled_from(_INTS[field.type])


@st.composite
def _message(draw: Any, descriptor: Descriptor, texts: tuple[str, ...], depth: int) -> Message:
    message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        # Most fields are set, so that checks of the later ones are reached too.
        if (field.message_type is not None and depth <= 0) or draw(st.integers(0, 3)) == 0:
            continue
        entry = field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            getattr(message, field.name)[draw(st.sampled_from(_TEXTS))] = 2**64 - 1
            continue
        value = _value(field, texts, depth)
        if field.is_repeated:
            many = draw(st.lists(value, max_size=3))
            getattr(message, field.name).extend(many * draw(st.sampled_from((1, 1, 1, 20))))
        elif entry is not None:
            getattr(message, field.name).CopyFrom(draw(value))
        else:
            setattr(message, field.name, draw(value))
    return message


@st.composite
def mutated(draw: Any, raw: bytes) -> bytes:
    """Some bytes, spoilt in a few places."""
    data = bytearray(raw)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(("set", "cut", "insert", "twice", "not utf-8"))):
            case "set" if data:
                data[at % len(data)] = draw(st.integers(0, 255))
            case "cut":
                del data[at:]
            case "insert":
                data[at:at] = draw(st.binary(max_size=8))
            case "twice":
                data += data[at:]
            case "not utf-8":
                data = bytearray(bytes(data).replace(b"s", b"\xff"))
            case _:
                pass
    return bytes(data)


@st.composite
def message_bytes(draw: Any, descriptor: Descriptor, texts: tuple[str, ...]) -> bytes:
    """A request as it might be on the wire: mostly well-formed with odd values, sometimes not."""
    if draw(st.integers(0, 9)) == 0:
        return bytes(draw(st.binary(max_size=200)))
    raw = draw(_message(descriptor, texts, 5)).SerializeToString()
    return bytes(draw(mutated(raw)) if draw(st.booleans()) else raw)
