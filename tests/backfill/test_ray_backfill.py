"""Backfills on Ray, also when a node leaves during the backfill."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from backfill_aids import by_id, create_table, left_over, twice
from ray_aids import RESTORED_S, add_node, patiently, until_available_is
from waiting import LONG, time_limit, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future
    from pathlib import Path

    from ray_aids import FakeCluster

pytestmark = pytest.mark.ray

ROWS, EACH, MS = (6_000, 500, 2) if LONG else (2_400, 200, 1)


@pytest.fixture(autouse=True)
def _nothing_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DOVETAIL_HOME", str(tmp_path / "home"))
    with time_limit(150):
        yield


def doubled_where(folder: Path, pause_s: float, go: Path | None = None) -> Any:
    """A function for nodes with the label of node d, one worker on each. It records its node as the name of a file; its
    101st call waits for `go`."""

    class Doubled:
        def setup(self, worker: Any) -> None:
            self.node_file, self.calls = folder / worker.node, 0

        def __call__(self, id: int) -> int:  # noqa: A002 - the column's name
            time.sleep(pause_s)
            self.node_file.touch()
            self.calls += 1
            while go is not None and self.calls > 100 and not go.exists():
                time.sleep(0.01)
            return 2 * id

    return dt.udf(Doubled, cpus=4, labels={"fake": "d"}, version="1")


def test_a_column_is_the_same_on_ray_and_a_local_backfill_is_resumed_there(
    ray_cluster: FakeCluster, tmp_path: Path
) -> None:
    uri = create_table(tmp_path, 2_000, 400)
    nodes = tmp_path / "nodes"
    nodes.mkdir()
    before = ray_cluster.available()
    function = doubled_where(nodes, 0.0)
    table = dt.table(uri)
    here = dt.udf(function.fn, version="1")  # what it needs does not matter to what is done
    assert table.backfill("n", here, fragments=2, workers=1).rows == 800
    filled = table.backfill("n", function, engine=f"ray:{ray_cluster.address}")
    assert (filled.status, filled.rows, filled.done_before, filled.fragments) == ("finished", 1_200, 800, 3)
    assert ray_cluster.nodes["d"].dovetail_name in {path.name for path in nodes.iterdir()}
    assert by_id(uri, "n") == twice(range(2_000))
    until_available_is(ray_cluster, before, patiently(RESTORED_S))


@pytest.mark.processes
def test_a_node_that_is_removed_in_the_midst_of_it_loses_no_row(ray_cluster: FakeCluster, tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    uri = create_table(tmp_path, ROWS, EACH)
    nodes = tmp_path / "nodes"
    nodes.mkdir()
    before = ray_cluster.available()
    with add_node(ray_cluster, labels={"fake": "d"}) as leaves, ThreadPoolExecutor() as pool:
        function = doubled_where(nodes, MS / 1000, tmp_path / "go")
        future: Future[dt.BackfillResult] = pool.submit(
            dt.table(uri).backfill,
            "n",
            function,
            engine=f"ray:{ray_cluster.address}",
            commit_every="1s" if LONG else "300ms",
        )
        both = {ray_cluster.nodes["d"].dovetail_name, leaves.dovetail_name}
        until(lambda: both <= {path.name for path in nodes.iterdir()} or future.done(), "both nodes work")
        assert not future.done(), future.result()
        leaves.kill(signal.SIGKILL if LONG else signal.SIGTERM)  # Ray detects a killed node 14 s later
        (tmp_path / "go").touch()
        filled = future.result()
    assert (filled.status, filled.errors, filled.fragments) == ("finished", 0, ROWS // EACH)
    assert by_id(uri, "n") == twice(range(ROWS))
    assert left_over(uri) == []
    until_available_is(ray_cluster, before, patiently(RESTORED_S))
