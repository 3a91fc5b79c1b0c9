"""Where and with what a benchmark runs."""

import os
import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import psutil
import torch


@dataclass(frozen=True)
class Machine:
    """What a figure depends on beside the program.

    Attributes:
        processor: name of the CPU.
        cores: that this process may use.
        memory: bytes.
        load: runnable processes in the minute before.
        omp_num_threads: the environment variable; None where it is not set.
        threads: torch's, in each process that is measured.
        gpu: name of the GPU; None without one.
        versions: name to version of Python and the packages.
    """

    processor: str
    cores: int
    memory: int
    load: float
    omp_num_threads: str | None
    threads: int
    gpu: str | None
    versions: dict[str, str]

    @staticmethod
    def here(threads: int | None = None) -> "Machine":
        """This machine now.

        Args:
            threads: torch's in the processes that are measured; None for those of this one.
        """
        return Machine(
            _processor(),
            len(os.sched_getaffinity(0)),
            psutil.virtual_memory().total,
            os.getloadavg()[0],
            os.environ.get("OMP_NUM_THREADS"),
            threads or torch.get_num_threads(),
            torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            {"Python": platform.python_version(), "torch": torch.__version__, "mfsdp": version("mfsdp") + _revision()},
        )

    def __str__(self) -> str:
        gpu = f", {self.gpu}" if self.gpu else ""
        return (
            f"{self.processor}, {self.cores} cores, {self.memory / 2**30:.0f} GiB of memory{gpu}; "
            f"load average at the start {self.load:.1f}; OMP_NUM_THREADS {self.omp_num_threads or 'not set'}, "
            f"{self.threads} {'thread' if self.threads == 1 else 'threads'} of torch in a process"
        )


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _revision() -> str:
    """The commit that the sources are of, where they are a git checkout."""
    here = Path(__file__).resolve().parent
    try:
        command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--exclude", "*"]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except FileNotFoundError:  # no git
        return ""
    return f" ({done.stdout.strip()})" if done.returncode == 0 else ""
