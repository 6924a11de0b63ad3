# SPDX-License-Identifier: Apache-2.0
"""A real Slurm of one node on loopback, with pretend GPUs, for as long as a `with` block.

munged, slurmctld and slurmd run as this user, in the foreground, below `timeout`; all that they write lies in one new
folder. A reaper of its own ends them and what they started when the block is left or this process is gone.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import reaper

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo")
SYSTEM = "/usr/sbin:/usr/bin:/sbin:/bin"
START_S = 30.0

# The plug-ins that need no privilege, no accounting and no control group; cred_expire is also how
# long a job waits that is started again.
CONFIG = """\
ClusterName=routeblock
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/completed
Prolog={folder}/bin/prolog
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0,batch_sched_delay=0
GresTypes=gpu
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldTimeout=30
SlurmdTimeout=30
KillWait=2
MinJobAge=300
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=16000 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=gpu Nodes={host} Default=YES MaxTime=60 State=UP OverSubscribe=NO
"""


@dataclass(frozen=True)
class Node:
    """The running node: its folder, its name, and the environment of its users."""

    folder: Path
    name: str
    environment: dict[str, str]

    def command(self, *arguments: str) -> str:
        """What a command of Slurm says; CalledProcessError when it fails."""
        return subprocess.run(
            arguments, env=self.environment, check=True, capture_output=True, text=True, timeout=60
        ).stdout

    def completed(self) -> list[dict[str, str]]:
        """The jobs that ended, as Slurm wrote them down: JobId, JobState, StartTime, EndTime, Tres and more."""
        file = self.folder / "completed"
        lines = file.read_text().splitlines() if file.exists() else []
        return [dict(part.split("=", 1) for part in line.split() if "=" in part) for line in lines]

    def grants(self) -> list[tuple[str, str]]:
        """(job, GPUs) of every start of a job that holds some, in order; a job that was started again stands twice."""
        file = self.folder / "grants"
        lines = file.read_text().splitlines() if file.exists() else []
        return [(job, gpus) for job, _, gpus in (line.partition(" ") for line in lines) if gpus]

    def diagnosis(self) -> str:
        """The ends of the daemons' logs."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"== {log.name}\n" + "\n".join(log.read_text().splitlines()[-20:]) for log in logs)


@contextmanager
def single_node(*, gpus: int = 2, cpus: int = 8, limit_s: float = 900.0) -> Iterator[Node]:
    """A node that is idle. RuntimeError: a tool is missing, a daemon ended, or the node is not idle in time.

    limit_s: seconds after which everything is ended, whatever still runs.
    """
    path = f"{os.environ.get('PATH', '')}:{SYSTEM}"
    if missing := [tool for tool in TOOLS if not shutil.which(tool, path=path)]:
        raise RuntimeError(f"Slurm is not whole here: {', '.join(missing)} not found; run tests/slurm/install.sh")
    folder = Path(tempfile.mkdtemp(prefix="routeblock-slurm-"))
    with ExitStack() as stack:
        _start_reaper(stack, folder, limit_s)
        node = _write(folder, path, gpus, cpus)
        try:
            daemons = _start(node, limit_s)
            _await_idle(node, daemons)
        except RuntimeError as e:
            raise RuntimeError(f"{e}\n{node.diagnosis()}") from None
        yield node


def _start_reaper(stack: ExitStack, folder: Path, limit_s: float) -> None:
    held, hold = os.pipe()  # neither is inherited by anybody but the reaper
    command = [sys.executable, reaper.__file__, str(folder), str(limit_s)]
    process = subprocess.Popen(command, stdin=held, start_new_session=True)
    os.close(held)
    stack.callback(process.wait)
    stack.callback(os.close, hold)


def _write(folder: Path, path: str, gpus: int, cpus: int) -> Node:
    host = socket.gethostname().split(".")[0]
    for name in ("state", "spool", "dev", "bin"):
        (folder / name).mkdir()
    for i in range(gpus):
        (folder / "dev" / f"gpu{i}").symlink_to("/dev/null")
    controller, node = _free_ports(2)
    user = pwd.getpwuid(os.getuid()).pw_name
    config = CONFIG.format(host=host, folder=folder, user=user, controller=controller, node=node, gpus=gpus, cpus=cpus)
    (folder / "slurm.conf").write_text(config)
    (folder / "gres.conf").write_text(f"AutoDetect=off\nNodeName={host} Name=gpu File={folder}/dev/gpu[0-{gpus - 1}]\n")
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(1024))
    # The executor's job step takes SLURM_CONF out of the environment of `srun`.
    srun = folder / "bin" / "srun"
    srun.write_text(f'#!/bin/sh\nSLURM_CONF={folder}/slurm.conf exec {shutil.which("srun", path=path)} "$@"\n')
    srun.chmod(0o700)
    prolog = folder / "bin" / "prolog"
    prolog.write_text(f'#!/bin/sh\necho "$SLURM_JOB_ID $SLURM_JOB_GPUS" >> {folder}/grants\n')
    prolog.chmod(0o700)
    own = {"PATH": f"{folder}/bin:{path}", "SLURM_CONF": f"{folder}/slurm.conf", reaper.MARK: str(folder)}
    return Node(folder, host, os.environ | own)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


def _start(node: Node, limit_s: float) -> dict[str, subprocess.Popen[bytes]]:
    at = node.folder
    files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munged.log"}
    files |= {"seed-file": "munge.seed"}
    munged = ["munged", "--foreground", "--force", *(f"--{option}={at}/{name}" for option, name in files.items())]
    daemons = {}
    for name, command in {"munged": munged, "slurmctld": ["slurmctld", "-D"], "slurmd": ["slurmd", "-D"]}.items():
        limited = ["timeout", "--kill-after=5", str(limit_s), *command]
        with (at / f"{name}.out.log").open("wb") as log:
            daemons[name] = subprocess.Popen(
                limited, env=node.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        if name == "munged":
            _await(lambda: (at / "munge.socket").exists(), daemons, "munged has no socket")
    return daemons


def _await_idle(node: Node, daemons: dict[str, subprocess.Popen[bytes]]) -> None:
    def idle() -> bool:
        asked = subprocess.run(
            ["sinfo", "--noheader", "--format=%T"], env=node.environment, capture_output=True, text=True, timeout=60
        )
        return asked.stdout.strip() == "idle"

    _await(idle, daemons, "the node is not idle")


def _await(done: Callable[[], bool], daemons: dict[str, subprocess.Popen[bytes]], what: str) -> None:
    until = time.monotonic() + START_S
    while not done():
        for name, process in daemons.items():
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended with {process.returncode}")
        if time.monotonic() > until:
            raise RuntimeError(f"{what} after {START_S:g} s")
        time.sleep(0.05)
