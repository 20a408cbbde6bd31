"""Messages as plain data for `-o json`: the API's own field names, so that they stay.

Enum values are their words in lower case, timestamps ISO 8601 in UTC, durations seconds (the key
ends with `_s`), hashes hexadecimal. A field that is absent is null, an empty list is [].
"""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

if TYPE_CHECKING:
    from google._upb._message import FieldDescriptor as _UpbField
    from google.protobuf.descriptor import FieldDescriptor as _Field
    from google.protobuf.message import Message

    FieldDescriptor = _Field | _UpbField

# Nothing that the commands print has these; if a message should get them, they stay inside.
SECRET = frozenset({"turn_token", "token", "agent_metadata", "base_address"})


def shape(message: Message) -> dict[str, Any]:
    """The message as a dictionary with a key for every field."""
    shaped: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.name in SECRET:
            continue
        name, value = field.name, getattr(message, field.name)
        kind = field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            shaped[name] = {str(key): value[key] for key in sorted(value)}
        elif field.is_repeated:
            shaped[name] = [_value(field, item) for item in value]
        elif field.has_presence and not message.HasField(name):
            shaped[_key(field)] = None
        else:
            shaped[_key(field)] = _value(field, value)
    return shaped


def word(field_owner: Message, field: str) -> str:
    """An enum field's value in lower case, without what all names of the enum begin with."""
    descriptor = field_owner.DESCRIPTOR.fields_by_name[field]
    return _enum_word(descriptor, getattr(field_owner, field))


def seconds(duration: Duration) -> float:
    """A duration in seconds."""
    return duration.seconds + duration.nanos / 1e9


def moment(timestamp: Timestamp) -> datetime.datetime:
    """A timestamp, in UTC."""
    return timestamp.ToDatetime(tzinfo=datetime.UTC)


def iso(time: datetime.datetime) -> str:
    """A time in UTC, to the millisecond."""
    text = time.astimezone(datetime.UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def _key(field: FieldDescriptor) -> str:
    of = field.message_type
    if of is not None and of.full_name == Duration.DESCRIPTOR.full_name:
        return f"{field.name}_s"
    return field.name


def _value(field: FieldDescriptor, value: Any) -> Any:
    if field.enum_type is not None:
        return _enum_word(field, value)
    if isinstance(value, Timestamp):
        return iso(moment(value))
    if isinstance(value, Duration):
        return seconds(value)
    if field.message_type is not None:
        return shape(value)
    if isinstance(value, bytes):
        return value.hex()
    return value


def _enum_word(field: FieldDescriptor, number: int) -> str:
    enum = field.enum_type
    assert enum is not None
    known = enum.values_by_number.get(number)
    if known is None:  # a newer server's
        return f"unknown-{number}"
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return known.name.removeprefix(prefix).lower()
