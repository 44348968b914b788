"""Launch of an actor system: plan, claim, run folder, engine and controller, as for a run. All or nothing."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from dovetail.actors.call_router import ActorCallRouter
from dovetail.actors.claim_plan import planned_processes, to_claim_plan
from dovetail.actors.health_check import HealthLimits
from dovetail.actors.heartbeat_monitor import HeartbeatMonitor
from dovetail.actors.hosted_actor import HostedActor
from dovetail.actors.live_system import (
    ActiveSystem,
    DirectoryPublisher,
    LiveSystem,
    SystemWatch,
    requests,
)
from dovetail.actors.role_code import inspect_roles
from dovetail.actors.role_fields import BAD_ROLE
from dovetail.actors.scaling_thread import scaled_roles
from dovetail.actors.system_controller import ActorController, SystemDefinition
from dovetail.actors.system_view import system_view, worker_views
from dovetail.control.commands import HostedObject
from dovetail.control.events import CancelRun, Drain
from dovetail.errors import Change, ConfigError, InfeasibleError
from dovetail.observe.control_socket import ControlSocket
from dovetail.observe.recorder import Recorder
from dovetail.observe.run_header import ROLES_KEY
from dovetail.pipeline.durations import checked_duration
from dovetail.pipeline.stage_code import StageCode
from dovetail.runtime.assembly import LaunchOptions, create_locked_run, describe_run
from dovetail.runtime.delayed_telemetry import DelayedTelemetry
from dovetail.runtime.sites import LocalSite, WorkerEnvironment, open_site

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from dovetail.actors.actor_system import ActorSystem
    from dovetail.actors.instance_directory import RoleMethods
    from dovetail.actors.role import Role
    from dovetail.errors import Problem
    from dovetail.observe.run_folder import RunFolder
    from dovetail.observe.run_header import RunDescription
    from dovetail.resources.cluster import Cluster
    from dovetail.runtime.admission import Admission
    from dovetail.runtime.run_lock import RunLock
    from dovetail.runtime.sites import RunEngine
    from dovetail.scheduling.plan import Plan

WHAT = "dt.ActorSystem"


def launch_system(
    system: ActorSystem,
    engine: str,
    cluster: Cluster | str,
    *,
    wait: bool,
    deadline: float | str,
    share: float | None = None,
    env_from: Sequence[str] = (),
    run_dir: str | Path | None = None,
    what: str = WHAT,
) -> LiveSystem:
    """See `ActorSystem.launch`."""
    deadline_s = checked_duration("deadline", deadline, BAD_ROLE, "60s")
    end = time.monotonic() + deadline_s
    with ExitStack() as undo:
        _check_variables(system.roles)
        site = open_site(engine, share=share, env_from=tuple(env_from))
        site.check_runtime_envs(system.roles)
        code = inspect_roles(system.roles, is_local=isinstance(site, LocalSite))
        if code.problems:
            raise ConfigError(code.problems)
        plan_for = partial(_claim_plan, system)
        exclusive_plan = plan_for(site.cluster(cluster))
        options = LaunchOptions(what=what, more={ROLES_KEY: {role.name: role.high for role in system.roles}})
        about = describe_run(site, exclusive_plan, options, ())
        folder, lock = create_locked_run(about, run_dir, undo, {"durable": False})
        try:
            timeout_s = max(0.0, end - time.monotonic())
            admission = site.admit(folder.id, exclusive_plan, plan_for, wait=wait, timeout_s=timeout_s)
        except InfeasibleError as error:
            waited_s = deadline_s if wait else None
            raise InfeasibleError(_explained(problem, exclusive_plan, waited_s) for problem in error.problems) from None
        undo.callback(admission.release)
        running = site.start_engine(admission, WorkerEnvironment(folder.path))
        undo.callback(running.close)
        definition = _definition(system, code.methods, sends_all_variables=isinstance(site, LocalSite))
        running.prepare(definition.hosted.values())
        controller = ActorController(
            definition,
            planned_processes(admission.plan, system.bundles),
            admission.plan.cluster,
            deadline_s=max(0.0, end - time.monotonic()),
            reserved=admission.reserved,
            rendezvous_seed=1 + int.from_bytes(os.urandom(4), "big"),
        )
        about = describe_run(site, admission.plan, options, ())
        active = _observed_system(system, admission, folder, lock, running, controller, about)
        undo.pop_all()
    live = LiveSystem(system.name, active, scaled_roles(system.roles, system.bundles))
    try:
        active.control_socket.set_requests(requests(live))
        active.control_socket.start()
    except BaseException:
        live.stop(drain=False)
        raise
    live.wait_until_ready()
    return live


def _observed_system(
    system: ActorSystem,
    admission: Admission,
    folder: RunFolder,
    lock: RunLock,
    running: RunEngine,
    controller: ActorController,
    about: RunDescription,
) -> ActiveSystem:
    """The parts of the launched system, with its observers, router and control socket."""
    monitor = HeartbeatMonitor(
        controller, running, {role.name: HealthLimits.of(role.health_rules) for role in system.roles}
    )
    recorder = Recorder(
        folder,
        about,
        lambda now: system_view(controller, monitor, now),
        lambda: worker_views(controller, monitor.heartbeats),
        plan=admission.plan.to_json(),
    )
    shapes = {template.unit: template.shape for bundle in system.bundles for template, _ in bundle.processes}
    telemetry = DelayedTelemetry(running, shapes, admission.plan.cluster, recorder)
    router = ActorCallRouter(running.call_with, controller.directory, sends_deadlines=True)
    watch = SystemWatch(controller)
    socket = ControlSocket(folder.path, partial(_on_control_command, running))
    active = ActiveSystem(
        admission, folder, lock, running, controller, router, recorder, monitor, watch, telemetry, socket
    )
    # the monitor is closed first, so that the recorder's last view has the last figures
    active.observers = [monitor, recorder, DirectoryPublisher(controller, running, router), watch]
    return active


def _claim_plan(system: ActorSystem, cluster: Cluster | str) -> Plan:
    return to_claim_plan(system.plan(cluster), system.bundles)


def _check_variables(roles: Sequence[Role]) -> None:
    """Variables of `env_from`. Raises ConfigError if one is not set, or must not be sent."""
    named = [name for role in roles for name in role.env_from]
    if named:
        from dovetail.engines.ray.environment import select_variables

        select_variables(os.environ, named)


def _explained(problem: Problem, plan: Plan, waited_s: float | None) -> Problem:
    """A refusal with the roles and what each needs. A system that has waited is not advised to wait, but longer."""
    needs = tuple(f"{unit.name}: {unit.low} x ({unit.shape.describe()})" for unit in plan.units)
    fixes = problem.fixes
    if waited_s is not None:
        longer = Change({"deadline": f"{max(60.0, 2 * waited_s):g}s"}, note="waits longer")
        fixes = tuple(longer if isinstance(fix, Change) and "wait" in fix.values else fix for fix in fixes)
    return replace(problem, evidence=(*problem.evidence, *needs), fixes=fixes)


def _definition(
    system: ActorSystem, methods: Mapping[str, RoleMethods], *, sends_all_variables: bool
) -> SystemDefinition:
    return SystemDefinition(
        system.name,
        system.roles,
        system.bundles,
        system.pools,
        {role.name: _hosted(role, sends_all_variables=sends_all_variables) for role in system.roles},
        methods,
    )


def _hosted(role: Role, *, sends_all_variables: bool) -> HostedObject:
    actor = HostedActor(role.cls, tuple(role.args), dict(role.kwargs))
    env = role.env
    if role.env_from and not sends_all_variables:  # only its own processes get them
        env = {**{name: os.environ[name] for name in role.env_from}, **(role.env or {})}
    code = StageCode(role.name, actor, env=env, runtime_env=role.runtime_env)
    return HostedObject(role.name, (code,), role.slots or 1)


def _on_control_command(engine: RunEngine, command: str, reason: str) -> None:
    engine.post(Drain(reason) if command == "drain" else CancelRun(reason))
