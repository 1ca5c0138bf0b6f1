"""What a figure was taken on: processor, threads, memory."""

from __future__ import annotations

import platform
import sys
from contextlib import suppress
from pathlib import Path

import psutil


def machine() -> str:
    """Processor and cores."""
    name = platform.processor() or platform.machine()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return f"{name}, {psutil.cpu_count(logical=True)} cores"


def reset_peak_memory() -> None:
    """Linux forgets the peak of a process when 5 is written here (man 5 proc)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int | None:
    """Bytes; of the process since the last reset, or of its whole life where there is none."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    with suppress(ImportError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return None
