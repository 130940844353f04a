"""
A stand-in for `ssh` and for `pdsh` to the hosts of `tests/support/hosts.py`: what they run gets
nothing of the environment here, begins in the home directory, and is given to a shell as one line.

    python -m tests.support.stand_in_remote_shell ssh -x host-1 COMMAND...
    python -m tests.support.stand_in_remote_shell pdsh -S -w host-0,host-1 COMMAND...    # on all

Needs nothing but the standard library. `commands_in` writes both commands into a folder.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Dict, List, Tuple

# A host's name, and the process that holds its namespaces.
HOLDERS = "TESTS_HOLDERS_OF_HOSTS"

_OPTIONS_WITH_VALUE = ("-o", "-p", "-l", "-w", "-f")


def commands_in(folder: Path, holders: Dict[str, int]) -> Dict[str, str]:
    """
    # Returns

    `Dict[str, str]`
        Variables for the environment of a launcher, which then takes these for the real ones.
    """
    folder.mkdir()
    for name in ("ssh", "pdsh"):
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} -I {__file__} {name} "$@"\n')
        path.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", HOLDERS: json.dumps(holders)}


def main(name: str, arguments: List[str]) -> int:
    options, operands = _parse(arguments)
    if name == "ssh":
        host, *command = operands
        return _start(host, command).wait()
    processes = [
        # Its place among the hosts is put in for %n.
        _start(host, [argument.replace("%n", str(number)) for argument in operands])
        for number, host in enumerate(options["-w"].split(","))
    ]
    return max(abs(process.wait()) for process in processes)


def _parse(arguments: List[str]) -> Tuple[Dict[str, str], List[str]]:
    options: Dict[str, str] = {}
    rest = list(arguments)
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        options[option] = rest.pop(0) if option in _OPTIONS_WITH_VALUE else ""
    return options, rest


def _start(host: str, command: List[str]) -> subprocess.Popen:
    holder = json.loads(os.environ[HOLDERS])[host]
    enter = ["nsenter", "--net", "--uts", "--mount", "--target", str(holder), "--wd=/"]
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/", "SHELL": "/bin/sh"}
    # As if it were in the host's own environment, by which `tests/support/launching.py` is reached.
    environment.update({k: v for k, v in os.environ.items() if k.startswith("TESTS_LAUNCHING")})
    return subprocess.Popen([*enter, "sh", "-c", " ".join(command)], env=environment)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
