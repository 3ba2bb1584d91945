"""Runs of several processes: a run forks itself, and each process finds its number where torchrun would put it.

    worker ── fork ──► run, process 0 ── fork ──► processes 1, 2, ...
                         trains, writes            train; end when process 0 does, by a life line

All of them are on one machine. A run over several machines is one of `torchrun`'s, by itself.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import Any

from twoaxis.comparison.runner.worker import end_with

GRACE = 20.0
"""Seconds until process 0 is ended after another one died, unless it notices itself: it may wait for it to come."""
_held: list[Any] = []
"""What lives as long as process 0: the life line, and the store by which processes find each other."""


def become_ranks(count: int) -> None:
    """Fork this process into `count` of one run, which all go on from here; one stays alone."""
    if count == 1:
        return
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        life_line, held = os.pipe()
        common = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        common |= {"TORCHELASTIC_USE_AGENT_STORE": True}  # the store is there already: nobody races for its port
        os.environ.update({name: str(value) for name, value in common.items()})
        others = []
        for rank in range(1, count):
            if (pid := os.fork()) == 0:
                os.close(held)
                os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)})
                end_with(life_line)
                return
            others.append(pid)
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        os.close(life_line)
        os.environ.update({"RANK": "0", "LOCAL_RANK": "0"})
        descriptor = listening.detach()
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
    _held.extend((held, store))
    for pid in others:
        threading.Thread(target=_end_without, args=(pid,), daemon=True).start()


def _end_without(other: int) -> None:
    """End this process a while after another one has failed."""
    _, status = os.waitpid(other, 0)
    if os.waitstatus_to_exitcode(status) not in (0, 130):  # 130: stopped by a signal, as all of them are
        time.sleep(GRACE)
        os._exit(1)


def only_gpus(device: str) -> str:
    """Hide all GPUs but those of cuda:1, or of cuda:2,3 for two processes; what they are called then.

    This process has opened none yet.
    """
    numbers = device.removeprefix("cuda:").split(",")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [visible.split(",")[int(number)] if visible else number for number in numbers]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names)
    return "cuda:0" if len(numbers) == 1 else "cuda"
