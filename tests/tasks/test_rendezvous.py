"""The port by which the processes of a run find each other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from test_distributed import small_config
from torch import distributed

from lightning_mhla.system import rendezvous
from lightning_mhla.system.rendezvous import AGENT_STORE, TORCHRUN, listen_on_one_interface

PROGRAM = """
import os, sys
from pathlib import Path

from mhla_tasks.classification import ImageClassifier
from mhla_tasks.commandline.parser import main


def listening():
    held = {os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            _, address, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in held:
                yield address.partition(":")[0]


def on_train_start(self):
    sys.stdout.write(f"rank {self.global_rank} listens on {' '.join(sorted(listening()))}\\n")
    sys.stdout.flush()


ImageClassifier.on_train_start = on_train_start
main()
"""
LOOPBACK = "0100007F"
"""127.0.0.1 in the system's tables."""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the system's tables in /proc")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_on_one_machine_listens_on_the_loopback_interface_alone(tmp_path: Path, strategy: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [
            *(sys.executable, str(program), "fit", "--config", str(small_config(tmp_path))),
            *("--config", str(root / f"configs/trainer/{strategy}.yaml"), "--trainer.accelerator=cpu"),
            *("--trainer.devices=2", "--trainer.max_steps=1", "--trainer.precision=32"),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if " listens on " in line)
    assert [line.split()[:2] for line in lines] == [["rank", "0"], ["rank", "1"]]
    for line in lines:
        assert set(line.partition(" listens on ")[2].split()) == {LOOPBACK}, line


def strategy_of(address: str, nodes: int = 1, world: int = 2, rank: int = 0) -> Any:
    environment = SimpleNamespace(main_address=address, main_port=find_free_network_port())
    return SimpleNamespace(cluster_environment=environment, world_size=world, num_nodes=nodes, global_rank=rank)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv(AGENT_STORE, "left by a run before")
    monkeypatch.delenv(TORCHRUN, raising=False)
    yield
    rendezvous._stores.clear()


@pytest.mark.parametrize(
    ("options", "served"),
    [
        ({"address": "127.0.0.1"}, True),
        ({"address": "localhost"}, True),
        ({"address": "127.0.0.1", "nodes": 2}, True),
        ({"address": "localhost", "nodes": 2}, False),
        ({"address": "192.0.2.1", "nodes": 2}, False),
        ({"address": "nowhere.invalid"}, False),
        ({"address": "127.0.0.1", "world": 1}, False),
        ({"address": "127.0.0.1", "rank": 1}, False),
    ],
    ids=str,
)
def test_where_one_address_is_enough(options: dict[str, Any], served: bool) -> None:
    strategy = strategy_of(**options)
    listen_on_one_interface(strategy)
    assert os.environ.get(AGENT_STORE) == ("True" if served else None)
    if served:
        place = strategy.cluster_environment
        distributed.TCPStore(place.main_address, place.main_port, 2, wait_for_workers=False).set("key", "value")
        assert rendezvous._stores[0].get("key") == b"value"


def test_a_port_that_is_in_use_is_left_to_torch() -> None:
    strategy = strategy_of("127.0.0.1")
    listen_on_one_interface(strategy)
    other = strategy_of("127.0.0.1")
    other.cluster_environment.main_port = strategy.cluster_environment.main_port
    first = rendezvous._stores.copy()  # kept open
    listen_on_one_interface(other)
    assert (rendezvous._stores, AGENT_STORE in os.environ) == ([], False)
    del first
    listen_on_one_interface(other)
    assert os.environ[AGENT_STORE] == "True", "the port of a run before can be used again"


def test_torchrun_serves_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TORCHRUN, "none")
    listen_on_one_interface(strategy_of("127.0.0.1"))
    assert os.environ[AGENT_STORE] == "left by a run before"
