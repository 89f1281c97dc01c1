"""Several processes for one test, each without anything of the tests that ran before.

A fork of the process that runs the tests would inherit what these have set and locks that threads hold; a fresh
interpreter imports everything again, ten seconds each. So they are forks of a server: a fork from when all tests were
collected, which is when everything is imported and nothing has run.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import socket
import sys
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch.distributed
import torch.multiprocessing

# What code imports only as it runs; the tests import it sooner or later, too.
_IMPORTED_LATE = ("timm.optim", "transformers.modeling_utils", "sklearn.datasets", "torch._dynamo")
_server: list[Connection] = []


def start_server() -> None:
    """To be called once, when the tests are collected (`tests/conftest.py`)."""
    for name in _IMPORTED_LATE:
        importlib.import_module(name)
    here, there = multiprocessing.Pipe()
    if os.fork() == 0:
        here.close()
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # not where pytest collects what is said
        warnings.resetwarnings()  # which pytest may have made errors
        try:
            _serve(there)
        finally:
            os._exit(0)
    there.close()
    _server.append(here)


def run_in_processes(work: Callable[[int, str], None], count: int, folder: Path, several_groups: bool = False) -> None:
    """`work(rank, folder)` in so many processes; raises what any of them raised.

    A process ends where it gives up its group, which is the last thing it does unless it has several of them. Torch
    would free a wrapped model next: that waits, holding Python's lock, for a thread of gloo that may be waiting for
    this very lock.
    """
    _server[0].send((work, count, str(folder), several_groups))
    if not _server[0].poll(600):
        raise TimeoutError(f"{work} takes more than ten minutes")
    if problem := _server[0].recv():
        raise RuntimeError(problem)


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens at."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _serve(requests: Connection) -> None:
    while True:
        try:
            work, count, *rest = requests.recv()
        except EOFError:
            return  # the tests are over
        try:
            torch.multiprocessing.start_processes(_run, args=(work, *rest), nprocs=count, start_method="fork")
            requests.send(None)
        except Exception:
            requests.send(traceback.format_exc())


def _run(rank: int, work: Callable[[int, str], None], folder: str, several_groups: bool) -> None:
    if not several_groups:
        torch.distributed.destroy_process_group = _end  # type: ignore[assignment]
    work(rank, folder)


def _end() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
