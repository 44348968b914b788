"""Arguments of `dt.run` are checked together and before anything starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from dovetail.runtime import run, service
from runtime.aids import CLUSTER, run_of
from stage_functions import same

if TYPE_CHECKING:
    from pathlib import Path
pytestmark = pytest.mark.time_limit


def test_all_invalid_arguments_are_reported_together(tmp_path: Path) -> None:
    wrong: Any = {"engine": "lokal", "max_errors": -1, "ordered": "no", "options": {"a": 1}, "run_dir": 5}
    not_a_pipeline: Any = same
    with pytest.raises(dt.ConfigError) as raised:
        dt.run(not_a_pipeline, 5, **wrong)
    assert sorted(raised.value.codes) == ["DT331", "DT332", "DT337", *["DT338"] * 4]
    wrong_list: Any = [same, 5]
    with pytest.raises(dt.ConfigError) as listed:
        dt.run(wrong_list, 5, **wrong)
    assert sorted(listed.value.codes) == ["DT034", "DT331", "DT332", *["DT338"] * 4]
    for name in ("lokal", "max_errors=-1", "ordered='no'", "options=", "run_dir=5"):
        assert name in str(raised.value)


@pytest.mark.parametrize("start", ["run", "serve"])
@pytest.mark.parametrize(
    ("code", "message", "fix"),
    [
        ("typo_steps:wrods", "stage 'a': typo_steps has no 'wrods' (did you mean 'words'?)", 'run="typo_steps:words"'),
        ("typo_stesp:words", "no module named 'typo_stesp' (did you mean 'typo_steps'?)", 'run="typo_steps:words"'),
    ],
)
def test_a_misspelt_function_is_found_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str, code: str, message: str, fix: str
) -> None:
    (tmp_path / "typo_steps.py").write_text("raise RuntimeError('not to be imported')\ndef words(rows): return rows\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(service, "open_site", lambda *_, **__: pytest.fail("it was reached"))
    monkeypatch.setattr(run, "open_site", lambda *_, **__: pytest.fail("it was reached"))
    pipeline = dt.Pipeline([dt.Stage("a", code)])
    with pytest.raises(dt.ConfigError) as raised:
        dt.run(pipeline, range(3)) if start == "run" else dt.serve(pipeline)
    (problem,) = raised.value.problems
    assert (problem.code, problem.fix_texts) == ("DT034", (fix,))
    assert message in problem.message


def test_a_share_requires_a_ray_cluster() -> None:
    for share in (0.5, 1):
        with pytest.raises(dt.ConfigError, match="this run is local") as raised:
            dt.run(dt.Pipeline([dt.Stage("same", same)]), range(3), share=share)
        assert raised.value.codes == ("DT338",)


@pytest.mark.parametrize(
    "wrong", [{"source": "nothing/*.jsonl"}, {"sink": 5}, {"resume": "nobody"}, {"retry_errors": "nobody"}]
)
def test_arguments_are_checked_before_a_cluster_is_contacted(
    wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "open_site", lambda *_, **__: pytest.fail("it was reached"))
    with pytest.raises(dt.DovetailError):
        dt.run(dt.Pipeline([dt.Stage("same", same)]), **({"source": range(3), "engine": "ray"} | wrong))


@pytest.mark.parametrize("of_another", [True, False])
def test_a_plan_for_another_pipeline_is_refused(of_another: bool) -> None:
    plan: Any = dt.plan(dt.Pipeline([dt.Stage("other", same)]), CLUSTER) if of_another else "fast"
    with pytest.raises(dt.ConfigError) as raised:
        run_of(dt.Stage("same", same), source=range(3), plan=plan)
    assert raised.value.codes == ("DT338",)
