"""How long the doctor takes for 200,000 lines of a journal, and how much memory: 5 s and 200 MB at most.

    python tests/bench/doctor_speed.py [lines]

Prints the seconds of the processor, by the clock, and the peak of resident memory, for `journalctl -o short-iso` and `-o json`
(with few fields, and with all that journald has); exits 1 when a limit is passed. A failure stands in the middle and has to be found.
"""

import resource
import sys
import time
from pathlib import Path

UNIT = Path(__file__).resolve().parents[1] / "unit"
sys.path.insert(0, str(UNIT))
import conftest  # noqa: E402, F401  makes the collection importable
import noise  # noqa: E402
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import doctor as doctors  # noqa: E402

SECONDS, MEGABYTES = 5.0, 200.0
CASE = {"json": "131.log", "iso": "119.log", "full": "131.log"}
CAUSE = {"json": "host_oom_killed", "iso": "too_many_open_files", "full": "host_oom_killed"}


def lines(count: int, shape: str):
    yield from noise.journal(count // 2, shape)
    yield from (UNIT / "fixtures" / "logs" / CASE[shape]).read_text().splitlines()
    yield from noise.journal(count - count // 2, shape, seed=2)


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200000
    bad = 0
    doctors.book()
    for shape in ("iso", "json", "full"):
        path = Path(f"/tmp/doctor-speed.{shape}.log")
        with open(path, "w", encoding="utf-8") as handle:
            handle.writelines(f"{line}\n" for line in lines(count, shape))
        clock, spent = time.perf_counter(), time.process_time()
        doctor = doctors.doctor()
        with open(path, encoding="utf-8", errors="replace") as handle:
            doctor.read(path.name, handle)
        told = doctor.answer()
        spent, clock = time.process_time() - spent, time.perf_counter() - clock
        path.unlink()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        first = told["findings"][0]["cause_id"] if told["findings"] else "nothing"
        print(
            f"{shape}: {told['read']['lines']} lines, {spent:.2f} s of the processor, {clock:.2f} s, {peak:.0f} MB, first: {first}"
        )
        bad |= spent > SECONDS or peak > MEGABYTES or first != CAUSE[shape]
    return bad


if __name__ == "__main__":
    sys.exit(main())
