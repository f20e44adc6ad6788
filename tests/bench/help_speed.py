"""How long `scripts/fleet --help` takes, the whole command as a user types it: has to stay under 0.4 s.

    python tests/bench/help_speed.py

Prints the median of ten by the clock and of the processor, after one that is not counted; exits 1 when that of the processor is
above (the clock's says more about what else the machine does).
"""

import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

FLEET = Path(__file__).resolve().parents[2] / "scripts" / "fleet"
RUNS, MOST = 10, 0.4


def once() -> tuple[float, float]:
    """Seconds by the clock, and of the processor."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([FLEET, "--help"], stdout=subprocess.DEVNULL, check=True)
    clock, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return clock, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    once()
    clocks, spent = zip(*(once() for _ in range(RUNS)), strict=True)
    clock, processor = statistics.median(clocks), statistics.median(spent)
    print(
        f"scripts/fleet --help: {clock:.3f} s ({min(clocks):.3f} to {max(clocks):.3f}), of the processor {processor:.3f} s; "
        f"medians of {RUNS}"
    )
    return 0 if processor < MOST else 1


if __name__ == "__main__":
    sys.exit(main())
