"""Broken workers: which failures are the fault of the worker, and replacement of such a worker.

An exception that means a broken process (`CallFailure.worker_broken`) replaces its worker at once. Otherwise items that
fail are held until their worker passes another call, has nothing else to do, or is suspected (`broken_worker_rule`):

| the worker | its held items |
|---|---|
| passes another call, or becomes idle | are charged: retried, or given up |
| is suspected | are tried on workers whose last call passed; if there is none, the worker is replaced first |
| is suspected, and one passes elsewhere | the worker is replaced; the others are charged only if they fail again |
| is suspected, and all fail elsewhere | are charged when those workers pass another call; the worker continues |
| dies, or is replaced | are retried without being charged |

Items that failed first in a worker that was found to be broken, or with whose call it broke, get one further call: if
it fails, they are to blame and fail, whatever `retries` is, and that worker is replaced, too. Stages with
`on_error="fail"` hold nothing: their items are retried at once, up to `retries` times, and their suspected workers are
replaced without a trial. A service holds nothing of the first failure of a streak, because a request waits for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.control.events import FailureCause
from dovetail.control.lifecycle import WorkerState
from dovetail.pipeline.units import short_unit_name
from dovetail.streaming.broken_worker_rule import is_suspicious
from dovetail.streaming.failure_streak import MAX_HELD_CALLS, Trial
from dovetail.streaming.retry import suspects_of_failure

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dovetail.control.events import CallFailure
    from dovetail.streaming.epochs import EpochTracker
    from dovetail.streaming.failure_streak import FailureStreak
    from dovetail.streaming.fleet import Fleet
    from dovetail.streaming.retry import FailureHandler
    from dovetail.streaming.state import StreamState, UnitState
    from dovetail.streaming.worker_pool import Message, Suspect, Worker


class BrokenWorkers:
    """Decides whether items or their worker are to blame for failed calls."""

    def __init__(
        self, state: StreamState, fleet: Fleet, epoch_tracker: EpochTracker, failure_handler: FailureHandler
    ) -> None:
        self.state = state
        self.fleet = fleet
        self.epoch_tracker = epoch_tracker
        self.failure_handler = failure_handler
        self.units: dict[str, UnitState] = {}
        """Units with streaks of failures or a trial."""

    # --- results of calls

    def on_message_passed(self, unit: UnitState, worker: Worker, message: Message) -> None:
        """All calls of a message passed."""
        trial = message.suspect.trial if message.suspect is not None else None
        if trial is not None:
            self._on_trial_passed(unit, trial)
        self._end_streak(unit, worker)

    def on_calls_failed(
        self, unit: UnitState, worker: Worker, message: Message, failures: Sequence[CallFailure], peak: int
    ) -> int:
        """Handle the calls of a message that raised. Returns how many of their items failed for good."""
        trial = message.suspect.trial if message.suspect is not None else None
        # a retry in the worker where the items failed says nothing new about the worker
        is_new = message.suspect is None or message.suspect.failed_on != worker.id
        broke_worker = message.suspect is not None and message.suspect.broke_worker
        settled = 0
        reached = 0
        for failure in sorted(failures, key=lambda failure: failure.start):
            if failure.start > reached:
                self._end_streak(unit, worker)
            reached = failure.stop
            counts = is_new
            for suspect in suspects_of_failure(message, failure, worker.id):
                if failure.verdict:
                    failed = self.failure_handler.on_verdict(unit, suspect, failure)
                elif failure.worker_broken:
                    failed = self._on_worker_broken(unit, worker, message, suspect, broke_worker=broke_worker)
                elif trial is not None:
                    failed = self._on_trial_failed(unit, worker, trial, suspect, is_new=counts)
                elif unit.spec.barrier or failure.out_of_memory:
                    failed = self._charge_now(unit, suspect, failure, peak)
                elif broke_worker and worker.id not in unit.failures.streaks:
                    failed = self._on_culprit_failed(unit, worker, suspect)
                else:
                    failed = self._on_ordinary_failure(unit, worker, suspect, is_new=counts)
                counts = False  # parts of one call
                broke_worker = False  # items after the first one may be victims of the worker
                suspect.epoch.settle(unit.index, failed)
                settled += failed
        if reached < message.items:
            self._end_streak(unit, worker)
            if trial is not None:
                self._on_trial_passed(unit, trial)
        return settled

    def on_message_ended(self, message: Message) -> None:
        """A message has left its worker, whatever its result, and does not run again."""
        if message.suspect is not None and message.suspect.trial is not None:
            message.suspect.trial.close(message.suspect)

    def _charge_now(self, unit: UnitState, suspect: Suspect, failure: CallFailure, peak: int) -> int:
        if failure.out_of_memory:
            return self.failure_handler.on_out_of_memory(unit, suspect, failure, peak)
        return self.failure_handler.charge(unit, suspect)

    def _on_ordinary_failure(self, unit: UnitState, worker: Worker, suspect: Suspect, *, is_new: bool) -> int:
        streak = self.streak_of(unit, worker)
        if is_new:
            streak.count()
        settled = 0
        if unit.spec.skip_failed and (streak.length > 1 or not self.state.options.serving):
            streak.hold(suspect)
            if len(streak.held) > MAX_HELD_CALLS:
                self._release(unit, [streak.take_oldest()])
        else:
            unit.failures.count_failed_calls(1)
            settled = self.failure_handler.charge(unit, suspect)
        if is_new and self._is_suspicious(unit, streak, at_end=False):
            self._suspect(unit, worker, streak)
        return settled

    def _end_streak(self, unit: UnitState, worker: Worker) -> None:
        """A call passed: the worker is not to blame for the failures before it."""
        unit.failures.end_replacements()
        if unit.failures.trial is not None:
            unit.failures.trial.confirm(worker.id)
        if worker.id in unit.failures.streaks:
            self._release(unit, unit.failures.end_streak(worker.id))
            unit.resume(worker)

    def _release(self, unit: UnitState, suspects: Iterable[Suspect]) -> None:
        """Charge items that were held: they are retried or fail."""
        for suspect in suspects:
            unit.failures.count_failed_calls(1)
            self._settle(unit, suspect, self.failure_handler.charge(unit, suspect))
        unit.mark_dirty()

    def _settle(self, unit: UnitState, suspect: Suspect, failed: int) -> None:
        if failed:
            unit.count_taken(failed)
            suspect.epoch.settle(unit.index, failed)
            self.epoch_tracker.propagate_completion(suspect.epoch, unit)

    # --- broken and suspected workers

    def streak_of(self, unit: UnitState, worker: Worker) -> FailureStreak:
        self.units[unit.name] = unit
        return unit.failures.streak_of(worker.id)

    def _on_worker_broken(
        self, unit: UnitState, worker: Worker, message: Message, suspect: Suspect, *, broke_worker: bool
    ) -> int:
        """The exception of a call means that its worker is broken. Returns how many items failed for good."""
        if not self._replace(unit, worker, f"its process is broken: {suspect.error}"):
            self._put_back(unit, message, suspect)  # it fails everything until it is gone
            return 0
        if unit.spec.barrier:
            return self.failure_handler.charge(unit, suspect)
        if unit.spec.skip_failed and self.fleet.health.on_worker_broken(unit) and not self.state.options.serving:
            self._fail_run(unit, suspect)
            return 0
        unit.count_retry()
        used_up = suspect.failed_attempts >= unit.spec.retries
        if broke_worker if unit.spec.skip_failed else used_up:
            return self.failure_handler.fail_items(unit, suspect, skip=unit.spec.skip_failed)
        self._retry_culprit(unit, suspect)
        return 0

    def _fail_run(self, unit: UnitState, suspect: Suspect) -> None:
        """Skipping items does not help: whatever workers are called with, their processes break."""
        count = unit.failures.replaced_in_succession
        name = suspect.stage or short_unit_name(unit.name)
        error = f"{name}: {count} workers in succession were broken, and no call passed; the last: {suspect.error}"
        self.failure_handler.fail_run(unit, suspect, error, FailureCause.BROKEN_WORKERS)

    def _on_culprit_failed(self, unit: UnitState, worker: Worker, suspect: Suspect) -> int:
        """Items failed again with which a worker broke before: they fail, and this worker is replaced, too."""
        streak = unit.failures.streaks.get(worker.id)
        if not unit.failures.may_replace(streak) or not self._replace(
            unit, worker, f"an item that broke a worker: {suspect.error}"
        ):
            self.streak_of(unit, worker).count()
        return self.failure_handler.fail_items(unit, suspect, skip=unit.spec.skip_failed)

    def _put_back(self, unit: UnitState, message: Message, suspect: Suspect) -> None:
        """Queue items of a broken worker again, without charging them."""
        if message.suspect is None or message.suspect.broke_worker:
            unit.queue.put_back(suspect.epoch.id, suspect.parts, self.state.now)
        else:
            unit.add_suspects([suspect])

    def _retry_culprit(self, unit: UnitState, suspect: Suspect) -> None:
        """Call items again whose worker was broken after they failed in it, one by one."""
        charged, is_last = suspect.failed_attempts + 1, unit.spec.skip_failed
        unit.add_suspects([replace(suspect, failed_attempts=charged, batch_size=1, broke_worker=is_last, trial=None)])

    def _retry_victims(self, unit: UnitState, held: list[Suspect]) -> None:
        """Retry the held items of a broken worker without charging them; the first one may have broken it."""
        unit.add_suspects(held[1:])
        if held:
            self._retry_culprit(unit, held[0])

    def _replace(self, unit: UnitState, worker: Worker, reason: str) -> bool:
        """Replace a broken worker; False: it is leaving already. Its held items run elsewhere, uncharged."""
        if not self.fleet.replace(worker, reason):
            return False
        unit.failures.count_replacement()
        self._repeat_trial(unit, worker.id)
        self._retry_victims(unit, unit.failures.end_streak(worker.id))
        worker.mark_broken()
        text = f"worker {worker.id} of {unit.name} is replaced: {reason}"
        self.state.add_note("worker", text, worker=worker.id, unit=unit.name, reason=reason)
        return True

    def _is_suspicious(self, unit: UnitState, streak: FailureStreak, *, at_end: bool) -> bool:
        if not unit.failures.may_replace(streak):
            return False
        calls = max(unit.batches - streak.length, unit.failures.failed_calls)
        comparisons = 1 if at_end else calls
        return is_suspicious(
            streak.length, unit.failures.failed_calls, calls, comparisons, unit.failures.longest_cleared_streak
        )

    def _suspect(self, unit: UnitState, worker: Worker, streak: FailureStreak) -> None:
        """Find out whether a worker is broken: try the items that failed in it on other workers."""
        if worker.state is not WorkerState.READY:
            return  # its items run elsewhere when it is gone
        if unit.failures.replaced_enough:
            self._probe(unit, worker, streak)
            return
        if unit.failures.trial is not None:
            if unit.has_sound_worker() and worker.id not in unit.failures.trial.unconfirmed:
                self._pause(unit, worker)  # until that trial has ended
            else:
                self._replace(unit, worker, f"{streak.length} calls failed in it in succession")
            return
        count = f"{streak.length} calls failed in succession, the last with {self._last_error(streak)}"
        length, held = streak.length, unit.failures.end_streak(worker.id)
        if not held:
            unit.failures.clear_streak(length)
            self._replace(unit, worker, f"{streak.length} calls failed in it in succession")
            return
        if any(unit.is_sound(other) for other in unit.workers.values() if other is not worker):
            self._pause(unit, worker)
            text = f"worker {worker.id} of {unit.name} is suspected: {count}; their items are tried on other workers"
            self.state.add_note("worker", text, worker=worker.id, unit=unit.name)
        else:
            self._replace(unit, worker, f"{count}; their items are tried on the new worker")
        self._begin_trial(unit, worker, length, held)

    def _probe(self, unit: UnitState, worker: Worker, streak: FailureStreak) -> None:
        """New workers fail, too: replace this one, and try the latest items first. If one of them passes, earlier ones
        that are neighbours broke the workers; if none does, they are all to blame."""
        trial, length = unit.failures.trial, streak.length
        suspected = None if trial is None else self.state.workers.get(trial.worker)
        held = [*unit.end_trial(), *unit.failures.end_streak(worker.id)]
        for other in (worker, suspected):
            if other is not None:
                self._replace(unit, other, f"{length} calls failed in succession")
        if held:
            self._begin_trial(unit, worker, length, held)

    def _begin_trial(self, unit: UnitState, worker: Worker, length: int, held: list[Suspect]) -> None:
        first = held[0] if len(held) > 1 else None
        trial = Trial(worker.id, length, first)
        trial.begin(replace(suspect, trial=trial) for suspect in reversed(held if first is None else held[1:]))
        unit.begin_trial(trial)

    def _last_error(self, streak: FailureStreak) -> str:
        return streak.held[-1].error if streak.held else "an exception"

    def _pause(self, unit: UnitState, worker: Worker) -> None:
        unit.pause(worker)
        self.fleet.cancel_messages(worker)

    def _on_trial_failed(self, unit: UnitState, worker: Worker, trial: Trial, suspect: Suspect, *, is_new: bool) -> int:
        if unit.failures.trial is not trial:  # it ended while the items ran
            return self._on_ordinary_failure(unit, worker, replace(suspect, trial=None), is_new=is_new)
        if is_new:
            self.streak_of(unit, worker).count()
        trial.add_failed(suspect, worker.id)
        return 0

    def _repeat_trial(self, unit: UnitState, worker: int) -> None:
        """Repeat what failed in a trial on a worker that is broken or gone. The items that failed first may have broken
        it."""
        trial = unit.failures.trial
        suspects = trial.take_unconfirmed(worker) if trial is not None else []
        if trial is None or not suspects:
            return
        again = [replace(suspect, trial=trial) for suspect in suspects[1:]]
        trial.begin(again)
        unit.add_suspects(again)
        self._retry_culprit(unit, suspects[0])

    def _on_trial_passed(self, unit: UnitState, trial: Trial) -> None:
        if trial.passed:
            return
        trial.mark_passed()
        worker = self.state.workers.get(trial.worker)
        if worker is not None and unit.failures.trial is trial:
            self._replace(unit, worker, f"{trial.streak} calls failed in it in succession, and one passed in another")

    def _finish_trial(self, unit: UnitState, trial: Trial) -> None:
        if trial.first is not None and not trial.passed and not trial.failed:
            unit.add_suspects(trial.begin_first())  # nothing is known yet: the other items have left the trial
            return
        unit.failures.end_trial()
        if trial.passed:
            for suspect in trial.failed:
                if suspect.failed_attempts < unit.spec.retries:
                    self._retry_culprit(unit, suspect)  # it failed in both workers, and may have broken the other, too
                else:
                    self._release(unit, [suspect])
            if trial.first is not None:
                self._retry_culprit(unit, trial.first)
        else:
            if trial.failed:
                unit.failures.clear_streak(trial.streak)
            first = [] if trial.first is None else [trial.first]
            twice = [replace(suspect, failed_attempts=suspect.failed_attempts + 1) for suspect in trial.failed]
            self._release(unit, [*first, *twice])
            worker = self.state.workers.get(trial.worker)
            if worker is not None:
                unit.resume(worker)
        for number, streak in list(unit.failures.streaks.items()):
            other = self.state.workers.get(number)
            if other is not None and other.paused:
                if unit.failures.trial is None and self._is_suspicious(unit, streak, at_end=False):
                    self._suspect(unit, other, streak)
                elif unit.failures.trial is None:
                    unit.resume(other)
        unit.mark_dirty()

    # --- workers that leave, and workers that are idle

    def on_worker_gone(self, worker: Worker, *, died: bool) -> None:
        """Retry or charge the held items of a worker that died or stopped."""
        unit = self.state.units_by_name[worker.unit]
        held = unit.failures.end_streak(worker.id)
        self._repeat_trial(unit, worker.id)
        if worker.is_broken:
            self._retry_victims(unit, held)
        elif died:
            unit.add_suspects(held)
        elif held:
            self._release(unit, held)
        unit.mark_dirty()

    def advance(self) -> bool:
        """Decide about the failures of workers that have nothing else to do, and end trials. Call it after dispatch;
        True: something changed."""
        changed = False
        for unit in list(self.units.values()):
            trial = unit.failures.trial
            if trial is not None:
                changed = self._confirm_idle(unit, trial) or changed
                if trial.is_over:
                    self._finish_trial(unit, trial)
                    changed = True
                else:
                    changed = self._unblock_trial(unit) or changed
            for number, streak in list(unit.failures.streaks.items()):
                worker = self.state.workers.get(number)
                if streak.held and worker is not None and self._is_idle(unit, worker):
                    self._on_idle(unit, worker, streak)
                    changed = True
            if not unit.failures.streaks and unit.failures.trial is None:
                del self.units[unit.name]
        return changed and not self.state.is_ending

    def _confirm_idle(self, unit: UnitState, trial: Trial) -> bool:
        """A worker that has nothing else to do cannot pass another call: what failed in it counts. It is tried again
        only if no other worker is sound."""
        is_sound_elsewhere = unit.has_sound_worker()
        if is_sound_elsewhere and trial.open:
            return False
        idle = [number for number in trial.unconfirmed if self._is_idle(unit, self.state.workers[number])]
        for number in idle:
            trial.confirm(number)
            if not is_sound_elsewhere:
                unit.add_suspects(unit.failures.end_streak(number))
        return bool(idle)

    def _unblock_trial(self, unit: UnitState) -> bool:
        """Replace a worker if a trial waits for a sound one, and no worker has work that would show whether it is
        sound; of two, the paused one."""
        unpaused = [worker for worker in unit.workers.values() if not worker.paused]
        if unpaused and (unit.has_sound_worker() or unit.failures.replaced_enough):
            return False
        if not all(self._is_idle(unit, worker) for worker in unpaused):
            return False
        return any(
            self._replace(unit, worker, "no other worker is left to try the items that failed in it")
            for worker in sorted(unit.workers.values(), key=lambda worker: not worker.paused)
        )

    def _is_idle(self, unit: UnitState, worker: Worker) -> bool:
        waits = worker.messages or worker.paused or unit.queue.ready
        return worker.state is WorkerState.READY and not waits

    def _on_idle(self, unit: UnitState, worker: Worker, streak: FailureStreak) -> None:
        at_end = unit.input_complete and not unit.queue.items
        if self._is_suspicious(unit, streak, at_end=at_end):
            self._suspect(unit, worker, streak)
        else:
            self._release(unit, streak.take_held())
