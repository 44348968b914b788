"""Trace of a run in the format of Perfetto and chrome://tracing."""

from __future__ import annotations

import json
from itertools import count
from typing import TYPE_CHECKING, Any

from dovetail.observe.run_folder import number_field

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dovetail.observe.history import RunHistory, WorkerLifetime

RUN_PID, STAGES_PID, FIRST_NODE_PID = 1, 2, 10


def make_trace(history: RunHistory) -> dict[str, Any]:
    """Counters per stage, workers as slices on their node, and instant events for decisions, losses and errors."""
    began = history.ticks[0].t if history.ticks else 0.0
    if history.timeline:
        began = min(began, min(it.t for it in history.timeline))
    events = [*_unit_counters(history), *_usage_counters(history), *_worker_slices(history), *_timeline_marks(history)]
    for event in events:
        event["ts"] = max(0, round((event["ts"] - began) * 1e6))
    events.sort(key=lambda event: event["ts"])
    header = {name: history.header.get(name) for name in ("id", "name", "engine", "cluster", "virtual", "started")}
    return {"traceEvents": [*_metadata_events(history), *events], "displayTimeUnit": "ms", "otherData": header}


def trace_json(history: RunHistory) -> str:
    return json.dumps(make_trace(history), separators=(",", ":"))


def _metadata_events(history: RunHistory) -> Iterator[dict[str, Any]]:
    nodes = _node_pids(history)
    yield _metadata_event("process_name", RUN_PID, 0, history.name or "run")
    yield _metadata_event("process_name", STAGES_PID, 0, "stages")
    for node, pid in nodes.items():
        yield _metadata_event("process_name", pid, 0, f"node {node}" if node else "node unknown")
    for life in history.worker_lifetimes.values():
        cards = f" on card {', '.join(map(str, life.gpus))}" if life.gpus else ""
        yield _metadata_event("thread_name", nodes[life.node], _tid(life), f"{life.unit} worker {life.worker}{cards}")


def _metadata_event(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


def _tid(life: WorkerLifetime) -> int:
    return life.worker + 1


def _node_pids(history: RunHistory) -> dict[str, int]:
    names = {life.node for life in history.worker_lifetimes.values()} | {*history.node_uses}
    names |= {node for node, _ in history.gpu_uses if node}
    return dict(zip(sorted(names), count(FIRST_NODE_PID), strict=False))


def _unit_counters(history: RunHistory) -> Iterator[dict[str, Any]]:
    for t, value in history.rates():
        yield _counter("items/s", t, {"finished": round(value, 3)}, RUN_PID)
    for unit in history.units:
        for point in history.series(unit):
            workers = {"ready": point.ready, "starting": point.starting, "draining": point.draining}
            yield _counter(f"{unit} queue", point.t, {"queued": point.queued, "in flight": point.in_flight})
            yield _counter(f"{unit} items/s", point.t, {"rate": round(point.rate, 3)})
            yield _counter(f"{unit} workers", point.t, workers)


def _usage_counters(history: RunHistory) -> Iterator[dict[str, Any]]:
    """Measured use of workers, cards and host."""
    for unit, lines in history.unit_uses.items():
        for line in lines:
            yield _counter(f"{unit} CPUs used", line["t"], {"CPUs": number_field(line, "cpus_now")})
            yield _counter(f"{unit} memory", line["t"], {"bytes": number_field(line, "uss_bytes")})
    pids = _node_pids(history)
    for (node, card), lines in history.gpu_uses.items():
        pid = pids[node] if node else RUN_PID
        for line in lines:
            shares = {name: number_field(line, f"{name}_percent") for name in ("use", "encoder", "decoder")}
            yield _counter(f"GPU {card} %", line["t"], shares, pid)
            yield _counter(f"GPU {card} memory", line["t"], {"bytes": number_field(line, "memory_used_bytes")}, pid)
    yield from _host_counters("machines" if history.node_uses else "machine", history.machine_uses, RUN_PID)
    for node, lines in history.node_uses.items():
        yield from _host_counters("node", lines, pids[node])


def _host_counters(what: str, lines: Sequence[Mapping[str, Any]], pid: int) -> Iterator[dict[str, Any]]:
    for line in lines:
        yield _counter(f"{what} CPUs used", line["t"], {"CPUs": number_field(line, "cpus")}, pid)
        yield _counter(f"{what} memory", line["t"], {"bytes": number_field(line, "memory_used_bytes")}, pid)


def _counter(name: str, t: float, values: Mapping[str, float], pid: int = STAGES_PID) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": t, "args": values}


def _worker_slices(history: RunHistory) -> Iterator[dict[str, Any]]:
    nodes = _node_pids(history)
    last = history.ticks[-1].t if history.ticks else max((it.t for it in history.timeline), default=0.0)
    for life in history.worker_lifetimes.values():
        pid = nodes[life.node]
        end = life.ended if life.ended is not None else max(last, life.ready or 0.0, life.started or 0.0)
        if life.started is not None:
            yield _worker_slice("setup", life, pid, life.started, end if life.ready is None else life.ready)
        if life.ready is not None:
            yield _worker_slice(life.unit or "worker", life, pid, life.ready, end)


def _worker_slice(name: str, life: WorkerLifetime, pid: int, start: float, end: float) -> dict[str, Any]:
    why = {"end": life.end, "why": life.why} if life.end else {}
    nodes = {"nodes": ", ".join(life.nodes)} if life.nodes else {}
    arguments = {"worker": life.worker, "unit": life.unit, **nodes, **why}
    seconds = max(0, round((end - start) * 1e6))
    return {"ph": "X", "name": name, "pid": pid, "tid": _tid(life), "ts": start, "dur": seconds, "args": arguments}


def _timeline_marks(history: RunHistory) -> Iterator[dict[str, Any]]:
    for it in history.timeline:
        kind = str(it.data.get("what", it.kind))
        name = it.text if len(it.text) <= 100 else f"{it.text[:97]}..."
        arguments = {"kind": kind, "text": it.text}
        yield {"ph": "i", "name": name, "cat": kind, "pid": RUN_PID, "tid": 0, "ts": it.t, "s": "g", "args": arguments}
