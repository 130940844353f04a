"""
Hosts that are on this machine and see of one another what a network between them carries: Linux
network namespaces, each joined by a pair of virtual interfaces to a switch, with a host name and an
`/etc/hosts` of its own. They share the file system, so that tests choose by a path whether a
directory is shared.

Each namespace is held by a process that ends with the one that has made it, and the kernel removes
what nobody holds: nothing is left, however a test ends. Needs root, and Debian's iproute2 and
util-linux.
"""

import ctypes
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import psutil

from tests.support.command import Command, Run, wait_for_all
from tests.support.experiment import INCLUDED, Config

PORT = 29500  # a host's ports are its own

# Seconds, for the trainings of all hosts. They take some, and one that waits for a host that is
# gone would take for ever.
TIME_LIMIT = 90

_NAMESPACES = ["--net", "--uts", "--mount"]
_UNSHARE = ["unshare", *_NAMESPACES, "--propagation", "slave", "sh", "-ec"]
_NEW_SWITCH = "ip link add switch type bridge; ip link set switch up"
_PROBE = f"hostname probe; {_NEW_SWITCH}; ip link add one type veth peer name two"


def missing_right() -> Optional[str]:
    """Why there can be no hosts on this machine; `None` if there can."""
    missing = [name for name in ("ip", "unshare", "hostname") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found: install iproute2 and util-linux"
    probe = subprocess.run([*_UNSHARE, _PROBE], capture_output=True, text=True)
    return f"no network namespaces: {probe.stderr.strip()}" if probe.returncode != 0 else None


def enter(pid: int) -> None:
    """Has this process, which must have a single thread, be where another one is."""
    libc = ctypes.CDLL(None, use_errno=True)
    folder = os.getcwd()
    for namespace in ("net", "uts", "mnt"):
        path = f"/proc/{pid}/ns/{namespace}"
        if os.readlink(path) == os.readlink(f"/proc/self/ns/{namespace}"):
            continue  # for which no right is needed
        with open(path) as file:
            if libc.setns(file.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), f"setns to {namespace} of {pid}")
    os.chdir(folder)


class Host(NamedTuple):
    """
    # Parameters

    rank : `int`
        That of the node.
    name : `str`
        Also in the output of commands.
    address : `str`
    holder : `int`
        The process that holds its namespaces.
    switch : `int`
        The process that holds the other end of its link.
    """

    rank: int
    name: str
    address: str
    holder: int
    switch: int

    def enter(self) -> None:
        """Makes this process, which must have a single thread, one of the host's."""
        enter(self.holder)

    def start(self, *arguments: Any, **kwargs: Any) -> Command:
        """Starts the `allennlp` command on it. Arguments are those of `Command`."""
        kwargs.setdefault("include_packages", ("allennlp_deepspeed", INCLUDED))
        return Command(*arguments, enter=self.enter, **kwargs)

    def train(self, config: Path, serialization_dir: Path, *arguments: Any, **kw: Any) -> Command:
        """Starts `allennlp train` on it, as the node that it is."""
        node_rank = ["--node-rank", self.rank]
        return self.start("train", config, "-s", serialization_dir, *node_rank, *arguments, **kw)

    def command(self, *arguments: Any) -> List[str]:
        """What runs another command on it."""
        enter = ["nsenter", "--net", "--uts", "--mount", "--target", str(self.holder)]
        return [*enter, f"--wd={os.getcwd()}", *map(str, arguments)]

    def cut_link(self) -> None:
        """As if the cable were pulled: nothing arrives any more, and nobody is told."""
        self._set_link("down")

    def join_link(self) -> None:
        self._set_link("up")

    def take_interface_down(self) -> None:
        """As an administrator does: its address can't be reached, not even from the host."""
        _run_in(self.holder, "ip", "link", "set", "eth0", "down")

    def _set_link(self, state: str) -> None:
        _run_in(self.switch, "ip", "link", "set", f"port{self.rank}", state)


class Hosts:
    """
    # Parameters

    count : `int`
    directory : `Path`
        For their `/etc/hosts`.
    disks : `Dict[Path, int]`, optional (default = `None`)
        Directories that are disks of so many bytes on all of the hosts. Elsewhere they are empty:
        `seen` says where their files are.
    """

    def __init__(
        self, count: int, directory: Path, disks: Optional[Dict[Path, int]] = None
    ) -> None:
        self._holders: List[subprocess.Popen] = []
        addresses = {f"host-{rank}": f"10.77.0.{rank + 1}" for rank in range(count)}
        names = directory / "hosts"
        lines = [f"{address} {name}\n" for name, address in addresses.items()]
        names.write_text("".join(["127.0.0.1 localhost\n", *lines]))
        self.hosts: List[Host] = []
        try:
            mounts = [
                f"; mount -t tmpfs -o size={size} disk '{path}'"
                for path, size in (disks or {}).items()
            ]
            self._switch = switch = self._hold(_NEW_SWITCH + "".join(mounts))
            for rank, (name, address) in enumerate(addresses.items()):
                set_up = f"hostname {name}; mount --bind '{names}' /etc/hosts"
                holder = self._hold(set_up, ["nsenter", "--mount", "--target", str(switch)])
                self.hosts.append(Host(rank, name, address, holder, switch))
                _plug_in(self.hosts[-1])
        except BaseException:
            self.remove()
            raise

    def __getitem__(self, rank: int) -> Host:
        return self.hosts[rank]

    def distributed(self, workers: int = 2) -> Config:
        """AllenNLP's section of this name, for so many workers on each host."""
        return {
            "cuda_devices": [-1] * workers,
            "num_nodes": len(self.hosts),
            "primary_address": self.hosts[0].address,
            "primary_port": PORT,
        }

    def train(
        self,
        config: Config,
        directories: Sequence[Path],
        *arguments: Any,
        time_limit: float = TIME_LIMIT,
        environment: Optional[Dict[str, str]] = None,
    ) -> List[Run]:
        """
        Trains on all hosts, with two workers each unless the config has its own "distributed".

        # Parameters

        config : `Dict[str, Any]`
        directories : `Sequence[Path]`
            The serialization directory of each host.
        arguments : `Any`
            More of the command's.
        time_limit : `float`, optional (default = `TIME_LIMIT`)
            In seconds, for all of them.
        environment : `Dict[str, str]`, optional (default = `None`)
        """
        path = write_config({"distributed": self.distributed(), **config}, directories[0])
        commands = [
            host.train(path, directory, *arguments, environment=environment)
            for host, directory in zip(self.hosts, directories, strict=True)
        ]
        return wait_for_all(commands, time_limit)

    def remove(self) -> None:
        """With all processes that are on them."""
        namespaces = {_network_namespace(holder.pid) for holder in self._holders}
        # One that has ended has none, and one that could not make its own is in this process's.
        namespaces -= {None, _network_namespace(os.getpid())}
        for process in psutil.process_iter():
            if _network_namespace(process.pid) in namespaces:
                process.kill()
        for holder in self._holders:
            holder.communicate()

    def seen(self, path: Path) -> Path:
        """Where a file of the hosts is for this process, until `remove`."""
        return Path(f"/proc/{self._switch}/root{path.resolve()}")

    def _hold(self, set_up: str, enter: Sequence[str] = ()) -> int:
        """
        Starts a process in new namespaces, and returns its id when they are set up. They begin as
        copies of those that `enter` has entered.
        """
        script = f"{set_up}; ip link set lo up; echo ready; exec cat"
        # What it waits for is that this process closes the pipe, at the latest when it ends.
        holder = subprocess.Popen(
            [*enter, *_UNSHARE, script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._holders.append(holder)
        assert holder.stdout is not None and holder.stderr is not None
        if holder.stdout.readline() != "ready\n":
            raise RuntimeError(holder.stderr.read())
        return holder.pid


def on_one_host(config: Config, workers: int = 2) -> Config:
    """The config for one host that has the workers of two with `workers` each."""
    return {**config, "distributed": {"cuda_devices": [-1] * 2 * workers}}


def write_config(config: Config, serialization_dir: Path) -> Path:
    """Next to the serialization directory, which a training wants to make."""
    path = serialization_dir.with_suffix(".json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config))
    return path


def _plug_in(host: Host) -> None:
    port = f"port{host.rank}"
    link = f"ip link add {port} type veth peer name eth0 netns {host.holder}"
    _run_in(host.switch, *link.split())
    _run_in(host.switch, *f"ip link set {port} master switch up".split())
    _run_in(host.holder, *f"ip address add {host.address}/24 dev eth0".split())
    _run_in(host.holder, *["ip", "link", "set", "eth0", "up"])


def _run_in(holder: int, *command: str) -> None:
    """Runs a command in the network namespace of a process."""
    arguments = ["nsenter", "--net", "--target", str(holder), *command]
    result = subprocess.run(arguments, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {result.stderr.strip()}")


def _network_namespace(pid: int) -> Optional[str]:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:  # it has ended
        return None
