"""Nobody waits for an interpreter that looks through all its objects before it ends."""

import subprocess
import sys

import pytest

ASK = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 0)); "


@pytest.mark.parametrize(
    "code",
    [
        "import worker.app",
        "import cli.main, sys; sys.argv = ['tokenmill', '--version']; cli.main.main()",
        # its parent is gone before it has said a word
        "import os, socket, worker.engine_process as engine; ours, theirs = socket.socketpair(); "
        "ours.close(); engine.main(theirs.detach())",
    ],
    ids=["worker", "command", "engine"],
)
def test_at_its_exit_a_process_has_frozen_what_it_holds(code):
    done = subprocess.run(
        [sys.executable, "-c", ASK + code],
        env={"PYTHONPATH": ":".join(sys.path), "TOKENMILL_MODELS": "tiny=/x"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["True"], done.stderr
