"""How is a column filled? A lease, what there is to do, one run of workers, commits meanwhile; again if others changed
the table under it."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dovetail.backfill.admission import clamp_note, how_to_run, stage_of, told_infeasible
from dovetail.backfill.budget import Budget
from dovetail.backfill.committing import Committer
from dovetail.backfill.dealing import Dealer
from dovetail.backfill.failures import row_failed
from dovetail.backfill.filled import Filled
from dovetail.backfill.forgetting import (
    RETRIED,
    forget_fragments,
    forget_what_is_computed,
    forget_what_was_before,
    settle_errors,
)
from dovetail.backfill.job import FillJob, Output
from dovetail.backfill.lance_table import NewFile
from dovetail.backfill.leases import held
from dovetail.backfill.notes import as_typed, cannot, dropped, not_mended, of_what_changed, of_what_is_there, taken_over
from dovetail.backfill.parts import parts_folder
from dovetail.backfill.past import write_carried
from dovetail.backfill.records import CANCELLED, DRAINED, FAILED, FINISHED, RUNNING, JobRecord, write_job
from dovetail.backfill.settling import Settling
from dovetail.backfill.telling import Telling
from dovetail.backfill.work import even_out, work_in
from dovetail.errors import DovetailError, InfeasibleError, Problem, RunError
from dovetail.pipeline.pipeline import Pipeline
from dovetail.running.running import run as start
from dovetail.scheduling.planner import plan as make_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dovetail.backfill.aiming import Aim
    from dovetail.backfill.asking import Asked
    from dovetail.backfill.job import Done
    from dovetail.backfill.lance_table import Committed, LanceTable
    from dovetail.backfill.lease import Lease
    from dovetail.backfill.store import Store
    from dovetail.backfill.udf import Udf
    from dovetail.backfill.work import Work
    from dovetail.running.handle import Run

ROUNDS = 20
"""How often others may change the table under it before it gives up."""
ASYNC_SLOTS = 16
RATE_S, RATE_ROWS = 1.0, 1_000


@dataclass
class Filling:
    """One call of `backfill`."""

    table: LanceTable
    store: Store
    udf: Udf
    aim: Aim
    asked: Asked
    run: str
    rate: float | None = None
    reads: tuple[str, ...] = ()
    """The function's columns, if they are others than those by which it counts as done."""
    renew: Callable[[], Aim] | None = None
    """Asked once nobody else fills the column."""
    failed_before: Callable[[], int] = lambda: 0
    """Rows that were set aside, and are not computed again."""
    committed: Callable[[Committed], None] = lambda _: None
    """Told of every commit, after what belongs to it is tidied up."""
    finished: Callable[[], None] = lambda: None
    """Called when all is done, before somebody else may fill the column."""
    filled: Filled = field(init=False)
    telling: Telling = field(init=False)
    _began: float = field(default_factory=time.monotonic)
    _gone: set[int] = field(default_factory=set)
    _run_began: float | None = None
    """Until something came back."""
    _budget: Budget = field(init=False)
    _settling: Settling = field(default_factory=Settling)
    _errors: Counter[int] = field(default_factory=Counter)
    """Rows of each fragment that failed."""
    _leases: list[Lease] = field(default_factory=list)
    _job_record: JobRecord = field(init=False)

    def __post_init__(self) -> None:
        column = self.aim.columns[0]
        self.filled = Filled(column, run=self.run, version=self.table.version)
        self._job_record = JobRecord(self.run, column, RUNNING, time.time())
        self._budget = Budget(column, None, 0, 0)
        self.telling = Telling(self.filled, self.asked.progress)

    # --- the whole

    def fill(self) -> Filled:
        """Raises what ended it; what is finished is committed in any case."""
        job = self._job_record
        job.udf, job.version = self.udf.reference or self.udf.name, self.udf.version
        job.where, job.engine = self.aim.where, self.asked.engine
        with held(self.store, self.aim.columns, self.run, wait=self.asked.wait, say=self.telling.say) as self._leases:
            if self.renew is not None:
                self.aim = self.renew()
            write_job(self.store, job)
            try:
                self._rounds()
                job.status = self.filled.status
                if job.status == FINISHED:
                    self._sweep()
                    self.finished()
            except KeyboardInterrupt:
                job.status = CANCELLED
                raise
            except BaseException as error:
                job.status, job.message = FAILED, _first_line(error)
                raise
            finally:
                self.telling.close()
                self.filled.seconds = time.monotonic() - self._began
                job.ended = time.time()
                self._write_down()
        return self.filled

    def _sweep(self) -> None:
        """Checkpoints that nobody goes on with: of fragments that are gone, and of other versions if all is done."""
        aim, store = self.aim, self.store
        if aim.fragments is None and aim.where is None and aim.only is None:
            store.delete_folder(f"{aim.folder}/parts")
        elif aim.fragments is None or aim.anew:
            store.delete_folder(parts_folder(aim.folder, aim.parts))
        for name in store.folders(f"{aim.folder}/parts") if aim.only is not None else ():
            if name.startswith(f"{aim.identity}{RETRIED}"):  # an attempt with another version of the function
                store.delete_folder(parts_folder(aim.folder, name))
        forget_fragments(store, aim, {fragment.id for fragment in self.table.newest().fragments()})

    def _write_down(self) -> None:
        job, filled = self._job_record, self.filled
        job.rows, job.errors = filled.rows, filled.errors
        job.fragments, job.workers = filled.fragments, filled.workers
        job.table_version = filled.version if filled.commits else 0
        with suppress(OSError, DovetailError):  # a full disk: what happened is told by what is raised
            write_job(self.store, job)

    def _rounds(self) -> None:
        for number in range(ROUNDS):
            self.table = even_out(self.table.newest(), self.aim)
            work = work_in(self.table, self.store, self._aim(number))
            if not number:
                self._tell_what_is_there(work)
            self._gone.clear()
            if self.aim.only is None and not self.aim.anew:
                write_carried(self.store, self._aim(number), work.carried)
            forget_what_is_computed(self.store, self.aim, work)
            if not number:
                self._look_at_the_budget(work)
            if not (work.tasks or work.files):
                return
            self._round(work)
            if not self._gone or self.filled.status == DRAINED:
                return
            self._check_what_it_reads()
            self._tell_what_changed()
            self._forget_errors(self._errors.keys() - {fragment.id for fragment in self.table.newest().fragments()})
        message = f"the table was changed {ROUNDS} times while it was filled"
        raise RunError(Problem("DT438", message, fixes=("call it again when nobody compacts or updates the table",)))

    def _check_what_it_reads(self) -> None:
        there = self.table.newest().schema.names
        names = [
            name for name in (*(self.reads or self.aim.inputs), *self.aim.watched(self.table)) if name not in there
        ]
        if names:
            raise dropped(self.udf.name, names, there)

    def _look_at_the_budget(self, work: Work) -> None:
        """Rows that failed in an earlier call, and are not computed again, count, too."""
        filled, limit = self.filled, self.asked.max_errors
        if limit is not None or not (work.tasks or work.files):
            filled.set_aside = self.failed_before()
        self._budget = Budget(self.aim.columns[0], limit, filled.set_aside, self._rows_asked_for(work))
        if self._budget.is_over(0):
            raise self._budget.error(0)

    def _rows_asked_for(self, work: Work) -> int:
        aim = self.aim
        if aim.only is not None:
            return sum(map(len, aim.only.values()))
        if aim.where is not None and isinstance(self.asked.max_errors, float):
            return self.table.count(aim.where)
        return work.rows + work.done_rows

    def _aim(self, number: int) -> Aim:
        """In later rounds what is left of it: of fragments that were named those that changed and are still there."""
        wanted = self.aim.fragments
        if not number or wanted is None:
            return self.aim
        if isinstance(wanted, int):
            return replace(self.aim, fragments=max(0, wanted - self.filled.fragments))
        return replace(self.aim, fragments=tuple(sorted(self._gone - self._vanished())))

    def _vanished(self) -> set[int]:
        return self._gone - {fragment.id for fragment in self.table.newest().fragments()}

    def _note(self, notes: Iterable[str]) -> None:
        for note in notes:
            self.filled.notes.append(note)
            self.telling.say(note)

    def _tell_what_is_there(self, work: Work) -> None:
        self.filled.done_before, self.filled.kept = work.done_rows, work.kept
        if work.kept:
            self.telling.say(f"going on: {work.kept:,} of {work.rows:,} rows are kept from an earlier call")
        if self.aim.where is None and not self.asked.recompute:
            self._note(of_what_is_there(work, self.aim.columns[0]))

    def _tell_what_changed(self) -> None:
        """Raises where going on makes no sense: rows have other addresses now."""
        vanished = self._vanished()
        if self.aim.only is not None:
            raise not_mended(self.aim.columns[0], len(self._gone), vanished=bool(vanished))
        named = isinstance(self.aim.fragments, tuple)
        self._note([of_what_changed(self.aim.columns[0], self._gone, vanished if named else set())])

    # --- one run

    def _round(self, work: Work) -> None:
        self.telling.begin(work.rows, work.rows - work.kept, work.fragments)
        self._settling = Settling(work.tasks)
        committer = Committer(self.table, self.asked.commit_every_s, self.aim.inputs_of, self._saw_commit, self._check)
        try:
            for file in work.files:
                committer.add(file)
            if work.tasks:
                self._run(work, committer)
                self._gone.update(self._settling.unsettled())
        except BaseException as error:
            try:
                committer.finish()
            except Exception as second:
                error.add_note(f"and what was finished could not be committed: {second}")
            raise
        else:
            committer.finish()
        finally:
            self.filled.times.commit += committer.seconds

    def _forget_errors(self, fragments: Iterable[int]) -> None:
        """Their rows are computed again."""
        self.filled.errors -= sum(self._errors.pop(number, 0) for number in list(fragments))

    def _check(self) -> None:
        """Whoever has taken the column over has values of its own there."""
        if not all(lease.still_ours() for lease in self._leases):
            raise taken_over(self.aim.columns[0])

    def _saw_commit(self, committed: Committed) -> None:
        filled = self.filled
        self._gone.update(committed.gone)
        self._forget_errors(committed.gone)
        if committed.fragments:
            filled.first_commit_s = filled.first_commit_s or time.monotonic() - self._began
            filled.commits += 1
            filled.fragments += len(committed.fragments)
            filled.version = committed.version
            self.telling.committed += len(committed.fragments)
        folder = parts_folder(self.aim.folder, self.aim.parts)
        done = {str(number) for number in (*committed.fragments, *committed.gone)}
        for name in self.store.folders(folder):
            if name.partition("-")[0] in done:
                self.store.delete_folder(f"{folder}/{name}")
        forget_what_was_before(self.store, self.aim, committed.inputs)
        if self.aim.anew:
            settle_errors(self.store, self.aim, committed.fragments)
        self.committed(committed)
        self._write_down()

    def _run(self, work: Work, committer: Committer) -> None:
        pipeline = Pipeline([stage_of(self._job(), self.udf, self.asked)], name="backfill")
        slots = pipeline.stages[0].slots or 1
        workers = self._workers(pipeline)
        dealer = Dealer(work.tasks, workers, slots, self.rate)
        self._run_began = time.monotonic()
        try:
            run = start(pipeline, iter(dealer), **how_to_run(self.asked, self.table.uri, self.aim.columns[0]))
        except InfeasibleError as error:
            raise told_infeasible(self.udf, self.asked, error) from None
        self.filled.folder = run.folder
        self._tell_workers(run)
        dealer.expect(self.filled.workers)
        try:
            for done in run:
                self._saw(done, dealer, committer)
            if dealer.has_more:  # a run that serves is finished also if it was drained
                self.filled.status = DRAINED
        finally:
            dealer.abandon()
        measured = dealer.measured
        if measured.seconds >= RATE_S or measured.rows >= RATE_ROWS:  # of less it is mostly the first call's
            self.rate = measured.rate

    def _workers(self, pipeline: Pipeline) -> int:
        """How many there will be, as far as that can be said before; what cannot fit at all fails here, at once."""
        from dovetail.engines.ray.where import is_ray

        if is_ray(self.asked.engine):
            return 1
        try:
            return make_plan(pipeline, self.asked.cluster).units[0].workers
        except InfeasibleError as error:
            raise told_infeasible(self.udf, self.asked, error) from None

    def _tell_workers(self, run: Run) -> None:
        self.filled.workers = run.plan.units[0].workers
        note = clamp_note(self.udf, self.asked, run.plan)
        if note and note not in self.filled.notes:
            self.filled.notes.append(note)
            self.telling.say(note)

    def _job(self) -> FillJob:
        ids = self.table.field_ids()
        outputs = tuple(Output(name, ids[name], self.table.schema.field(name).type) for name in self.aim.columns)
        asked, udf = self.asked, self.udf
        slots = asked.slots or udf.slots
        return FillJob(
            uri=self.table.uri,
            storage=self.table.storage,
            version=self.table.version,
            folder=self.aim.folder,
            inputs=self.reads or self.aim.inputs,
            outputs=outputs,
            identity=self.aim.identity,
            parts=self.aim.parts,
            run=self.run,
            on_error=asked.on_error or udf.on_error,
            batch_size=asked.batch_size or udf.batch_size,
            timeout_s=asked.timeout_s or udf.timeout_s,
            slots=(slots or ASYNC_SLOTS) if udf.is_async else 1,
            where=self.aim.where,
            masked=self.aim.masked,
            watched=self.aim.watched(self.table),
        )

    # --- what comes back

    def _saw(self, done: Done, dealer: Dealer, committer: Committer) -> None:
        filled = self.filled
        if self._run_began is not None:
            filled.times.start += max(0.0, time.monotonic() - self._run_began - done.busy_s)
            self._run_began = None
        filled.rows += done.computed
        filled.errors += done.errors
        self._errors[done.task.fragment] += done.errors
        filled.times.add(done.times)
        self._saw_rows(done, dealer, committer)
        if self._settling.is_hopeless(done):
            dealer.stop(cannot(done, self.table.uri))
        elif done.failed is not None:
            more = as_typed("" if self.udf.reference else self.udf.name, self.aim.where, self.asked.fragments)
            dealer.stop(row_failed(done.failed, self.aim.columns[0], "what is finished is committed", more))
        elif self._budget.is_over(filled.errors):
            dealer.stop(self._budget.error(filled.errors))
        elif any(lease.lost() for lease in self._leases):
            dealer.stop(taken_over(self.aim.columns[0]))
        elif committer.error is not None:  # nothing of what is computed could be kept
            dealer.stop(committer.error)
        dealer.settle(done)
        self.telling.rows_left = dealer.rows_left
        self.telling.saw()

    def _saw_rows(self, done: Done, dealer: Dealer, committer: Committer) -> None:
        task, more = done.task, self._settling.saw(done)
        if more is None:
            return
        for one in more:
            dealer.add(one)
        if done.gone:
            self._gone.add(task.fragment)
        if done.file:
            fields = self.aim.fields(self.table)
            committer.add(NewFile(task.fragment, done.file, fields, task.inputs, done.size_bytes, task.before))


def _first_line(error: BaseException) -> str:
    problems = getattr(error, "problems", ())
    return problems[0].message if problems else f"{type(error).__name__}: {error}".splitlines()[0][:500]
