"""Many leases extended at once, because their destination says that it still needs them.

The order is the one of a single renewal: the source first, its answer awaited, then the
destination with a fresh `as_of`, within the guard. What differs is that nothing is done a lease at
a time: who may have which is decided on columns, one command to a source names all of its leases,
and neither versions nor records are written.

No record: a deadline decides nothing that a restart would have to know exactly. A start counts
every open lease for one TTL more, which is as long as any destination may have been told to count.
No version: these commands are read in their place on the stream, and never shorten anything.
Watchers are told when the deadline that they know has passed (`tell`): once a TTL instead of at
each renewal, and so many at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvshuttle.controlplane.model import admission
from kvshuttle.controlplane.model.commands import ExtendLeases
from kvshuttle.controlplane.model.state import Extension
from kvshuttle.controlplane.model.terms import LeaseState

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvshuttle.controlplane.model.lease_table import Slots
    from kvshuttle.controlplane.model.terms import WorkerRef
    from kvshuttle.controlplane.model.work import Work

__all__ = ["extended", "needed", "tell"]


def _going(w: Work, slots: Slots) -> npt.NDArray[np.bool_]:
    """Granted, not ended, and nobody has asked their destination to stop."""
    leases = w.state.leases
    state = leases.state[slots]
    going: npt.NDArray[np.bool_] = (state == LeaseState.GRANTED) | (state == LeaseState.ACTIVE)
    going &= ~leases.stopping[slots]
    return going


def needed(w: Work, ref: WorkerRef, epoch: int, seqs: npt.NDArray[np.uint64]) -> None:
    """A destination needs these leases. What is not its own, has ended or is being stopped is
    left out, and what would outlive the longest life of a lease, or a budget."""
    state, limits = w.state, w.limits
    leases = state.leases
    slots = np.unique(leases.slots(epoch, seqs[: limits.extensions_per_message]))
    ok = _going(w, slots)
    ok &= leases.destination[slots] == leases.number_of(ref)
    until_ns = w.now_ns + limits.guard_ns + limits.lease_ttl_ns
    ok &= leases.create_ns[slots] >= until_ns - limits.lease_lifetime_max_ns
    slots = slots[ok]
    _forget_old(w)
    for number in np.unique(leases.source[slots]):
        source: WorkerRef = leases.name_of(int(number))
        worker = w.worker(source)
        if worker is None or not worker.connected:
            continue
        mine = slots[leases.source[slots] == number]
        for tenant in np.unique(leases.tenant[mine]):
            if not admission.may_extend(w, worker, leases.name_of(int(tenant))):
                mine = mine[leases.tenant[mine] != tenant]
        if not len(mine):
            continue
        state.extension_seq += 1
        named = leases.seq[mine]
        state.extensions[state.extension_seq] = Extension(
            source, ref, epoch, named, limits.lease_ttl_ns, w.now_ns
        )
        w.command(
            source,
            ExtendLeases(
                state.extension_seq, epoch, named, limits.lease_ttl_ns, limits.guard_ns, 0, True
            ),
        )


def _forget_old(w: Work) -> None:
    """Answers that would come too late now need not be waited for."""
    extensions = w.state.extensions
    while extensions:
        number, oldest = next(iter(extensions.items()))
        if w.now_ns - oldest.asked_ns <= w.limits.guard_ns:
            return
        del extensions[number]


def extended(w: Work, ref: WorkerRef, number: int, missing: npt.NDArray[np.uint64]) -> None:
    """A source holds longer, all but what it does not have any more. What has ended or was stopped
    meanwhile is left out again. ValueError if more is missing than was asked for."""
    asked = w.state.extensions.get(number)
    if asked is None or asked.source != ref:
        return
    if len(missing) > len(asked.seqs):
        raise ValueError(f"{len(missing)} leases are missing, of {len(asked.seqs)} to be extended")
    del w.state.extensions[number]
    destination = w.worker(asked.destination)
    late = w.now_ns - asked.asked_ns > w.limits.guard_ns
    if late or destination is None or not destination.connected:
        return
    leases = w.state.leases
    seqs = asked.seqs[~np.isin(asked.seqs, missing)] if len(missing) else asked.seqs
    slots = leases.slots(asked.epoch, seqs)
    slots = slots[_going(w, slots)]
    if not len(slots):
        return
    leases.extend(slots, w.now_ns + asked.ttl_ns)
    w.command(
        asked.destination,
        ExtendLeases(
            0,
            asked.epoch,
            leases.seq[slots],
            asked.ttl_ns,
            w.limits.guard_ns,
            destination.clock,
            False,
        ),
    )
    w.fact("leases_extended", worker_id=asked.destination.worker_id, leases=len(slots))


def tell(w: Work) -> None:
    """Shows watchers that leases go on whose deadline, as they know it, has passed. Nothing else of
    them has changed, so their version stays."""
    if w.now_ns - w.state.told_ns < w.limits.tick_ns:
        return  # ticks come faster while much is due; watchers need not
    w.state.told_ns = w.now_ns
    for lease_id in w.state.leases.outdated(w.now_ns, w.limits.told_per_tick):
        w.put_lease(w.state.leases[lease_id], durable=False)
