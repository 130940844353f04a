"""
Runs code in processes forked from a Python that has imported a few modules, and nothing else.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Sequence

TIME_LIMIT = 60  # seconds, for each

# What has been imported isn't taken down at the end, which takes half a second.
_SERVE = f"""
import faulthandler, json, os, sys
for name in sys.argv[1:]:
    __import__(name)
for line in sys.stdin:
    request = json.loads(line)
    pid = os.fork()
    if pid == 0:
        output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(request["cwd"])
        faulthandler.dump_traceback_later({TIME_LIMIT}, exit=True)
        sys.argv[1:] = request["arguments"]
        code = compile(request["code"], "<string>", "exec")
        try:
            exec(code, vars(sys.modules["__main__"]))
        except BaseException:
            sys.excepthook(*sys.exc_info())
        else:
            sys.stdout.flush()
            os._exit(0)
        os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
os._exit(0)
"""


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
            [sys.executable, "-c", _SERVE, *modules],
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
        request = {
            "code": code,
            "arguments": list(map(str, arguments)),
            "cwd": str(cwd),
            "output": str(output),
        }
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        code_of_exit = self._process.stdout.readline()
        text = output.read_text()
        assert code_of_exit == "0\n", text
        return text

    def close(self) -> None:
        self._process.communicate()
