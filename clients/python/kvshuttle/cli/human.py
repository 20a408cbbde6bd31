"""Numbers as people read them."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

from rich.text import Text

from kvshuttle.cli.shape import moment

if TYPE_CHECKING:
    from google.protobuf.timestamp_pb2 import Timestamp

NONE = "-"


def count(number: float) -> str:
    """12,345."""
    return f"{number:,.0f}"


def short(number: float) -> str:
    """A number in at most five characters: 950, 12.3k, 4.1M."""
    for suffix in ("", "k", "M", "G", "T"):
        if abs(number) < 999.5:
            if not suffix or abs(number) >= 99.5:
                return f"{number:.0f}{suffix}"
            return f"{number:.1f}{suffix}"
        number /= 1_000
    return f"{number:.0f}P"


def size(number: float) -> str:
    """Bytes, in powers of ten as GB/s are."""
    for suffix in ("B", "kB", "MB", "GB", "TB"):
        if abs(number) < 999.5:
            return f"{number:.0f} B" if suffix == "B" else f"{number:.3g} {suffix}"
        number /= 1_000
    return f"{number:.3g} PB"


def throughput(number: int, elapsed_s: float) -> str:
    """Bytes moved in so many seconds, as GB/s."""
    if number <= 0 or elapsed_s <= 0:
        return NONE
    return gigabytes(number / elapsed_s)


def gigabytes(bytes_per_second: float) -> str:
    """GB/s with three figures, and MB/s where that would be nothing."""
    if bytes_per_second >= 1e8:
        return f"{bytes_per_second / 1e9:.3g} GB/s"
    return f"{bytes_per_second / 1e6:.3g} MB/s"


def share(part: float, whole: float) -> str:
    """Percent; nothing of nothing is no share."""
    if whole <= 0:
        return NONE
    percent = 100 * part / whole
    return f"{percent:.1f} %" if 0 < percent < 9.95 else f"{percent:.0f} %"


def span(seconds: float) -> str:
    """A length of time with two figures that matter."""
    if seconds < 0:
        return f"-{span(-seconds)}"
    if seconds == 0:
        return "0 s"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    for unit, name, sub, subname in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "m")):
        if whole >= unit:
            return f"{whole // unit} {name} {whole % unit // sub} {subname}"
    return f"{whole // 60} m {whole % 60} s"


def now() -> datetime.datetime:
    """This machine's clock, in UTC."""
    return datetime.datetime.now(datetime.UTC)


def age_s(timestamp: Timestamp, at: datetime.datetime) -> float:
    """Seconds since then; never below zero, whatever two machines' clocks say."""
    return max(0.0, (at - moment(timestamp)).total_seconds())


def age(timestamp: Timestamp, at: datetime.datetime) -> str:
    """How long ago; nothing where there is no time."""
    if not timestamp.seconds:
        return NONE
    seconds = age_s(timestamp, at)
    return f"{seconds:.0f} s" if seconds < 59.5 else span(seconds)


def clock_time(timestamp: Timestamp) -> str:
    """The time of day here, to the second."""
    return moment(timestamp).astimezone().strftime("%H:%M:%S")


STATE_STYLES = {
    "ready": "green",
    "active": "cyan",
    "granted": "cyan",
    "pending": "yellow",
    "completed": "green",
    "draining": "yellow",
    "lost": "red",
    "fenced": "bright_black",
    "failed": "red",
    "expired": "red",
    "revoked": "yellow",
    "running": "cyan",
    "cancelled": "yellow",
    "abandoned": "red",
    "ended": "bright_black",
    "hard": "green",
    "soft": "yellow",
    "gone": "bright_black",
}


def state(word: str) -> Text:
    """A state's word in its colour; the word itself says it too."""
    return Text(word, style=STATE_STYLES.get(word, ""))
