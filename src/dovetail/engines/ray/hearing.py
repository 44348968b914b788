"""What do agents say, and what does it mean for the run?"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from ray.exceptions import ActorUnschedulableError, RuntimeEnvSetupError

from dovetail.control.events import (
    BatchesDone,
    BatchesReturned,
    Cause,
    FailRun,
    Failure,
    NodeJoined,
    WorkerLost,
    WorkerReady,
    WorkerStopped,
)
from dovetail.engines.ray import telling
from dovetail.engines.ray.discovery import NoNodes
from dovetail.engines.ray.gone import Gone, give_up
from dovetail.engines.ray.links import Again
from dovetail.engines.ray.starting import FIX_RUNTIME_ENV
from dovetail.engines.ray.variables import hint
from dovetail.engines.ray.wire import Hello, our_version

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dovetail.control.events import Event
    from dovetail.engines.ray.crews import Crew
    from dovetail.engines.ray.discovery import Seen
    from dovetail.engines.ray.engine import RayEngine
    from dovetail.engines.ray.links import Link

MOST_IN_VAIN = 3
NO_WORKER = "Failed to startup worker after retrying"
"""So Ray calls it where the Python of a runtime_env does not start."""
RAISED = re.compile(r"[A-Za-z_.]*(Error|Exception|Exit|Found)\b")
_SAME = "install the same dovetail-ml, with the same Python, on all nodes (pip install 'dovetail-ml[ray]')"


class Hearing:
    """For the thread of the loop."""

    def __init__(self, engine: RayEngine) -> None:
        self._engine = engine
        self._blind: dict[str, str] = {}
        """Nodes that do not see what workers read or write, or where no agent starts, and what Ray calls them."""
        self._vain: Counter[tuple[str, str]] = Counter()
        """Node and runtime_env -> agents in a row that failed before they said a word."""
        self._means: dict[str, Callable[..., None]] = {
            "hello": self._hello,
            "done": self._done,
            "ready": self._ready,
            "returned": self._returned,
            "stopped": self._stopped,
            "lost": self._lost,
            "pids": self._pids,
            "port": self._port,
            "answer": lambda _link, *told: engine.answered(*told),
            "seek": self._seek,
            "piece": lambda link, number, data: link.pieces.setdefault(number, []).append(data),
            "over": engine.stock.flights.over,
            "lack": engine.stock.flights.lacks,
            "unusable": lambda _link, error: self._tell(FailRun(error, _BLOCK)),
            "use": lambda link, data: engine.measured.took(link.node, data, link.kind),
            "log": lambda _link, pieces: engine.logs.took(pieces),
            "sick": lambda link, why: engine.lose_node(link.node, why),
            "broken": self._broken,
        }

    def hear(self, link: Link | None, what: Any) -> None:
        if isinstance(what, Gone):
            give_up(self._engine, what)
        elif link is None:
            self._seen(what)
        elif isinstance(what, BaseException):
            if not link.dead:
                self._died(link, what)
        else:
            for op in what:
                if link.dead:
                    return
                self._means[op[0]](link, *op[1:])
            link.flush(frees=True)

    def _tell(self, event: Event) -> None:
        self._engine.events.append(event)

    # --- agents and nodes

    def _seen(self, what: Again | Seen | NoNodes) -> None:
        if self._engine.given_up:
            return
        if isinstance(what, Again):
            self._engine.agents.again(what.node)
        else:
            self._looked(what)

    def _died(self, link: Link, error: BaseException) -> None:
        """An agent, by Ray's words; one that has a runtime_env may have none of it yet."""
        text = str(error)
        if link.used and link.hello is None and not self._engine.given_up:
            self._engine.agents.replace(link)  # it died while it was idle
        elif isinstance(error, RuntimeEnvSetupError) or (link.kind and link.hello is None and is_about_env(error)):
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            self._no_runtime_env(link, lines[-1] if lines else type(error).__name__)
        elif "creation task" in text or (link.kind and link.hello is None and not is_about_node(error)):
            self._broken(link, text)
        else:
            self._engine.lose_node(link.node, _why(error))

    def _no_runtime_env(self, link: Link, why: str, *, made: bool = False) -> None:
        """Another agent would fare no better. `made`: it only does not start with it."""
        link.dead = "it could not be started with its runtime_env"
        names = sorted({name for crew in self._engine.crews.values() if crew.kind == link.kind for name in crew.names})
        what = "start an agent with" if made else "make"
        whose = f"of {', '.join(map(repr, names))}" if names else link.kind  # whose workers are lost already
        message = f"DT403 node {link.node} cannot {what} the runtime_env {whose}: {why}"
        self._tell(FailRun(message, FIX_RUNTIME_ENV))

    def _broken(self, link: Link, text: str) -> None:
        """An agent that failed by itself. Where none starts, the next one would not either."""
        engine, node = self._engine, link.node
        if link.hello is None:
            self._vain[node, link.kind] += 1
        if self._vain[node, link.kind] < MOST_IN_VAIN:
            engine.lose_node(node, f"its agent failed: {text.strip()}")
            return
        if link.kind:
            self._no_runtime_env(link, _last_error(text), made=True)
            return
        wrong = f"DT404 Dovetail does not start on node {node}: {_last_error(text)}"
        ids = engine.agents.around.ids
        self._blind[node] = ids.pop(node, "")
        if not ids:
            self._tell(FailRun(wrong, _SAME))
        engine.lose_node(node, f"{wrong}: {_SAME}")

    def _hello(self, link: Link, *told: Any) -> None:
        link.hello = hello = Hello(*told)
        del self._vain[link.node, link.kind]
        agents = self._engine.agents
        around = agents.around
        wrong = _other_version(link.node, hello) or _not_seen(link.node, hello, agents.folder)
        if wrong is not None:
            self._refuse(link, *wrong)
            return
        if link.node in agents.returning:
            agents.returning.discard(link.node)
            if link.node in around.nodes:
                self._tell(NodeJoined(around.nodes[link.node]))
            self._engine.node_is_back()

    def _refuse(self, link: Link, error: str, fix: str) -> None:
        """Nothing runs, or, if something does already, it goes on without that node."""
        engine = self._engine
        if engine.agents.begun:
            self._blind[link.node] = engine.agents.around.ids.pop(link.node, "")
            engine.lose_node(link.node, f"{error}: {fix}")
        elif not engine.agents.refused:
            engine.agents.refused = True
            self._tell(FailRun(error, fix))

    def _looked(self, seen: Seen | NoNodes) -> None:
        """At the cluster: who joined, and who left without our noticing."""
        self._engine.want()
        if not isinstance(seen, NoNodes):
            self._see_joined(seen)
        there = {} if isinstance(seen, NoNodes) else seen.ids
        around = self._engine.agents.around
        left = [name for name in around.ids if name not in there]
        for name in left:
            del around.ids[name]
            self._engine.lose_node(name, "Ray says that it is dead")
        if left and not around.ids:
            self._tell(FailRun(f"the last node, {left[-1]!r}, is gone", "Ray says that it is dead"))

    def _see_joined(self, seen: Seen) -> None:
        around = self._engine.agents.around
        around.stores.update(seen.object_store_bytes)
        for name, number in seen.ids.items():
            if number in (around.ids.get(name), self._blind.get(name)):
                continue
            around.ids[name] = number
            node = next(node for node in seen.cluster.nodes if node.name == name)
            around.nodes[name] = node
            if around.holdings is not None:
                around.holdings.node_joined(name, number)
            self._tell(NodeJoined(node))
            self._engine.node_is_back()

    # --- workers

    def _crew(self, link: Link, worker: int) -> Crew | None:
        crew = self._engine.crews.get(worker)
        return crew if crew is not None and link in crew.places else None

    def _ready(self, link: Link, worker: int, setup_s: float) -> None:
        crew = self._crew(link, worker)
        if crew is None:
            return
        crew.ready[link] = setup_s
        if len(crew.ready) == len(crew.places) and crew.end is None:
            self._tell(WorkerReady(worker, max(crew.ready.values())))

    def _done(
        self,
        link: Link,
        worker: int,
        message: int,
        segments: list[tuple[Any, ...]],
        seconds: float,
        failures: list[tuple[Any, ...]],
        peak: int,
        stages: Any,
    ) -> None:
        found = [self._engine.stock.received(link, told) for told in segments]
        crew = self._crew(link, worker)
        if crew is None:
            return
        told = [self._with_hint(Failure(*failure)) for failure in failures]
        done = crew.took(link, BatchesDone(worker, message, found, seconds, told, peak, stages))
        if done is not None:
            self._tell(done)

    def _with_hint(self, failure: Failure) -> Failure:
        around = self._engine.agents.around
        found = hint(failure.error, failure.detail, around.environ, around.home.variables)
        if found:
            failure.error = f"{failure.error} ({found})"
        return failure

    def _returned(self, link: Link, worker: int, message: int) -> None:
        crew = self._crew(link, worker)
        if crew is None or message not in crew.sent:
            return
        if len(crew.places) > 1:
            # other ranks have it, and wait for those who will never begin
            self._engine.end_crew(crew, WorkerLost(worker, Cause.NODE_LOST, "a part of its input is lost"))
            return
        del crew.sent[message]
        self._tell(BatchesReturned(worker, message))

    def _stopped(self, link: Link, worker: int) -> None:
        self._ended(link, worker, WorkerStopped(worker))

    def _lost(self, link: Link, worker: int, cause: str, detail: str, crumbs: Any, peak: int) -> None:
        around = self._engine.agents.around
        found = hint(detail.partition("\n")[0], detail, around.environ, around.home.variables)
        if found:
            first, _, rest = detail.partition("\n")
            detail = f"{first} ({found})\n{rest}"
        self._ended(link, worker, telling.lost(worker, cause, detail, crumbs, peak))

    def _ended(self, link: Link, worker: int, end: WorkerLost | WorkerStopped) -> None:
        """On one of its nodes; a gang lives and dies together."""
        crew = self._crew(link, worker)
        if crew is None or link in crew.ended:
            return
        crew.ended.add(link)
        if crew.end is None or isinstance(crew.end, WorkerStopped):
            crew.end = end
        if not isinstance(end, WorkerStopped):
            for other in crew.places:
                if other not in crew.ended:
                    other.tell(("stop", worker, False, "another rank of it is gone"))
        if len(crew.ended) == len(crew.places):
            self._engine.lose_crew(crew, crew.end)

    def _pids(self, link: Link, worker: int, name: str, pids: tuple[int, ...]) -> None:  # noqa: ARG002 - as it is told
        crew = self._crew(link, worker)
        if crew is not None:
            crew.pids[link] = tuple(pids)
            self._engine.pids += pids

    def _port(self, link: Link, worker: int, port: int) -> None:
        crew = self._engine.crews.get(worker)
        if crew is not None and link.hello is not None:
            crew.meeting = link.hello.address, port

    # --- what is asked

    def _seek(self, link: Link, worker: int) -> None:
        """A worker there wants to call one of another node."""
        crew = self._engine.crews.get(worker)
        there = crew is not None and bool(crew.places)
        if there and crew is not None:
            crew.callers.add(link)
        link.tell(("found", worker, link.beside(crew.lead.peer) if there and crew is not None else None))
        link.flush()


_BLOCK = "write it to files that all nodes see, and read those: dataset.write_parquet(...)"
_SHARE = "put it on storage that all nodes share, under the same path, or name an address such as s3://"
_SINK = 'write to storage that all nodes share, under the same path: sink="/shared/out.jsonl", --sink /shared/out.jsonl'
_FOLDER = 'run_dir="/shared/run" or --run-dir /shared/run, on storage that all nodes share: parts of results lie there'


def _other_version(node: str, hello: Hello) -> tuple[str, str] | None:
    here = our_version()
    if hello.version == here:
        return None
    theirs = hello.version or "of no version"
    return f"DT404 node {node} has Dovetail {theirs}, and here it is {here or 'of no version'}", _SAME


def _not_seen(node: str, hello: Hello, folder: Path) -> tuple[str, str] | None:
    """What is wrong, and what mends it; None: nothing."""
    if hello.missing:
        more = f" and {len(hello.missing) - 3} more" if len(hello.missing) > 3 else ""
        return f"DT405 node {node} does not see the source: {', '.join(hello.missing[:3])}{more}", _SHARE
    if hello.unwritable:
        ours = str(folder) in hello.unwritable[0]
        where = hello.unwritable[0] if ours else hello.unwritable[0].rpartition("/")[0]
        return f"DT401 node {node} does not see {where}, where workers write results", _FOLDER if ours else _SINK
    return None


def _last_error(text: str) -> str:
    """Of a traceback, what was raised."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no reason given"]
    return next((line for line in reversed(lines) if RAISED.match(line)), lines[-1])


def is_about_env(error: BaseException) -> bool:
    """Whether Ray says of an agent that never was there that its runtime_env cannot be made."""
    return isinstance(error, TimeoutError) or NO_WORKER in str(error)


def is_about_node(error: BaseException) -> bool:
    return isinstance(error, ActorUnschedulableError) or "its node has died" in str(error)


def _why(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
