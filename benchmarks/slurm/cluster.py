"""Real SLURM cluster of two virtual nodes on this host, for tests. It needs no installation and no root access."""

# Longer than other modules because one class manages the complete lifecycle of a cluster.

from __future__ import annotations

import os
import pwd
import random
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from benchmarks.slurm.installation import Installation, SlurmUnavailable
from benchmarks.slurm.processes import Process, kill_together, running_processes, with_descendants

SECOND_NODE = "zz-node2"
"""Name of the second node. It sorts after the host's name, so that the host has rank 0 and runs the batch script."""

NODE_MARK = "SLURM_LAB_NODE"
"""Environment variable of slurmd and slurmstepd processes with the name of the node to which they belong."""

DEVICES = ("/dev/null", "/dev/zero")
"""Devices that represent GPUs."""

POLL = 0.1
"""Polling interval in seconds."""

PORTS = 100
"""Number of ports of a cluster: one each for slurmctld and the two slurmd, the others for srun."""

TERMINAL = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY"})

CONFIGURATION = """\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SrunPortRange={first_srun_port}-{last_srun_port}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
PlugStackConfig={folder}/plugstack.conf
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
ReturnToService=2
JobRequeue=1
SlurmctldTimeout=10
SlurmdTimeout={lost_node_after}
KillWait=5
OverTimeLimit=0
MailProg=/bin/true
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={first_port} CPUs={cpus} Gres={gres} State=UNKNOWN
NodeName={second} NodeHostname={host} NodeAddr=127.0.0.1 Port={second_port} CPUs={cpus} Gres={gres} State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE \
GraceTime={grace_time}
PartitionName=high Nodes=ALL Default=NO MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


@dataclass
class Cluster:
    """SLURM cluster of two virtual nodes in two partitions.

    Jobs of the partition `low`, the default, are requeued if `high` needs their nodes. `stop` ends every process that the
    cluster has started.

    Args:
        folder: folder of the cluster, which no other cluster may use.
        installation: paths of SLURM's programs.
        cpus: number of CPUs of each node.
        gpus: number of GPUs of each node, at most two. SLURM assigns them to jobs, but they are not real GPUs.
        grace_time: seconds between the signal to a preempted job and its end.
        lost_node_after: seconds without an answer after which a node is lost (SlurmdTimeout).

    Raises:
        SlurmUnavailable: if a daemon does not start.
    """

    folder: Path
    installation: Installation
    cpus: int = 1
    gpus: int = 0
    grace_time: int = 0
    lost_node_after: int = 10
    _daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict, init=False, repr=False)
    _lost: set[str] = field(default_factory=set, init=False, repr=False)

    def __post_init__(self) -> None:
        self.folder = self.folder.resolve()
        self.nodes = (socket.gethostname().partition(".")[0], SECOND_NODE)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for commands that use this cluster."""
        return {**self.installation.environment, "SLURM_CONF": str(self._configuration)}

    @property
    def _configuration(self) -> Path:
        return self.folder / "slurm.conf"

    def start(self) -> None:
        """Write SLURM's configuration, start its three daemons, and wait until both nodes are idle (about a second)."""
        for name in ("state", *(f"spool/{node}" for node in self.nodes)):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        (self.folder / "plugstack.conf").touch()
        (self.folder / "gres.conf").write_text("".join(f"Name=gpu File={name}\n" for name in DEVICES[: self.gpus]))
        self._configuration.write_text(self._configure())
        self._launch("slurmctld", [str(self.installation.controller), "-D", "-c"])
        for node in self.nodes:
            self.start_node(node, wait=False)
        if not _until(self._all_idle, timeout=30):
            raise SlurmUnavailable(f"The nodes did not become idle within 30 s: {self._last_words()}")

    def _configure(self) -> str:
        first = _free_ports(PORTS)
        text = CONFIGURATION.format(
            host=self.nodes[0],
            second=self.nodes[1],
            user=pwd.getpwuid(os.geteuid()).pw_name,
            folder=self.folder,
            cpus=self.cpus,
            gres=f"gpu:{self.gpus}",
            grace_time=self.grace_time,
            lost_node_after=self.lost_node_after,
            controller_port=first,
            first_port=first + 1,
            second_port=first + 2,
            first_srun_port=first + 3,
            last_srun_port=first + PORTS - 1,
        )
        plugins = self.installation.plugins
        return f"{text}PluginDir={plugins}\n" if plugins else text

    def _launch(self, name: str, command: list[str], mark: dict[str, str] | None = None) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                command,
                env=self.environment | (mark or {}),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def stop(self) -> None:
        """Kill the daemons, and all processes of the daemons and of their jobs."""
        # Repeated, because a process may start another one after the processes were listed.
        _until(lambda: not self._kill_all(lambda process: True), timeout=10)
        for daemon in self._daemons.values():
            daemon.wait()
        self._daemons.clear()

    def kill_controller(self, save: bool = True) -> None:
        """Stop slurmctld; jobs keep running.

        Args:
            save: whether slurmctld saves its state. If false, it loses the last 5 s, including jobs submitted in that time.
        """
        if save:
            daemon = self._daemons["slurmctld"]
            daemon.terminate()
            _until(lambda: daemon.poll() is not None, timeout=10)
        self._kill_daemon("slurmctld")

    def start_controller(self) -> None:
        """Start slurmctld with its saved state, and wait until it answers."""
        self._launch("slurmctld", [str(self.installation.controller), "-D"])
        if not _until(lambda: "is UP" in self.attempt("scontrol", "ping"), 30):
            raise SlurmUnavailable(f"slurmctld did not come back within 30 s: {self._last_words()}")

    def kill_slurmd(self, node: str) -> None:
        """Kill only the slurmd of `node`; its jobs keep running."""
        self._kill_daemon(f"slurmd-{node}")

    def kill_node(self, node: str) -> None:
        """Kill the slurmd of `node`, its slurmstepd and all their descendants, like a power failure.

        SLURM detects the loss after 25 to 35 s, or at once if `declare_down` or `start_node` is called.

        Args:
            node: name of the node.
        """
        _until(lambda: not self._kill_all(lambda process: _node_of(process) == node), timeout=10)
        self._kill_daemon(f"slurmd-{node}")
        spool = self.folder / "spool" / node  # a job's script in it would make the next launch of that job fail
        shutil.rmtree(spool)
        spool.mkdir()
        self._lost.add(node)

    def start_node(self, node: str, wait: bool = True) -> None:
        """Start the slurmd of a node.

        Args:
            node: name of the node.
            wait: whether to wait until jobs can run on the node.
        """
        stepd = ["-d", str(self.installation.stepd)] if self.installation.stepd else []
        if node in self._lost:
            self._lost.discard(node)
            if "down" not in self.node_state(node):
                self.declare_down(node)  # otherwise SLURM assumes for minutes that the job still runs there
        self._launch(f"slurmd-{node}", [str(self.installation.daemon), "-D", "-N", node, *stepd], {NODE_MARK: node})
        if wait and not _until(lambda: self.node_state(node) in {"idle", "mixed", "allocated"}, timeout=60):
            raise TimeoutError(f"{node} is {self.node_state(node)}, not usable, 60 s after its slurmd started.")

    def declare_down(self, node: str) -> None:
        """Tell SLURM that a killed node is lost, before SLURM detects it. Jobs of the node are requeued."""
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")

    def node_state(self, node: str) -> str:
        """Return the state of `node` as sinfo prints it: `idle`, `mixed`, `allocated` or `down`, with * if unreachable."""
        return self.attempt("sinfo", "-h", "-N", "-p", "low", "-n", node, "-o", "%T").strip()

    def run(self, *command: str) -> str:
        """Run a command such as `squeue` and return its standard output.

        Raises:
            RuntimeError: if the command fails. The message contains its error output.
        """
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def submit(self, script: Path, *arguments: str, **options: str | int | bool) -> int:
        """Submit a script with sbatch and return the number of the job.

        Args:
            script: path of the batch script.
            *arguments: arguments of the script.
            **options: options of sbatch: `ntasks_per_node=1` is --ntasks-per-node=1, `requeue=True` is --requeue.
        """
        flags = []
        for name, value in options.items():
            flag = f"--{name.replace('_', '-')}"
            flags += [flag] if value is True else [f"{flag}={value}"]
        return int(self.run("sbatch", "--parsable", *flags, str(script), *arguments).partition(";")[0])

    def show(self, job: int) -> dict[str, str]:
        """Return the fields of `scontrol show job`: JobState, Reason, Restarts, ExitCode, BatchHost, StartTime, ..."""
        text = self.run("scontrol", "-o", "show", "job", str(job))
        # Values may contain spaces, so that a value ends only where the next key begins.
        return dict(re.findall(r"([A-Z][\w/:]*)=(.*?)(?=\s+[A-Z][\w/:]*=|\s*$)", text))

    def wait(self, job: int, states: set[str] | frozenset[str] = TERMINAL, timeout: float = 60) -> dict[str, str]:
        """Wait until a job is in one of several states, and return its fields as :meth:`show` does.

        Args:
            job: number of the job.
            states: values of JobState to wait for; by default those of a job that has ended.
            timeout: time limit in seconds.

        Raises:
            TimeoutError: if the job does not reach such a state in time. The message contains the fields of the job.
        """
        fields: dict[str, str] = {}

        def reached() -> bool:
            fields.update(self.show(job))
            return fields["JobState"] in states

        if not _until(reached, timeout):
            raise TimeoutError(f"Job {job} was none of {sorted(states)} within {timeout:g} s: {fields}")
        return fields

    def signal(self, job: int, name: str, to: Literal["batch", "steps", "all"] = "batch") -> None:
        """Send a signal to processes of a job.

        Args:
            job: number of the job.
            name: name of the signal, such as ``USR1``.
            to: receivers: the shell of the batch script, the tasks of all steps, or all processes.
        """
        flag = {"batch": ["--batch"], "steps": [], "all": ["--full"]}[to]
        self.run("scancel", f"--signal={name}", *flag, str(job))

    def requeue(self, job: int) -> None:
        """Put a running job back into the queue."""
        self.run("scontrol", "requeue", str(job))

    def cancel(self, job: int) -> None:
        """Cancel a job. SLURM sends it SIGTERM, and SIGKILL after KillWait (5 s)."""
        self.run("scancel", str(job))

    def task_pids(self, job: int, node: str | None = None) -> dict[int, int]:
        """Return the process id of the first process of each rank.

        Args:
            job: number of the job.
            node: name of the node whose ranks are returned; None for all ranks.
        """
        processes = {pid: p for pid, p in self._mine().items() if self._is_task(p, job, node)}
        first = {pid: p for pid, p in processes.items() if p.parent not in processes}
        return {int(p.variables["SLURM_PROCID"]): pid for pid, p in first.items()}

    def kill_rank(self, job: int, rank: int) -> None:
        """Kill the process of one rank of a job, and its descendants."""
        first = self.task_pids(job)[rank]
        kill_together(with_descendants({first}, running_processes()))

    @staticmethod
    def _is_task(process: Process, job: int, node: str | None) -> bool:
        variables = process.variables
        return (
            variables.get("SLURM_JOB_ID") == str(job)
            and variables.get("SLURM_STEP_ID", "").isdigit()
            and node in {None, variables.get("SLURMD_NODENAME")}
        )

    def _mine(self) -> dict[int, Process]:
        configuration = str(self._configuration)
        return {pid: p for pid, p in running_processes().items() if p.variables.get("SLURM_CONF") == configuration}

    def _kill_all(self, matches: Callable[[Process], bool]) -> list[int]:
        """Kill the cluster's processes for which ``matches`` is true, with their descendants, and return their ids."""
        matching = {pid for pid, process in self._mine().items() if matches(process)}
        victims = with_descendants(matching, running_processes())
        kill_together(victims)
        return victims

    def _kill_daemon(self, name: str) -> None:
        daemon = self._daemons.pop(name, None)
        if daemon is not None:
            daemon.kill()
            daemon.wait()

    def attempt(self, *command: str) -> str:
        """Run a command like :meth:`run`, but return an empty string if it fails."""
        try:
            return self.run(*command)
        except (RuntimeError, subprocess.TimeoutExpired):
            return ""

    def _all_idle(self) -> bool:
        self._check_daemons()
        return [self.node_state(node) for node in self.nodes] == ["idle", "idle"]

    def _check_daemons(self) -> None:
        for name, daemon in self._daemons.items():
            if daemon.poll() is not None:
                raise SlurmUnavailable(f"{name} ended with {daemon.returncode}: {self._last_words()}")

    def _last_words(self) -> str:
        lines = []
        for log in sorted([*self.folder.glob("*.out"), *self.folder.glob("*.log")]):
            text = log.read_text(errors="replace").strip()
            if text:
                lines.append(f"{log.name}: {text.splitlines()[-1]}")
        return "; ".join(lines)


def _until(look: Callable[[], object], timeout: float) -> bool:
    """Call a function every :data:`POLL` seconds until it returns a true value.

    Returns:
        Whether the function returned a true value within ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    while not look():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL)
    return True


def _node_of(process: Process) -> str | None:
    return process.variables.get("SLURMD_NODENAME") or process.variables.get(NODE_MARK)


def _free_ports(count: int) -> int:
    """Return the first of `count` consecutive free ports from a range that is not used for outgoing connections.

    Raises:
        SlurmUnavailable: if no such ports are free.
    """
    for _ in range(200):
        first = random.SystemRandom().randrange(20000, 32000 - count)
        if all(_is_free(port) for port in range(first, first + count)):
            return first
    raise SlurmUnavailable(f"No {count} consecutive ports between 20000 and 32000 are free.")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
