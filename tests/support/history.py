"""What happened in a run of the real processes, from their logs, and whether it may happen.

The control plane says which lease it granted to whom, in which term (its log at level debug, as
JSON). Agents say what they obeyed, which blocks they held, read into and were handed out
(`kvshuttle.dataplane.journal`); fake agents note the same with `History.note`. Instants are of one
machine's clock. A process that was killed says nothing more, and nothing is held against it.

`History.problems` names every breach of the rules that it has as methods.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Entry", "History"]

_LEASE = re.compile(r"(?P<lineage>.+)-(?P<epoch>\d+)-\d+")


@dataclass(frozen=True)
class Entry:
    """One step: of which program (`where`), of which of its processes (`life`), and what."""

    where: str
    life: str
    name: str
    fields: dict[str, Any]

    @property
    def at(self) -> int:
        """When, in ns; 0 where it does not say."""
        return int(self.fields.get("at", 0))

    @property
    def lease(self) -> str:
        """Of which lease; empty for none."""
        return str(self.fields.get("lease") or self.fields.get("lease_id") or "")

    @property
    def read(self) -> tuple[str, str]:
        """The READ that it is about."""
        return self.lease, str(self.fields.get("read", ""))

    @property
    def chunk(self) -> tuple[str, str]:
        """The part of a push that it is about."""
        return self.lease, str(self.fields.get("chunk", ""))

    @property
    def blocks(self) -> set[int]:
        """Its blocks' numbers."""
        found: set[int] = set()
        for run in filter(None, str(self.fields.get("blocks", "")).split(",")):
            first, _, last = run.partition("-")
            found.update(range(int(first), int(last or first) + 1))
        return found


@dataclass
class History:
    """Entries in the order of each process; processes among each other in no order."""

    entries: list[Entry] = field(default_factory=list)

    # Reading.

    def read_control_plane(self, path: Path, where: str = "") -> None:
        """A control plane's log; several of its lives may have written to it."""
        where, lives = where or str(path), 0
        for line in _lines(path):
            lives += line["event"] == "started"
            self.entries.append(Entry(where, f"{where}#{lives}", line["event"], line))

    def read_agent(self, path: Path, where: str = "") -> None:
        """An engine's log; what is not the agent's journal is passed over."""
        where = where or str(path)
        for line in _lines(path):
            if line.get("part") == "agent.journal":
                life = f"{where}#{line.get('pid')}"
                self.entries.append(Entry(where, life, line["event"], line))

    def note(self, where: str, event: str, life: str = "", **fields: Any) -> None:
        """A step that a fake agent, or a test, says of itself."""
        self.entries.append(Entry(where, life or where, event, fields))

    def named(self, *names: str) -> Iterator[Entry]:
        """Entries of these names."""
        return (entry for entry in self.entries if entry.name in names)

    # Rules.

    def problems(self) -> list[str]:
        """Every breach, in words."""
        rules = (
            self._granted_twice,
            self._granted_in_a_stale_epoch,
            self._obeyed_a_stale_epoch,
            self._read_without_a_grant,
            self._used_twice,
            self._read_what_was_not_held,
            self._let_go_while_read,
            self._reused_while_held,
            self._wrote_what_was_not_held,
            self._one_incarnation_twice,
        )
        return [problem for rule in rules for problem in rule()]

    def _granted_twice(self) -> Iterable[str]:
        """A lease is granted once, by one process, and its grant obeyed once."""
        for name, names, matches in (
            ("granted", ("lease_granted",), lambda _: True),
            ("obeyed", ("obeys",), lambda x: x.fields.get("order") == "grant"),
        ):
            seen: dict[str, Entry] = {}
            for entry in filter(matches, self.named(*names)):
                before = seen.setdefault(entry.lease, entry)
                if before is not entry:
                    yield f"{entry.lease} was {name} twice: {before.life}, {entry.life}"

    def _granted_in_a_stale_epoch(self) -> Iterable[str]:
        """A lease is granted in the term in which it was asked for, and a term is one process's."""
        of_term: dict[tuple[str, int], str] = {}
        for entry in self.named("lease_granted"):
            epoch = int(entry.fields["epoch"])
            parts = _LEASE.fullmatch(entry.lease)
            if parts is None:
                yield f"{entry.lease} is no lease's name"
                continue
            if int(parts["epoch"]) != epoch:
                yield f"{entry.lease} was granted in epoch {epoch}"
            life = of_term.setdefault((parts["lineage"], epoch), entry.life)
            if life != entry.life:
                yield f"epoch {epoch} of {parts['lineage']} is of {life} and of {entry.life}"

    def _obeyed_a_stale_epoch(self) -> Iterable[str]:
        """A boot obeys no term below one that it has heard of, and no grant of another term than
        it was given in."""
        given = {x.lease: int(x.fields["epoch"]) for x in self.named("lease_granted")}
        heard: dict[str, int] = defaultdict(int)
        for entry in self.named("welcomed", "obeys"):
            epoch = int(entry.fields["epoch"])
            if epoch < heard[entry.life]:
                yield (
                    f"{entry.life} obeyed epoch {epoch} ({entry.fields.get('order', 'welcome')} "
                    f"{entry.lease}) after {heard[entry.life]}"
                )
            heard[entry.life] = max(heard[entry.life], epoch)
            is_grant = entry.fields.get("order") == "grant"
            if is_grant and epoch != given.get(entry.lease, epoch):
                yield f"{entry.lease} was granted in {given[entry.lease]}, obeyed in {epoch}"

    def _read_without_a_grant(self) -> Iterable[str]:
        """Whoever reads or writes has obeyed a grant."""
        grants: dict[str, set[str]] = defaultdict(set)
        for entry in self.entries:
            if entry.name == "obeys" and entry.fields["order"] == "grant":
                grants[entry.where].add(entry.lease)
            elif (
                entry.name in ("read_posted", "write_posted")
                and entry.lease not in grants[entry.where]
            ):
                verb = entry.name.removesuffix("_posted")
                yield f"{entry.life} {verb}s under {entry.lease} without a grant"

    def _used_twice(self) -> Iterable[str]:
        """One worker reads under a lease, for one request, or piece by piece for none."""
        readers: dict[str, Entry] = {}
        for entry in self.named("read_posted"):
            before = readers.setdefault(entry.lease, entry)
            piece = entry.read[1].startswith(f"{entry.lease}#")
            if before.where != entry.where:
                yield f"{entry.lease} is read by {before.where} and by {entry.where}"
            elif before is not entry and not piece:
                yield f"{entry.lease} is read for {before.read[1]} and for {entry.read[1]}"

    def _spans(self) -> dict[tuple[str, str], dict[str, Entry]]:
        """Of each READ its entries by name."""
        spans: dict[tuple[str, str], dict[str, Entry]] = defaultdict(dict)
        for entry in self.named("read_posted", "read_completed", "read_over"):
            spans[entry.read][entry.name] = entry
        return spans

    def _read_what_was_not_held(self) -> Iterable[str]:
        """What was read and published was held from before the READ until it was complete. (A
        source that lets go because the reader is done has heard so from NIXL, which may be sooner
        than the reader has looked: see the next rule for that.)"""
        held = {entry.lease: entry for entry in self.named("range_held")}
        let_go = {entry.lease: entry for entry in self.named("range_let_go")}
        if not held:
            return  # no source has said anything
        for (lease, _), span in self._spans().items():
            posted, completed = span.get("read_posted"), span.get("read_completed")
            over = span.get("read_over")
            if over is None or not over.fields.get("published"):
                continue
            if lease not in held:
                yield f"{lease} was read, and nobody held it"
            elif posted is not None and posted.at < held[lease].at:
                yield f"{lease} was read before it was held"
            end = let_go.get(lease)
            if (
                end is not None
                and completed is not None
                and end.fields.get("reason") == "DEADLINE"
                and completed.at > end.at
            ):
                yield f"{lease} was published though it was complete after its source's deadline"

    def _let_go_while_read(self) -> Iterable[str]:
        """A source is told that its reader has stopped when the reader has, and not before."""
        told = {
            entry.lease: entry
            for entry in self.named("obeys")
            if entry.fields["order"] == "reader_stopped"
        }
        for (lease, _), span in self._spans().items():
            end, posted = told.get(lease), span.get("read_posted")
            if end is None or posted is None or posted.at > end.at:
                continue
            later = [x for name, x in span.items() if name != "read_posted" and x.at > end.at]
            if later:
                yield f"the source of {lease} was told to let go while {later[0].life} read"
        for (lease, _), span in self._spans().items():
            end, posted = told.get(lease), span.get("read_posted")
            if end is not None and posted is not None and posted.at > end.at:
                yield f"{posted.life} began to read {lease} after its source was told to let go"

    def _reused_while_held(self) -> Iterable[str]:
        """No block is handed out that a lease's source holds, that a WRITE may still fetch, or that
        a READ or WRITE may still fill."""
        holds: dict[str, dict[tuple[str, ...], set[int]]] = defaultdict(dict)
        for entry in self.entries:
            mine = holds[entry.life]
            match entry.name:
                case "range_held":
                    mine["source", entry.lease] = entry.blocks
                case "range_let_go":
                    mine.pop(("source", entry.lease), None)
                case "landing_held":
                    mine["landing", *entry.read] = entry.blocks
                case "landing_let_go":
                    mine.pop(("landing", *entry.read), None)
                case "chunk_held":
                    mine["chunk", *entry.chunk] = entry.blocks
                case "chunk_let_go":
                    mine.pop(("chunk", *entry.chunk), None)
                case "handed_out":
                    blocks = entry.blocks
                    for name, held in mine.items():
                        if both := blocks & held:
                            yield f"{entry.life} handed out {sorted(both)} of {' '.join(name)}"

    def _wrote_what_was_not_held(self) -> Iterable[str]:
        """A landing zone is held from before the first WRITE until the writers have said that they
        write no more; its writer's attested death counts as that."""
        held: dict[str, int] = {}
        let_go: dict[str, Entry] = {}
        for entry in self.named("landing_held"):
            held.setdefault(entry.lease, entry.at)
        for entry in self.named("landing_let_go"):
            let_go[entry.lease] = entry
        for entry in self.named("write_posted", "writes_over"):
            if entry.name == "write_posted" and held and entry.at < held.get(entry.lease, 0):
                yield f"{entry.life} wrote under {entry.lease} before its landing zone was held"
            end = let_go.get(entry.lease)
            if end is None or end.fields.get("reason") == "PEER_FENCED" or entry.at <= end.at:
                continue
            yield f"the landing zone of {entry.lease} was let go while {entry.life} wrote"

    def _one_incarnation_twice(self) -> Iterable[str]:
        """An incarnation is one boot's for ever."""
        boots: dict[tuple[str, int], str] = {}
        for entry in self.named("welcomed"):
            name = (str(entry.fields.get("lineage", "")), int(entry.fields["incarnation"]))
            life = boots.setdefault(name, entry.life)
            if life != entry.life:
                yield f"incarnation {name[1]} is of {life} and of {entry.life}"


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """JSON objects with an event; one may stand behind a prefix of vLLM's or another object, where
    two processes wrote at once, or be cut off."""
    decoder = json.JSONDecoder()
    for text in path.read_text(errors="replace").splitlines():
        start = text.find('{"')
        while start >= 0:
            try:
                line, end = decoder.raw_decode(text, start)
            except ValueError:
                end = start + 1
            else:
                if isinstance(line, dict) and isinstance(line.get("event"), str):
                    yield line
            start = text.find('{"', end)
