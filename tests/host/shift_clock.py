"""Lets single programs of a lab host see another time: lab hosts share the kernel, and the clock, of the machine that they run on.

    shift_clock.py SECONDS PID...    programs that run; 0 gives them the true time again
    shift_clock.py SECONDS           this process alone: from a .pth file, every Python program that is started

Programs ask the kernel's vDSO for the time (vdso(7)). Its page in the memory of one process is that process' own as soon as somebody
writes to it, as a debugger does for a breakpoint. Written is, into its unused end, a clock_gettime that asks the kernel and adds
SECONDS to CLOCK_REALTIME, and at the beginning of the one that was there a jump to it. x86-64; needs root, or the process itself.
"""

from __future__ import annotations

import platform
import re
import struct
import sys

CODE = bytes.fromhex(
    "b8e4000000"  # mov eax, 228: clock_gettime (arch/x86/entry/syscalls/syscall_64.tbl)
    "0f05"  # syscall
    "85c0"  # test eax, eax
    "7511"  # jnz to the end
    "85ff"  # test edi, edi: CLOCK_REALTIME is 0
    "750d"  # jnz to the end
    "48b9{}"  # mov rcx, SECONDS
    "48010e"  # add [rsi], rcx: tv_sec of the answer
    "c3".replace("{}", "00" * 8)  # ret
)
SECONDS_AT = CODE.index(bytes.fromhex("48b9")) + 2


def vdso(pid: str) -> tuple[int, int]:
    with open(f"/proc/{pid}/maps", encoding="utf-8") as lines:
        for line in lines:
            if line.rstrip().endswith("[vdso]"):
                low, high = line.split()[0].split("-")
                return int(low, 16), int(high, 16)
    raise SystemExit(f"process {pid} has no vDSO")


def symbol(image: bytes, name: bytes) -> int:
    """Where a function of an ELF image begins (elf(5)): by its tables of dynamic symbols and of strings."""
    sections, size, count = struct.unpack_from("<Q", image, 40)[0], *struct.unpack_from("<HH", image, 58)
    tables = [struct.unpack_from("<IIQQQQIIQQ", image, sections + number * size) for number in range(count)]
    symbols = next(table for table in tables if table[1] == 11)  # SHT_DYNSYM
    strings = tables[symbols[6]]
    for at in range(symbols[4], symbols[4] + symbols[5], 24):
        label, _, _, _, value, _ = struct.unpack_from("<IBBHQQ", image, at)
        end = image.index(b"\0", strings[4] + label)
        if image[strings[4] + label : end] == name:
            return value
    raise SystemExit("the vDSO has no " + name.decode())


def shift(pid: str, seconds: int) -> None:
    low, high = vdso(pid)
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        memory.seek(low)
        image = memory.read(high - low)
        entry = symbol(image, b"__vdso_clock_gettime")
        code = CODE[:SECONDS_AT] + struct.pack("<q", seconds) + CODE[SECONDS_AT + 8 :]
        there = re.search(re.escape(CODE[:SECONDS_AT]), image)
        place = there.start() if there else (len(image) - len(CODE)) & ~15
        if not there and any(image[place - 16 :]):
            raise SystemExit("the vDSO has no room at its end")
        for at, what in ((place, code), (entry, b"\xe9" + struct.pack("<i", place - entry - 5))):
            memory.seek(low + at)
            memory.write(what)


def main(arguments: list[str]) -> None:
    if platform.machine() != "x86_64":
        raise SystemExit(f"this is written for x86-64, not for {platform.machine()}")
    for pid in arguments[1:] or ["self"]:
        shift(pid, int(arguments[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
