"""The steps of a store over its table: submit, exchange, cancel, requeue, purge, schedules. Pure: time is an argument.

A store makes one `Transaction` per step, commits what it has put into the table, and then wakes what `effects` lists.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heapify, heappop, heapreplace
from typing import TYPE_CHECKING

from dovetail.jobs import state_machine
from dovetail.jobs.admission import FreeCapacity
from dovetail.jobs.claim_reservations import ClaimReservations
from dovetail.jobs.free_vector import shared_free
from dovetail.jobs.gang_placement import place_gang
from dovetail.jobs.job import REQUEUEABLE, Gang, JobState, Lease, Member, Outcome
from dovetail.jobs.ordering import order_of
from dovetail.jobs.preemption import Candidate, KeptRoom, choose_preempted
from dovetail.jobs.queue_shares import QueueShares
from dovetail.jobs.store import (
    DUE_PER_STEP,
    PLAIN_QUEUE,
    ClaimedJob,
    Completion,
    GangPlace,
    LeaseId,
    Offer,
    Purged,
    Receipt,
    Reply,
    Schedule,
)
from dovetail.jobs.worker_choice import DEFERRAL_KEPT_MS, OtherWorkers, placement_rank
from dovetail.jobs.worker_liveness import WORKER_FORGOTTEN_MS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.jobs.admission import Admission
    from dovetail.jobs.job import JobRecord, JobSpec
    from dovetail.jobs.job_table import Bucket, JobTable
    from dovetail.jobs.store import BatchRoom, Claim, Exchange, JobFilter, OfferingWorker, QueueSettings, WorkerInfo
    from dovetail.resources.free_resources import FreeResources

LEASE_EXPIRED = "the lease expired: its worker was killed, stopped or cut off"


@dataclass(slots=True)
class Effects:
    """Changes of a step for which workers or submitters wait."""

    queues: set[str] = field(default_factory=set)
    """Queues in which a job became ready or was scheduled."""
    workers: set[str] = field(default_factory=set)
    """Workers that hold a job whose cancellation or preemption was requested, or whose attempt has ended elsewhere, and
    those that should run a job."""
    finished: set[str] = field(default_factory=set)
    """Jobs that finished."""
    all_workers: bool = False
    """A schedule or a pause changed."""


@dataclass(slots=True)
class ClaimState:
    """State of a claim while it is decided."""

    worker: str
    claim: Claim
    lease_ms: int
    queues: list[str]
    """Queues that give jobs, without duplicates."""
    shares: QueueShares
    room: FreeCapacity
    """Remaining room of the worker."""
    gang_address: str
    """HOST:PORT at which rank 0 of the next gang listens; "" if the claim takes no gang."""
    reservations: ClaimReservations
    kept: KeptRoom | None = None
    """Room that is kept for jobs for which others are being ended."""
    claimed: list[ClaimedJob] = field(default_factory=list)


class Transaction:
    """One atomic step of a store, at one time."""

    def __init__(self, table: JobTable, now_ms: int, admission: Admission) -> None:
        self.now_ms = now_ms
        self.effects = Effects()
        self._table = table
        self._admission = admission
        self._known_settings: Mapping[str, QueueSettings] | None = None
        self._offering: list[OfferingWorker] | None = None
        self._others: OtherWorkers | None = None
        self._retry_ms: int | None = None
        """Earliest time at which a claim may take a job that this worker has left to another one."""
        self._preemptors: set[str] = set()
        """Jobs for which others ended in this step."""
        self._preempted: list[str] = []
        """Jobs of the worker that must end for others."""

    # --- steps of submitters

    def submit(self, specs: Sequence[JobSpec]) -> list[Receipt]:
        self._table.prefetch([other for spec in specs for other in (spec.id, *spec.after)])
        return [self._submit(spec) for spec in specs]

    def cancel(self, ids: Sequence[str], reason: str) -> list[JobState | None]:
        self._table.prefetch(ids)
        return [self._cancel(job_id, reason) for job_id in ids]

    def requeue(self, ids: Sequence[str]) -> list[JobState | None]:
        self._table.prefetch(ids)
        return [self._requeue(job_id) for job_id in ids]

    def purge(self, chosen: JobFilter, limit: int, keep_bytes: int | None) -> Purged:
        excess = 0 if keep_bytes is None else self._table.finished_bytes(chosen) - keep_bytes
        removed: list[JobRecord] = []
        removed_bytes = 0
        for job_id, size in self._table.finished(chosen):
            if len(removed) >= limit or (keep_bytes is not None and removed_bytes >= excess):
                break
            record = self._table.get(job_id)
            if record is None or self._table.dependants(job_id):
                continue
            removed.append(record)
            removed_bytes += size
        for record in removed:
            self._table.delete(record)
        return Purged(len(removed), removed_bytes)

    # --- steps of workers

    def exchange(self, request: Exchange) -> Reply:
        self._table.prefetch([item.job_id for item in request.completions])
        self._table.prefetch([item.job_id for item in request.renewals])
        refused = [
            LeaseId(item.job_id, item.token) for item in request.completions if not self._complete(request, item)
        ]
        cancelled: list[str] = []
        for renewal in request.renewals:
            record = self._leased(renewal.job_id, renewal.token)
            if record is None:
                refused.append(LeaseId(renewal.job_id, renewal.token))
                continue
            progress = renewal.progress, renewal.message
            self._put(state_machine.renewed(self.now_ms, record, request.lease_ms, *progress, request.worker))
            if record.cancel_requested:
                cancelled.append(record.id)
            if record.preempted_for is not None:
                self._preempted.append(record.id)
        if request.claim is None:
            known = self._table.heartbeat(request.worker, self.now_ms, None)
            return Reply(self.now_ms, (), refused, cancelled, self._preempted, known=known)
        self._handle_due()
        claimed, room = self._claim(request.worker, request.claim, request.lease_ms)
        ends_ms = self._ends_ms(request.claim, claimed)
        offer = Offer(self.now_ms, request.lease_ms, room.slots, shared_free(room.free), ends_ms)
        known = self._table.heartbeat(request.worker, self.now_ms, offer)
        schedules = self._table.schedules()
        due = [schedule for schedule in schedules if schedule.next_ms <= self.now_ms]
        times = [self._table.next_due_ms(), self._retry_ms, *(schedule.next_ms for schedule in schedules)]
        next_ms = min((time_ms for time_ms in times if time_ms is not None), default=None)
        return Reply(self.now_ms, claimed, refused, cancelled, self._preempted, next_ms, due, known)

    def register_worker(self, worker: WorkerInfo) -> None:
        for other in self._table.workers():
            if other.heartbeat_ms < self.now_ms - WORKER_FORGOTTEN_MS and not other.leases:
                self._table.delete_worker(other.id)
        self._table.put_worker(replace(worker, registered_ms=self.now_ms, heartbeat_ms=self.now_ms, offer=None))

    # --- queues and schedules

    def set_paused(self, queue: str, paused: bool) -> None:
        self._table.put_queue_settings(queue, self._settings_of(queue)._replace(paused=paused))
        # a worker that is reserved for a job of a paused queue takes others
        self.effects.all_workers = not paused or queue in self._table.reservations()

    def set_limits(self, queue: str, weight: int | None, max_running: int | None) -> None:
        after = self._settings_of(queue)._replace(weight=weight, max_running=max_running)
        self._table.put_queue_settings(queue, after)
        self.effects.all_workers = True

    def put_schedule(self, schedule: Schedule) -> None:
        before = self._schedule(schedule.name)
        if before is not None and _declaration(before) == _declaration(schedule):
            return
        self._table.put_schedule(schedule)
        self.effects.all_workers = True

    def remove_schedule(self, name: str) -> bool:
        found = self._schedule(name) is not None
        self._table.delete_schedule(name)
        return found

    def fire(self, name: str, fire_ms: int, next_ms: int, spec: JobSpec) -> Receipt | None:
        schedule = self._schedule(name)
        if schedule is None or schedule.next_ms != fire_ms:
            return None
        self._table.put_schedule(replace(schedule, next_ms=next_ms))
        [receipt] = self.submit([spec])
        return receipt

    # --- parts

    def _submit(self, spec: JobSpec) -> Receipt:
        if self._table.get(spec.id) is not None:
            return Receipt(spec.id, created=False)
        if spec.key is not None:
            known = self._table.id_of_key(spec.key)
            if known is not None:
                return Receipt(known, created=False)
        others = {other: self._table.get(other) for other in spec.after}
        missing = tuple(other for other, record in others.items() if record is None)
        if missing:
            return Receipt(spec.id, created=False, missing=missing)
        unmet = [other for other, record in others.items() if record and record.state is not JobState.SUCCEEDED]
        failed = next((other for other in unmet if (record := others[other]) and record.state.is_finished), "")
        self._put(state_machine.submitted(self.now_ms, spec, unmet, failed))
        return Receipt(spec.id, created=True)

    def _cancel(self, job_id: str, reason: str) -> JobState | None:
        record = self._table.get(job_id)
        if record is None or record.state.is_finished:
            return record.state if record else None
        after = state_machine.cancelled(self.now_ms, record, reason)
        if record.state is JobState.READY:
            self._release_reservation(record)
        self._put(after)
        self.effects.workers.update(after.workers)
        return after.state

    def _release_reservation(self, record: JobRecord) -> None:
        """Handle a job that no longer waits: the worker that is reserved for it can take others."""
        found = self._table.reservations().get(record.spec.queue)
        if found is not None and found.job_id == record.id:
            self._table.delete_reservation(found.queue)
            self.effects.workers.add(found.worker)

    def _requeue(self, job_id: str) -> JobState | None:
        record = self._table.get(job_id)
        if record is None or record.state not in REQUEUEABLE:
            return record.state if record else None
        others = {other: self._table.get(other) for other in record.spec.after}
        unmet = [other for other, found in others.items() if found and found.state is not JobState.SUCCEEDED]
        after = state_machine.requeued(self.now_ms, record, unmet)
        self._put(after)
        return after.state

    def _leased(self, job_id: str, token: int) -> JobRecord | None:
        record = self._table.get(job_id)
        valid = record is not None and record.state is JobState.LEASED and record.token == token
        return record if valid else None

    def _complete(self, request: Exchange, completion: Completion) -> bool:
        """Apply a completion. Returns False if the lease is no longer valid."""
        record = self._leased(completion.job_id, completion.token)
        if record is None:
            known = self._table.get(completion.job_id)
            return known is not None and state_machine.is_repeated(known, completion, request.worker)
        if not state_machine.has_member(record, request.worker, completion.rank):
            return False
        if state_machine.has_ended(record, completion):
            return True
        if record.preempted_for is not None:
            self._preemptors.add(record.preempted_for)
        self._put(state_machine.completed(self.now_ms, record, completion))
        self._wake_members(record)
        return True

    def _wake_members(self, before: JobRecord) -> None:
        """Wake the workers of a gang if its attempt has ended."""
        after = self._table.get(before.id)
        if before.gang is not None and (after is None or after.token != before.token or after.gang is None):
            self.effects.workers.update(before.workers)

    def _handle_due(self) -> None:
        for record in self._table.due(self.now_ms, DUE_PER_STEP):
            if record.state is JobState.SCHEDULED:
                self._put(state_machine.promoted(record))
            else:
                rank = state_machine.expired_rank(record)
                lost = Completion(record.id, record.token, Outcome.LOST, error=LEASE_EXPIRED, rank=rank)
                self._put(state_machine.expired(self.now_ms, record, lost))
                self._wake_members(record)

    def _claim(self, worker: str, claim: Claim, lease_ms: int) -> tuple[list[ClaimedJob], FreeCapacity]:
        """Claim jobs. Returns them, and the remaining room."""
        queues = [queue for queue in dict.fromkeys(claim.queues) if not self._settings_of(queue).paused]
        shares = QueueShares(queues, self._settings, self._table.leased_jobs)
        claimed, room = self._send_members(worker, FreeCapacity(claim.slots, claim.free), lease_ms)
        claim = replace(claim, slots=room.slots, free=room.free) if claimed else claim
        claimed += self._fill_batches(worker, claim.batches, queues, shares, lease_ms)
        if not queues or (room.slots <= 0 and not claim.preemptible):
            return claimed, room
        others = partial(self._other_offers, worker)
        reservations = ClaimReservations(self._table, self._admission, self.now_ms, worker, claim, others)
        state = ClaimState(worker, claim, lease_ms, queues, shares, room, claim.address, reservations)
        state.claimed += claimed
        candidates = self._preemption_candidates(state)
        self._keep_room(state, candidates)
        if claim.slots > 0:
            reservations.hold(queues, shares)
        if state.kept is not None:
            self._claim_kept(state, state.kept)
        if state.room.slots > 0:
            self._claim_in_order(state)
        if candidates:
            self._preempt(state, candidates)
        self.effects.workers |= reservations.woken
        is_kept = state.kept is not None and state.kept.waiting
        return state.claimed, state.room._replace(slots=0) if is_kept else state.room

    def _claim_in_order(self, state: ClaimState) -> None:
        """Claim the first jobs of buckets in order, as long as they fit."""
        shares = state.shares
        buckets = self._table.buckets(state.queues, state.room.slots)
        groups = _groups(buckets, shares)
        while groups and state.room.slots > 0:
            group = shares.next_group(groups)
            heads = groups[group]
            bucket = buckets[heads[0][1]]
            record = bucket.peek()
            assert record is not None
            if not self._try_claim(state, record):
                _pop_head(groups, group)
                continue
            bucket.pop()
            following = bucket.peek()
            if following is None:
                _pop_head(groups, group)
            else:
                heapreplace(heads, (order_of(following), heads[0][1]))

    def _try_claim(self, state: ClaimState, record: JobRecord) -> bool:
        """Claim the first job of a bucket, if the policies allow it and it fits."""
        if state.shares.is_full(record.spec.queue):
            return False
        if record.shape.ranks > 1:
            return self._try_claim_gang(state, record)
        remaining = self._room_after(state, record)
        if remaining is None:
            return False
        state.room = remaining
        state.claimed.append(self._lease(state, record))
        return True

    def _room_after(self, state: ClaimState, record: JobRecord) -> FreeCapacity | None:
        """The room after the start of this job; None if the claim does not take it."""
        room, reservations = state.room, state.reservations
        remaining = room.after_start(record.shape, self._admission)
        if remaining is None:
            reservations.on_unfit(record)
            return None
        if state.kept is not None and not state.kept.has_room_after(remaining):
            return None
        if not reservations.may_take(record, room.free, room.slots):
            return None
        if reservations.is_held_for(record):
            return remaining
        is_left = self._is_left_to_another(state.worker, state.claim, record, room.free)
        return None if is_left else remaining

    def _ends_ms(self, claim: Claim, claimed: Sequence[ClaimedJob]) -> int | None:
        """Time at which all jobs of the worker will have ended, by their timeouts; None if it is not known, as after a
        gang."""
        if claim.ends_in_ms is None:
            return None
        timeouts = [job.spec.timeout_ms for job in claimed if job.gang is None]
        known = [timeout_ms for timeout_ms in timeouts if timeout_ms is not None]
        return self.now_ms + max([claim.ends_in_ms, *known]) if len(known) == len(claimed) else None

    def _other_offers(self, worker: str) -> list[OfferingWorker]:
        """Other workers with a live offer."""
        if self._offering is None:
            found = self._table.offering_workers(self.now_ms)
            self._offering = [other for other in found if other.id != worker]
        return self._offering

    def _lease(self, state: ClaimState, record: JobRecord) -> ClaimedJob:
        state.shares.count(record.spec.queue)
        state.reservations.on_taken(record)
        return self._leased_to(state.worker, record, state.lease_ms)

    def _leased_to(self, worker: str, record: JobRecord, lease_ms: int) -> ClaimedJob:
        after = state_machine.claimed(self.now_ms, record, worker, lease_ms)
        self._put(after)
        lease = after.lease
        assert lease is not None
        return ClaimedJob(after.spec, after.shape, lease)

    # --- gangs

    def _send_members(self, worker: str, room: FreeCapacity, lease_ms: int) -> tuple[list[ClaimedJob], FreeCapacity]:
        """The ranks of gangs that other claims have placed on this worker, and the remaining room."""
        sent: list[ClaimedJob] = []
        for job_id in self._table.assigned(worker):
            record = self._table.get(job_id)
            assert record is not None
            assert record.gang is not None
            unsent = [item.worker == worker and not item.is_sent for item in record.gang.members]
            after = state_machine.members_sent(self.now_ms, record, worker, lease_ms)
            self._put(after)
            payload = self._table.payload(record)
            for rank, is_unsent in enumerate(unsent):
                if is_unsent:
                    sent.append(self._member(after, rank, self.now_ms + lease_ms, payload))
                    # if it no longer fits, the worker returns it
                    room = room.after_start(record.shape.rank, self._admission) or room
        return sent, room

    def _try_claim_gang(self, state: ClaimState, record: JobRecord) -> bool:
        """Place all ranks of a gang. Returns False if they do not fit."""
        if not state.gang_address or not state.reservations.may_take_gang(record):
            return False
        reserved = state.reservations.reserved_workers()
        others = {
            other.id: other.offer
            for other in self._other_offers(state.worker)
            if record.spec.queue in other.queues and other.id not in reserved
        }
        rooms = [(name, FreeCapacity(offer.slots, offer.free)) for name, offer in others.items()]
        placement = place_gang(self._admission, record.shape, state.worker, state.room, rooms)
        if placement is None:
            return False
        room = placement.rooms.pop(state.worker)
        if state.kept is not None and not state.kept.has_room_after(room):
            return False
        deadline_ms = self.now_ms + state.lease_ms
        members = tuple(Member(name, deadline_ms, is_sent=name == state.worker) for name in placement.workers)
        gang = Gang(members, state.gang_address)
        state.shares.count(record.spec.queue)
        after = state_machine.claimed(self.now_ms, record, state.worker, state.lease_ms, gang)
        self._put(after)
        for name, left in placement.rooms.items():
            self._table.put_offer(name, others[name]._replace(slots=left.slots, free=left.free, ends_ms=None))
            self.effects.workers.add(name)
        self._offering = self._others = None  # the offers have become smaller
        ranks = [rank for rank, name in enumerate(placement.workers) if name == state.worker]
        state.claimed += [self._member(after, rank, deadline_ms, record.spec.payload) for rank in ranks]
        state.room, state.gang_address = room, ""
        return True

    def _member(self, record: JobRecord, rank: int, deadline_ms: int, payload: bytes) -> ClaimedJob:
        assert record.gang is not None
        lease = Lease(record.id, record.token, record.attempt, deadline_ms)
        place = GangPlace(record.gang.address, record.gang.workers)
        return ClaimedJob(replace(record.spec, payload=payload), record.shape, lease, rank, place)

    # --- batches

    def _fill_batches(
        self, worker: str, batches: Sequence[BatchRoom], queues: Sequence[str], shares: QueueShares, lease_ms: int
    ) -> list[ClaimedJob]:
        """Jobs for the batches that the worker is filling."""
        claimed: list[ClaimedJob] = []
        for batch in batches:
            bucket = self._bucket(batch) if batch.queue in queues else None
            jobs = payload_bytes = 0
            while bucket is not None and jobs < batch.jobs and not shares.is_full(batch.queue):
                record = bucket.peek()
                is_small = batch.payload_bytes is None or payload_bytes < batch.payload_bytes
                if record is None or record.attempt or not is_small:
                    break
                bucket.pop()
                jobs += 1
                payload_bytes += len(record.spec.payload)
                self._release_reservation(record)
                shares.count(batch.queue)
                claimed.append(self._leased_to(worker, record, lease_ms))
        return claimed

    def _bucket(self, batch: BatchRoom) -> Bucket | None:
        for bucket in self._table.buckets([batch.queue], batch.jobs):
            record = bucket.peek()
            if record is not None and record.shape == batch.shape:
                return bucket
        return None

    # --- preemption

    def _preemption_candidates(self, state: ClaimState) -> list[Candidate]:
        """The preemptible jobs that the worker runs."""
        self._table.prefetch([held.job_id for held in state.claim.preemptible])
        found = ((held, self._leased(held.job_id, held.token)) for held in state.claim.preemptible)
        return [
            Candidate(record, held)
            for held, record in found
            if record is not None and state.worker in record.workers and record.spec.preemptible
        ]

    def _keep_room(self, state: ClaimState, candidates: Sequence[Candidate]) -> None:
        """Keep room for jobs for which others are being ended."""
        preemptors = {one.record.preempted_for for one in candidates if one.record.preempted_for} | self._preemptors
        if not preemptors:
            return
        self._table.prefetch(sorted(preemptors))
        waiting = [
            record
            for job_id in sorted(preemptors)
            if (record := self._table.get(job_id))
            and record.state is JobState.READY
            and record.spec.queue in state.queues
            and not state.shares.is_full(record.spec.queue)
        ]
        state.kept = KeptRoom(self._admission, waiting, _ending(candidates), state.room)

    def _claim_kept(self, state: ClaimState, kept: KeptRoom) -> None:
        """Claim the jobs for which room was kept, if they fit now."""
        is_full = state.shares.is_full
        while (started := kept.take_startable(state.room, lambda record: not is_full(record.spec.queue))) is not None:
            record, state.room = started
            job = self._lease(state, record)
            state.claimed.append(job._replace(spec=replace(job.spec, payload=self._table.payload(record))))

    def _has_offer(self, record: JobRecord, others: Sequence[OfferingWorker]) -> bool:
        """Whether a job fits on another live worker now."""
        return any(
            record.spec.queue in other.queues
            and other.offer.slots > 0
            and self._admission.take(record.shape, other.offer.free) is not None
            for other in others
        )

    def _preempt(self, state: ClaimState, candidates: Sequence[Candidate]) -> None:
        """Request the end of jobs for the first jobs of buckets that fit on no worker."""
        ending, running = _ending(candidates), [one for one in candidates if not _is_ending(one)]
        if not running:
            return
        kept = state.kept = state.kept or KeptRoom(self._admission, (), ending, state.room)
        waiting = {record.id for record in kept.waiting}
        others = self._other_offers(state.worker)
        queues = [queue for queue in state.queues if not state.shares.is_full(queue)]
        heads = [record for bucket in self._table.buckets(queues, 1) if (record := bucket.peek())] if queues else []
        heads = [record for record in heads if record.shape.ranks == 1]
        for head in sorted(heads, key=order_of):
            later = None if head.id in waiting or self._has_offer(head, others) else kept.left(state.room)
            chosen = [] if later is None else choose_preempted(self._admission, head, later, running)
            for candidate in chosen:
                self._put(state_machine.preemption_requested(candidate.record, head.id))
                self._preempted.append(candidate.record.id)
                self.effects.workers.update(one for one in candidate.record.workers if one != state.worker)
                running.remove(candidate)
            if chosen:
                kept.keep(head, chosen)

    def _is_left_to_another(self, worker: str, claim: Claim, record: JobRecord, free: FreeResources) -> bool:
        """Whether a claim leaves a job that fits to a better worker, which is then woken."""
        if not claim.placement_delay_ms or not free.cards.free:
            return False
        if self._others is None:
            self._others = OtherWorkers(self._table.offer_groups(self.now_ms), worker, self._admission)
        rank = placement_rank(record.shape, free)
        better = self._others.best_before(rank, record.spec.queue, record.shape)
        if better is None:
            return False
        deferred_ms = self._table.deferred_ms(record.id)
        if deferred_ms is None or deferred_ms < self.now_ms - DEFERRAL_KEPT_MS:
            deferred_ms = self.now_ms
            self._table.put_deferral(record.id, self.now_ms, self.now_ms - DEFERRAL_KEPT_MS)
        until_ms = deferred_ms + claim.placement_delay_ms
        if until_ms <= self.now_ms:
            return False
        self._others.leave(better, record.shape)
        self.effects.workers.add(better)
        self._retry_ms = until_ms if self._retry_ms is None else min(self._retry_ms, until_ms)
        return True

    def _schedule(self, name: str) -> Schedule | None:
        return next((schedule for schedule in self._table.schedules() if schedule.name == name), None)

    def _put(self, record: JobRecord) -> None:
        """Store a record, then the changes of the jobs that depend on it, directly or not."""
        changed = [record]
        while changed:
            record = changed.pop()
            if self._settings:
                self._wake_for_limit(record)
            self._table.put(record)
            if record.state in (JobState.READY, JobState.SCHEDULED):
                self.effects.queues.add(record.spec.queue)
            elif record.state.is_finished:
                self.effects.finished.add(record.id)
                changed += self._changed_dependants(record)

    def _wake_for_limit(self, after: JobRecord) -> None:
        """Handle a job that leaves a queue with a limit, so that another one can start."""
        queue = after.spec.queue
        if after.state is not JobState.LEASED and self._settings_of(queue).max_running is not None:
            before = self._table.get(after.id)
            if before is not None and before.state is JobState.LEASED:
                self.effects.queues.add(queue)

    @property
    def _settings(self) -> Mapping[str, QueueSettings]:
        if self._known_settings is None:
            self._known_settings = self._table.queue_settings()
        return self._known_settings

    def _settings_of(self, queue: str) -> QueueSettings:
        return self._settings.get(queue, PLAIN_QUEUE)

    def _changed_dependants(self, finished: JobRecord) -> list[JobRecord]:
        decide = (
            state_machine.dependency_succeeded
            if finished.state is JobState.SUCCEEDED
            else state_machine.dependency_failed
        )
        decided = [(before, decide(self.now_ms, before, finished.id)) for before in self._table.dependants(finished.id)]
        return [after for before, after in decided if after is not before]


Heads = list[tuple[tuple[int, str], int]]
"""A heap: order of the first job of a bucket, and the number of the bucket."""


def _groups(buckets: Sequence[Bucket], shares: QueueShares) -> dict[str, Heads]:
    """First jobs of the buckets, by the group of their queue."""
    groups: dict[str, Heads] = {}
    for index, bucket in enumerate(buckets):
        record = bucket.peek()
        if record is not None:
            groups.setdefault(shares.group_of(record.spec.queue), []).append((order_of(record), index))
    for heads in groups.values():
        heapify(heads)
    return groups


def _pop_head(groups: dict[str, Heads], group: str) -> None:
    heappop(groups[group])
    if not groups[group]:
        del groups[group]


def _is_ending(candidate: Candidate) -> bool:
    return candidate.record.cancel_requested or candidate.record.preempted_for is not None


def _ending(candidates: Sequence[Candidate]) -> list[Candidate]:
    return [one for one in candidates if _is_ending(one)]


def _declaration(schedule: Schedule) -> tuple[object, ...]:
    template = replace(schedule.template, id="")
    return schedule.cron, schedule.timezone, template
