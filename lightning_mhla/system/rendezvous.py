"""The port by which the processes of a run find each other, on one network interface.

torch opens it on all interfaces and asks nobody who connects. Rank 0 opens it here instead, before Lightning starts the
processes, on the address that they connect to.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from ipaddress import ip_address

from lightning.pytorch.strategies import Strategy
from torch import distributed

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Environment variable by which ``init_process_group`` knows that MASTER_ADDR and MASTER_PORT are served already."""

TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Environment variable of processes that torchrun started."""

_stores: list[distributed.TCPStore] = []
"""The store that this process serves, if it does."""


def listen_on_one_interface(strategy: Strategy) -> None:
    """Serve the rendezvous of a run on the address of rank 0 alone.

    This is done where the address means the same to all processes: on one machine, and on several if MASTER_ADDR is an IP
    address. The name of a machine may stand for a different address on another one, and torch then listens on all interfaces;
    so it does where the address is not one of this machine, as behind a load balancer. torchrun serves its own rendezvous.

    Args:
        strategy: of the trainer, before a method of the trainer is called. Nothing is done for one with a single process.
    """
    environment = getattr(strategy, "cluster_environment", None)
    if environment is None or TORCHRUN in os.environ or distributed.is_initialized():
        return
    _stores.clear()  # of a run before, in a process with several
    os.environ.pop(AGENT_STORE, None)
    world = getattr(strategy, "world_size", 1)
    if world == 1 or strategy.global_rank != 0:  # type: ignore[attr-defined]  # of all strategies with an environment
        return
    address, port = environment.main_address, environment.main_port
    if getattr(strategy, "num_nodes", 1) > 1 and not _is_ip_address(address):
        return
    with suppress(OSError):  # torch says what is wrong with the address or the port
        _stores.append(_serve(address, port, world))
        os.environ[AGENT_STORE] = str(True)


def _is_ip_address(text: str) -> bool:
    with suppress(ValueError):
        return bool(ip_address(text))
    return False


def _serve(address: str, port: int, world_size: int) -> distributed.TCPStore:
    """A store that listens on an address, where ``TCPStore`` by itself would listen on all of them."""
    family, kind, protocol, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(socket.SOMAXCONN)
        return distributed.TCPStore(
            address, port, world_size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
