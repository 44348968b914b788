"""Simulated actor systems: queueing by slots, scaling by load, deadlocks, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import dovetail as dt
from command import run_command

SCALED = Path(__file__).resolve().parents[2] / "examples" / "actors" / "scaled.yaml"
MACHINE = "1x(16cpu, 32GB)"


def system(
    roles: list[dict[str, Any]], clients: list[dict[str, Any]], methods: dict[str, Any], **more: Any
) -> dt.ActorSystem:
    entries = [{"cls": "m:A", **role} for role in roles]
    pattern: dict[str, Any] = {"clients": clients, "methods": methods, **more}
    return dt.ActorSystem.from_dict({"roles": entries, "simulate": pattern})


def test_callers_of_one_slot_wait_for_each_other() -> None:
    one = system(
        [{"name": "a"}], [{"call": "a.f", "callers": 5}], {"a.f": {"time": "100ms", "variation": 0}}, duration="1m"
    )
    (figures,) = one.simulate(MACHINE).roles
    assert figures.calls == pytest.approx(600, abs=5)
    assert figures.utilisation == pytest.approx(1.0, abs=0.01)
    assert figures.latency_p50_s == pytest.approx(0.5)
    assert figures.waiting_mean_s == pytest.approx(0.4, abs=0.01)


def test_a_call_holds_its_slot_while_it_waits_for_the_calls_that_it_makes() -> None:
    nested = system(
        [{"name": "a"}, {"name": "b"}],
        [{"call": "a.f", "callers": 4}],
        {"a.f": {"time": "100ms", "variation": 0, "calls": ["b.g", "b.g"]}, "b.g": {"time": "50ms", "variation": 0}},
        duration="1m",
    )
    a, b = nested.simulate(MACHINE).roles
    assert [a.calls_per_s, b.calls_per_s] == pytest.approx([5, 10], abs=0.2)
    assert [a.utilisation, b.utilisation] == pytest.approx([1, 0.5], abs=0.01)


def test_calls_go_to_the_least_loaded_instance_and_obey_littles_law() -> None:
    four = system(
        [{"name": "a", "workers": 4, "slots": 2}],
        [{"call": "a.f", "rate": 30}],
        {"a.f": {"time": "200ms"}},
        duration="10m",
    )
    result = four.simulate(MACHINE)
    (figures,) = result.roles
    assert figures.calls_per_s == pytest.approx(30, rel=0.05)
    assert figures.utilisation == pytest.approx(30 * 0.2 / 8, rel=0.05)
    assert result.client_calls + result.unanswered == pytest.approx(30 * 600, rel=0.05)


def test_equal_seeds_give_equal_results() -> None:
    loaded = system([{"name": "a", "workers": 2}], [{"call": "a.f", "rate": 5}], {"a.f": {"time": "1s"}}, duration="1m")
    first, again, other = (loaded.simulate(MACHINE, seed=seed).to_dict() for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_workers_follow_the_load_within_three_decisions_and_rest_in_between() -> None:
    result = dt.ActorSystem.load(SCALED).simulate(MACHINE)
    times = [change.at_s for change in result.changes]
    counts = [change.after for change in result.changes]
    assert counts[:2] == [4, 11]  # 64 and 164 callers, 16 calls per instance
    assert times[0] <= 15
    assert 240 < times[1] <= 255
    assert all(change.at_s > 480 for change in result.changes[2:])
    assert counts[-1] in (4, 5)
    rollout = result.roles[0]
    assert rollout.workers == (1, 11, counts[-1])
    assert max(rollout.timeline) == 11


def test_constant_load_does_not_flap_for_an_hour() -> None:
    steady = system(
        [{"name": "a", "workers": [1, 12], "slots": 8, "scale": {"target": 4}}],
        [{"call": "a.f", "rate": 12}],
        {"a.f": {"time": "2s"}},
        duration="1h",
    )
    result = steady.simulate(MACHINE)
    assert len([change for change in result.changes if change.at_s > 600]) <= 3
    assert result.changes[-1].after in (5, 6, 7)  # 24 calls at a time, 4 per instance


@pytest.mark.parametrize(("signal", "expected"), [("pool.fill", {3, 4, 5}), ("pool.is_full", {7, 8, 9})])
def test_a_full_pool_means_fewer_rollouts(signal: str, expected: set[int]) -> None:
    """A rollout adds 2 trajectories in 5 s, the trainer takes 7: 3.5 rollouts keep the pool as it is, with 7 it is
    full half of the time."""
    scale = {"signal": signal, "target": 0.5, "inverse": True}
    roles: list[dict[str, Any]] = [
        {"name": "rollout", "workers": [1, 12], "slots": 2, "scale": scale},
        {"name": "pool", "slots": 100},
        {"name": "trainer"},
    ]
    result = system(
        roles,
        [{"call": "rollout.play", "callers": 24}, {"call": "trainer.step", "callers": 1}],
        {
            "rollout.play": {"time": "5s", "calls": ["pool.put"]},
            "pool.put": {"time": "1ms"},
            "trainer.step": {"time": "5s", "calls": ["pool.take"]},
            "pool.take": {},
        },
        stores={"pool": {"capacity": 80, "adds": {"pool.put": 1}, "takes": {"pool.take": 7}}},
        duration="1h",
    ).simulate(MACHINE)
    assert result.changes[-1].at_s < 1800
    assert result.changes[-1].after in expected
    assert any(change.after < change.before for change in result.changes)


def test_growth_ends_where_no_more_fit() -> None:
    scaled: dict[str, Any] = {"name": "a", "workers": [1, 100], "scale": {"target": 1}}
    roles: list[dict[str, Any]] = [scaled, {"name": "b", "resources": {"cpus": 2}}]
    result = system(roles, [{"call": "a.f", "callers": 50}], {"a.f": {"time": "1s"}}, duration="1m").simulate(
        "1x(8cpu)"
    )
    (change,) = result.changes
    assert (change.after, change.reason[-13:]) == (6, "(no more fit)")


def test_calls_that_wait_for_each_other_are_found() -> None:
    methods = {"a.f": {"calls": ["b.g"]}, "b.g": {"calls": ["a.h"]}, "a.h": {"time": "1ms"}}
    result = system([{"name": "a"}, {"name": "b"}], [{"call": "a.f", "rate": 1}], methods, duration="1m").simulate(
        "1x(2cpu)"
    )
    assert result.stuck == ("a", "b")
    assert "calls of a, b wait for each other" in str(result)
    enough = system([{"name": "a", "slots": 2}, {"name": "b"}], [{"call": "a.f", "rate": 1}], methods, duration="1m")
    assert enough.simulate("1x(2cpu)").stuck == ()


FILE = """\
roles:
  - {name: a, cls: "m:A", workers: [1, 2], scale: {target: 1, signal: b.is_full}}
  - {name: b, cls: "m:B"}
simulate:
  clients:
    - {call: a.f}
    - {call: c.f, rate: 1}
  methods:
    a.f: {calls: [b.g]}
"""


def test_mistakes_of_a_call_pattern_have_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "actors.yaml"
    path.write_text(FILE)
    with pytest.raises(dt.ConfigError) as caught:
        dt.ActorSystem.load(path)
    found = {(problem.place.removeprefix(f"{path}:"), str(problem.message)) for problem in caught.value.problems}
    assert found == {
        ("5:3", "role 'a' is scaled by 'is_full' of 'b', which a simulation does not have"),
        ("6:7", "client 1: set either rate or callers"),
        ("7:8", "'c.f': there is no role 'c'"),
        ("9:19", "'b.g' has no service time"),
    }
    assert all(problem.fixes for problem in caught.value.problems)
    path.write_text(FILE.replace("callers", "caller").replace("rate: 1", "rate: fast"))
    with pytest.raises(dt.ConfigError, match=r"simulate.clients\[1\].rate should be a number"):
        dt.ActorSystem.load(path)


def test_a_file_is_simulated_on_the_command_line(tmp_path: Path) -> None:
    short = tmp_path / "actors.yaml"
    short.write_text(SCALED.read_text().replace("duration: 12m", "duration: 30s"))
    shown = run_command("simulate", str(short), "--cluster", MACHINE)
    assert shown.stdout.startswith("scaled on 1x(16cpu, 32GB), simulated for 30 s\n")
    assert "rollout: outstanding 64 per instance, target 16: 1 -> 4 workers" in shown.stdout
    data = json.loads(run_command("simulate", str(short), "--cluster", MACHINE, "--json").stdout)
    assert data["roles"]["rollout"]["workers"] == [1, 4, 4]
    refused = run_command("simulate", str(short), "--limit", "5")
    assert (refused.returncode, "--limit cannot be used with an actors file" in refused.stderr) == (2, True)


def test_a_file_without_a_call_pattern_is_refused_with_one_that_works(tmp_path: Path) -> None:
    path = tmp_path / "actors.yaml"
    path.write_text('roles: [{name: a, cls: "m:A"}]\n')
    refused = run_command("simulate", str(path), "--cluster", MACHINE)
    assert refused.returncode == 2
    (fix,) = [line.removeprefix("  fix  ") for line in refused.stderr.splitlines() if line.startswith("  fix  ")]
    path.write_text(f"{path.read_text()}{fix}\n")
    assert run_command("simulate", str(path), "--cluster", MACHINE).returncode == 0
    with pytest.raises(dt.ConfigError, match="no call pattern"):
        dt.ActorSystem([dt.Role("a", "m:A")]).simulate(MACHINE)
