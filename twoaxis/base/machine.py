"""The machine and the process: hardware, versions, cores, devices, and what makes a run reproducible."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

VERBOSITY = "TRANSFORMERS_VERBOSITY"
"""What transformers reads when it is imported."""
MOST_THREADS = 1024
"""More threads than this end the process in torch's thread pool instead of an error."""


def hardware() -> dict[str, Any]:
    """The machine, for results: cpu, cores, memory in bytes, gpus, threads of torch, platform.

    Cores are those this process may use; memory is the machine's, and None where the system does not say.
    """
    import torch

    return {
        "cpu": _cpu_name(),
        "cores": len(_allowed_cpus()),
        "memory": _main_memory(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
    }


def hardware_line() -> str:
    """The machine and torch in one line: `AMD EPYC 7763, 2 cores, 24 GB, torch 2.13.0 CPU, 1 thread`."""
    import torch

    machine = hardware()
    parts = [machine["cpu"], _plural(machine["cores"], "core")]
    if machine["memory"] is not None:
        parts.append(f"{machine['memory'] / 2**30:.0f} GB")
    gpus = machine["gpus"]
    parts += [name if gpus.count(name) == 1 else f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)]
    build = f"CUDA {torch.version.cuda}" if gpus and torch.version.cuda else "GPU" if gpus else "CPU"
    parts.append(f"torch {torch.__version__.partition('+')[0]} {build}")
    return ", ".join([*parts, _plural(machine["threads"], "thread")])


def versions() -> dict[str, str | None]:
    """Versions of python, twoaxis, torch, transformers and tokenizers; None where one is not installed."""
    numbers: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("twoaxis", "torch", "transformers", "tokenizers"):
        try:
            numbers[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            numbers[name] = None
    return numbers


def physical_cores() -> int:
    """Cores this process may run on, hardware threads of one core counted once."""
    cores = set()
    for cpu in _allowed_cpus():
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            cores.add(((topology / "physical_package_id").read_text(), (topology / "core_id").read_text()))
        except OSError:  # only Linux says
            cores.add((str(cpu), ""))
    return max(1, len(cores))


def pick_device(name: str | None) -> torch.device:
    """The device of that name; None is a GPU where there is one."""
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.zeros(1, device=name)
        device.item()  # meta tensors have no numbers
        return device.device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        if name.partition(":")[0] == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device {name!r}: torch finds no GPU here; give cpu, or leave the device out") from error
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"device {name!r} cannot be used ({reason}); give cpu, cuda or cuda:N") from error


def can_compile(device: str | None) -> bool:
    """Whether torch.compile finds what it needs on a device: Triton for a GPU, a C++ compiler elsewhere."""
    if pick_device(device).type == "cuda":
        return importlib.util.find_spec("triton") is not None
    return shutil.which(os.environ.get("CXX", "g++")) is not None


@contextlib.contextmanager
def reproducible(threads: int | None) -> Iterator[None]:
    """Context manager for a process that repeats the same bits; restores threads, settings and generators on exit.

    torch may use deterministic algorithms only where that costs nothing: on a CPU. None leaves the threads alone.
    """
    import torch
    import torch.utils.deterministic

    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise ValueError(f"threads must lie between 1 and {MOST_THREADS}, got {threads}")
    count, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    lenient = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        if not torch.cuda.is_available():
            torch.use_deterministic_algorithms(True)
            settings.fill_uninitialized_memory = False  # filling takes time and only helps to find faults
        with torch.random.fork_rng():
            yield
    finally:
        torch.set_num_threads(count)
        torch.use_deterministic_algorithms(strict, warn_only=lenient)
        settings.fill_uninitialized_memory = filled


def install(extra: str = "lab") -> str:
    """The command, run in a clone, that adds an extra of this package; `lab` has what most people need."""
    return f'pip install -e ".[{extra}]" (in a clone of twoaxis)'


def needs(what: str, package: str, extra: str = "lab") -> str:
    """A message: what is asked for, the package that it needs, and how it is installed."""
    return f"{what} needs the package {package}, which is not installed: {install(extra)}"


@contextlib.contextmanager
def quiet_logger(name: str) -> Iterator[None]:
    """Context manager in which a library's logger tells errors only, and no warnings are shown."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.setLevel(level)


def quiet() -> None:
    """Keep transformers' own bars and notes off the terminal, which belongs to the command; it is not imported here."""
    if sys.modules.get("transformers") is None:
        os.environ.setdefault(VERBOSITY, "error")
        return
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Context manager that does the same while it is active."""
    with contextlib.ExitStack() as after:
        if sys.modules.get("transformers") is None:
            if VERBOSITY not in os.environ:
                after.callback(os.environ.pop, VERBOSITY, None)
        else:
            from transformers.utils import logging

            after.callback(logging.set_verbosity, logging.get_verbosity())
            if logging.is_progress_bar_enabled():
                after.callback(logging.enable_progress_bar)
        quiet()
        yield


def _allowed_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _plural(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _cpu_name() -> str:
    """The processor as its maker calls it, where the system says."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return " ".join(value.split())
    if sys.platform == "darwin":
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
            answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5)
            return answer.stdout.strip()
    return platform.processor() or platform.machine() or "unknown processor"


def _main_memory() -> int | None:
    """Bytes of the machine's main memory."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None
