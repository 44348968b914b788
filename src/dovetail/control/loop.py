"""The control loop: passes events to the controller and its commands to the engine, the data port and the observers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.control.commands import DATA_COMMANDS, OBSERVER_COMMANDS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dovetail.control.commands import Command, DataCommand, EngineCommand
    from dovetail.control.engine import Controller, DataPort, Engine, Observer
    from dovetail.control.events import Event


def run_loop(
    controller: Controller,
    engine: Engine,
    data: DataPort | None = None,
    observers: Sequence[Observer] = (),
    *,
    beat_s: float | None = None,
    last: Callable[[], None] | None = None,
) -> list[tuple[Observer, Exception]]:
    """Run until the controller is done. Returns the observers that raised, with their errors; they were dropped.

    `last` is called when the controller is done and before observers are closed; its errors propagate. `beat_s`:
    maximum seconds between two steps, so that observers can write heartbeats on a real clock.
    """
    watching = list(observers)
    dropped: list[tuple[Observer, Exception]] = []
    events: list[Event] = []
    while True:
        now = engine.now()
        commands = controller.step(now, events)
        for observer in watching.copy():
            try:
                observer.on_step(now, events, commands)
            except Exception as error:
                dropped.append((observer, error))
                watching.remove(observer)
        if commands:
            _submit_commands(commands, engine, data)
        if controller.done:
            break
        wake = controller.wake_at()
        wait = None if wake is None else max(0.0, wake - engine.now())
        if beat_s is not None:
            wait = beat_s if wait is None else min(wait, beat_s)
        events = engine.poll(wait)
    if last is not None:
        last()
    for observer in watching:
        try:
            observer.close(engine.now())
        except Exception as error:
            dropped.append((observer, error))
    return dropped


def _submit_commands(commands: Sequence[Command], engine: Engine, data: DataPort | None) -> None:
    for_engine: list[EngineCommand] = []
    for_data: list[DataCommand] = []
    for command in commands:
        kind = type(command)
        if kind in OBSERVER_COMMANDS:
            continue
        (for_data if kind in DATA_COMMANDS else for_engine).append(command)  # type: ignore[arg-type]
    if for_engine:
        engine.submit(for_engine)
    if for_data:
        assert data is not None, f"{for_data[0]}, and the run has no data port"
        data.submit(for_data)
