"""
Runs code in processes forked from a Python that has imported a few modules, and nothing else that
takes time.
"""

import faulthandler
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Sequence

TIME_LIMIT = 60  # seconds, for each


class BarePython:
    """
    # Parameters

    modules : `Sequence[str]`
        Those that it imports, in this order.
    environment : `Dict[str, str]`
        All of it.
    """

    def __init__(self, modules: Sequence[str], environment: Dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def run(self, code: str, *arguments: Any, cwd: Path) -> str:
        """
        As `python -c {code} {arguments}`.

        # Returns

        `str`
            What it has printed, errors too. If its exit code isn't 0, the test fails.
        """
        output = cwd / "output.txt"
        request = (code, list(map(str, arguments)), str(cwd), str(output))
        assert self._process.stdin is not None and self._process.stdout is not None
        assert self._process.poll() is None, "The process has ended; see its output."
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        exit_code = self._process.stdout.readline()
        assert exit_code, "The process has ended; see its output."
        text = output.read_text()
        assert exit_code == "0\n", text
        return text

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def _serve() -> None:
    sys.path[0] = ""  # as that of `python -c`
    for name in sys.argv[1:]:
        __import__(name)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                _run(*json.loads(line))
            except BaseException:
                sys.excepthook(*sys.exc_info())
                exit_code = 1
            else:
                exit_code = 0
            sys.stdout.flush()
            # What has been imported isn't taken down, which takes half a second.
            os._exit(exit_code)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _run(code: str, arguments: Sequence[str], cwd: str, output: str) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(cwd)
    faulthandler.dump_traceback_later(TIME_LIMIT, exit=True)
    sys.argv[1:] = arguments
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    _serve()
