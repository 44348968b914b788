"""A warm process is a process: folder, variables, `__main__`, exit code, and what a signal does to it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from runtime.aids import Script, is_there

SELF = """
import os, sys
print(os.getcwd() == os.path.dirname(__file__) == sys.path[0], sys.argv == [__file__], sys.modules["__main__"].__name__)
print(os.getsid(0) == os.getpid(), os.environ["OWN"], sorted(os.listdir("/proc/self/task")) == [str(os.getpid())])
print(os.readlink("/proc/self/fd/0"), len(os.listdir("/proc/self/fd")) - 1)  # one is that of listdir
"""


def test_a_warm_script_has_its_own_folder_variables_and_session(tmp_path: Path) -> None:
    before = Path.cwd()
    with Script(tmp_path, SELF, warm=True, OWN="yes") as one, Script(tmp_path, SELF, warm=True, OWN="no") as two:
        assert one.finish().splitlines() == ["True True __main__", "True yes True", "/dev/null 3"]
        assert two.finish().splitlines()[1] == "True no True"
        assert len({one.process.pid, two.process.pid, os.getpid()}) == 3
    assert Path.cwd() == before
    assert "OWN" not in os.environ


def test_a_warm_script_imports_from_its_own_python_path(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("name = 'beside'")
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "far.py").write_text("name = 'far'")
    text = "import beside, dovetail, far\nprint(beside.name, far.name)"
    path = os.pathsep.join([str(tmp_path / "modules"), os.environ.get("PYTHONPATH", "")])
    with Script(tmp_path, text, warm=True, PYTHONPATH=path) as script:
        assert script.finish() == "beside far\n"
    with Script(tmp_path, text, warm=True) as script:
        assert script.ended() == 1
        assert "No module named 'far'" in script.output


def test_exit_codes_and_signals_of_a_warm_script(tmp_path: Path) -> None:
    ends = {
        "pass": 0,
        "raise SystemExit": 0,
        "raise SystemExit(3)": 3,
        "raise SystemExit(-1)": 255,
        "import os; os._exit(4)": 4,
        "1 / 0": 1,
    }
    for text, code in ends.items():
        with Script(tmp_path, text, warm=True) as script:
            assert script.ended() == code
            assert ("ZeroDivisionError" in script.output) == (code == 1)
    with Script(tmp_path, "import atexit, sys; atexit.register(print, 'end'); sys.exit('why')", warm=True) as script:
        assert script.ended() == 1
        assert script.output.splitlines() == ["why", "end"]
    thread = "import threading, time\ndef last():\n    time.sleep(0.05)\n    print('end')\n"
    with Script(tmp_path, f"{thread}threading.Thread(target=last).start()", warm=True) as script:
        assert script.finish() == "end\n", "a process waits for its threads"
    for how in (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        with Script(tmp_path, "import time\nprint('begun')\ntime.sleep(600)", warm=True) as script:
            script.says("begun")
            assert script.process.poll() is None
            script.kill(how)
            assert script.ended() == -how
            script.all_gone()
            assert not is_there(script.process.pid)


def test_a_warm_script_is_gone_at_the_end_of_its_block(tmp_path: Path) -> None:
    with Script(tmp_path, "import time\nprint('begun')\ntime.sleep(600)", warm=True) as script:
        script.says("begun")
    assert not is_there(script.process.pid)
