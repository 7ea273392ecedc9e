"""Restriction of a run's rendezvous port, at which its processes meet, to one network interface.

By default, torch opens this port on all interfaces without authentication. This module opens it in rank 0, only on the address
to which the processes connect, before Lightning starts the processes.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from ipaddress import ip_address

from lightning.pytorch.strategies import Strategy
from torch import distributed
from torch.distributed.distributed_c10d import Store

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Environment variable that tells ``init_process_group`` that MASTER_ADDR and MASTER_PORT are served already."""

TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Environment variable that torchrun sets in the processes it starts."""

_stores: list[Store] = []
"""List that holds the store that this process serves; empty if it serves none."""


def listen_on_one_interface(strategy: Strategy) -> None:
    """Open the rendezvous port of a run, at which its processes meet, only on the network interface of rank 0's address.

    By default, torch opens this port on all interfaces. This function does nothing in processes other than rank 0. In rank 0,
    it leaves the default unchanged in these cases:

    - The run has a single process.
    - The run uses several machines, and MASTER_ADDR is a host name, which may resolve to different addresses.
    - The port cannot be opened at this address, for example because the address does not belong to this machine.
    - torchrun started the process, and opens the port itself.

    Call this function before any method of the trainer.

    Args:
        strategy: strategy of the trainer.
    """
    environment = getattr(strategy, "cluster_environment", None)
    if environment is None or TORCHRUN in os.environ or distributed.is_initialized():
        return
    _stores.clear()  # a store of an earlier run in this process would still occupy its port
    os.environ.pop(AGENT_STORE, None)
    world = getattr(strategy, "world_size", 1)
    if world == 1 or strategy.global_rank != 0:  # type: ignore[attr-defined]  # of all strategies with an environment
        return
    address, port = environment.main_address, environment.main_port
    if getattr(strategy, "num_nodes", 1) > 1 and not _is_ip_address(address):
        return
    with suppress(OSError):  # torch then opens the port itself, and reports a wrong address or a port in use
        _stores.append(_serve(address, port, world))
        os.environ[AGENT_STORE] = str(True)


def _is_ip_address(text: str) -> bool:
    with suppress(ValueError):
        return bool(ip_address(text))
    return False


def _serve(address: str, port: int, world_size: int) -> Store:
    """Create a torch ``TCPStore`` that listens on one address only, instead of on all addresses."""
    family, kind, protocol, _, socket_address = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        # A restarted run finds the port in TIME_WAIT, and must still be able to bind it.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(socket_address)
        listener.listen(socket.SOMAXCONN)
        # Without waiting, since the workers start later. `detach`: the store now owns the socket.
        store: Store = distributed.TCPStore(  # type: ignore[attr-defined]  # torch's stubs lack it
            address, port, world_size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return store
