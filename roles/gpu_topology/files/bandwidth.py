#!/usr/bin/env python3
"""Measure how fast, and how right, data travels between the GPUs of this host.

    PYTHON bandwidth.py [--gpus 0,1] [--mib 256] [--repeats 20] [--seconds 300] [--each 60] [--shared]

PYTHON is any Python (3.9 or newer) with torch, such as that of a vLLM release. For each pair of GPUs it makes a peer
copy in both directions and an NCCL all-reduce, and one all-reduce over all GPUs when there are more than two. Data is
compared each time: what arrives wrong is `corrupt`, however fast it came. One JSON document goes to stdout:

    gpus         [{index, uuid, name}]; index is the one of nvidia-smi
    torch, nccl, cuda, environment (variables of NCCL and CUDA_VISIBLE_DEVICES that were set), mib, repeats, shared
    pairs        {"0-1": {peer_access: true, copy: {"0-1": RESULT, "1-0": RESULT}, allreduce: RESULT}}
    all          {gpus: [0, 1, 2], allreduce: RESULT}; null with two GPUs, where the pair is all there is
    left         what could not be removed: processes that do not end, because they are stuck in the driver
    seconds      how long it all took

RESULT is {state, gbps, slowest_gbps, fastest_gbps, wrong, transport, why}; GB/s are 10^9 bytes a second. `gbps` is the
median; for an all-reduce the bus bandwidth as nccl-tests defines it, 2 (n-1) / n x size / time. `wrong` counts values
of four bytes. `transport` is what NCCL says it used ("P2P/CUMEM", "SHM/direct/direct", "NET/Socket"; null when
NCCL_DEBUG was set, since the messages are then the caller's). `state`:

    measured     right data
    corrupt      wrong data
    hung         no answer within --each seconds, as on hosts where ACS or an IOMMU redirects traffic between GPUs
    failed       a process ended with an error, which `why` quotes
    skipped      not tried, or cut off by --seconds, or another process came to the GPUs

Exit status: 0 all measured, or nothing to measure (fewer than two GPUs: {"nothing_to_measure": why}); 1 something hung,
failed, was corrupt or skipped; 2 refused ({"refused": why}, and the same on stderr): no torch, no CUDA, GPUs in use.

It starts only on GPUs that nobody computes on and that have the memory, unless --shared. The environment is passed on,
so that NCCL_P2P_DISABLE=1 can be compared. It ends no process but its own children and leaves no files.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import itertools
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

# Odd constants of the test pattern: value i of rank r is i * STEP + (r + 1) * OFFSET, modulo 2**32.
STEP, OFFSET = 1_103_515_245, 12_345_677
BATCH = 5  # all-reduces timed in one go, so that the skew between the processes does not count
START_LIMIT = 90  # seconds for a first look: importing torch from a cold disk
QUIET = 15  # seconds without a word after which a pair that --seconds cut off counts as hung
POLL = 0.1
ANSWERS = 1  # in a child: where its answers go


class Refused(Exception):
    """Why nothing is measured; exit status 2."""


class Stopped(BaseException):
    """A signal asked this program to end."""


# ---- pure parts -----------------------------------------------------------------------------------------------------


def signed(value):
    """The value as torch's int32 arithmetic has it: modulo 2**32, from -2**31."""
    return (value + 2**31) % 2**32 - 2**31


def summed(ranks, times):
    """(step, offset) of the pattern after `times` all-reduces in place over `ranks` ranks."""
    return signed(STEP * ranks**times), signed(OFFSET * ranks * (ranks + 1) // 2 * ranks ** (times - 1))


def bus_bandwidth(ranks, size, seconds):
    """GB/s of an all-reduce of `size` bytes, as nccl-tests defines it (doc/PERFORMANCE.md there)."""
    return 2 * (ranks - 1) / ranks * size / seconds / 1e9


def needed_mib(mib):
    """Free memory that a GPU must have: six buffers, and contexts and NCCL's own buffers of two or three processes."""
    return 6 * mib + 2560


def result(state, why=None, rates=(), wrong=None, transport=None):
    """One RESULT from rates in GB/s."""
    told = {
        "state": state,
        "gbps": round(statistics.median(rates), 2) if rates else None,
        "slowest_gbps": round(min(rates), 2) if rates else None,
        "fastest_gbps": round(max(rates), 2) if rates else None,
        "wrong": wrong,
        "transport": transport,
        "why": why,
    }
    if state == "measured" and wrong:
        told.update(state="corrupt", why=f"{wrong} values of four bytes arrived wrong")
    return told


def merge(ranks, size, messages):
    """The RESULT of an all-reduce from what each rank said: seconds an operation by batch, and wrong values.

    A rank that starts before the others waits for them; the shortest time of a batch is that of the last to start.
    """
    seconds = [min(times) for times in zip(*(message["seconds"] for message in messages))]  # noqa: B905 (3.9)
    rates = [bus_bandwidth(ranks, size, each) for each in seconds]
    return result("measured", rates=rates, wrong=sum(message["wrong"] for message in messages))


def transports(text):
    """What NCCL's INFO lines name behind `via` for its channels, such as ["P2P/CUMEM"]."""
    found = re.findall(r"Channel \d+(?:/\d+)? : .* via ((?:P2P|SHM)/[\w/]+|NET/[A-Za-z]\w*)", text)
    return sorted(set(found))


def chosen(wanted, visible):
    """The GPUs to measure: all visible ones, or those named by index. Refused when one is not there."""
    if wanted is None:
        return visible
    there = {gpu["index"]: gpu for gpu in visible}
    missing = [index for index in wanted if index not in there]
    if missing:
        have = ", ".join(map(str, there)) or "none"
        raise Refused(
            f"GPU {missing[0]} is not visible to torch. Visible: {have}; see --gpus and CUDA_VISIBLE_DEVICES."
        )
    return [there[index] for index in wanted]


def users(gpus, processes):
    """Who computes on these GPUs, as a sentence, or None."""
    for gpu in gpus:
        here = [item for item in processes if item["uuid"] == gpu["uuid"]]
        if here:
            names = ", ".join(f"pid {item['pid']} ({item['name']}, {item['mib']} MiB)" for item in here)
            return f"GPU {gpu['index']} is in use by {names}. Stop it first, or measure beside it with --shared."
    return None


def objection(gpus, processes, mib):
    """Why these GPUs must be left alone, or None."""
    used = users(gpus, processes)
    if used:
        return used
    for gpu in gpus:
        if gpu["free_mib"] < needed_mib(mib):
            short = f"GPU {gpu['index']} has {gpu['free_mib']} MiB free, {needed_mib(mib)} MiB are needed"
            return f"{short}, and no process is named that holds it. Choose a smaller --mib, or look who does."
    return None


def indexes(text):
    """--gpus: different numbers with commas."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 0,1") from None
    if len(set(found)) != len(found) or min(found) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} names a GPU twice, or one below 0")
    return found


def above_zero(kind):
    def read(text):
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
        if not 0 < value < 2**20:
            raise argparse.ArgumentTypeError(f"{text} is not above 0, or too much")
        return value

    return read


def arguments(argv):
    parser = argparse.ArgumentParser(description="Measure the links between GPUs with torch and NCCL; prints JSON.")
    parser.add_argument("--gpus", type=indexes, help="indexes of nvidia-smi, such as 0,1 (default: all visible)")
    parser.add_argument("--mib", type=above_zero(int), default=256, help="size of the data (default 256 MiB)")
    parser.add_argument("--repeats", type=above_zero(int), default=20, help="operations that are timed (default 20)")
    parser.add_argument("--seconds", type=above_zero(float), default=300, help="limit of the whole run (default 300)")
    parser.add_argument("--each", type=above_zero(float), default=60, help="limit of each pair (default 60)")
    parser.add_argument("--shared", action="store_true", help="measure although others compute on the GPUs")
    parser.add_argument("--json", action="store_true", help="print JSON, which it does anyway")
    return parser.parse_args(argv)


# ---- what nvidia-smi says -------------------------------------------------------------------------------------------


def smi(*options):
    """Lines of nvidia-smi. Refused with its own words when it is missing or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        raise Refused(
            "nvidia-smi is not on the PATH, so that nobody can say who uses the GPUs. Install the driver's tools."
        )
    try:
        done = subprocess.run(
            [program, *options], capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise Refused("nvidia-smi gave no answer within 60 s: the driver hangs. Look at dmesg for Xid lines.") from None
    if done.returncode:
        raise Refused(f"nvidia-smi fails: {(done.stdout + done.stderr).strip()}")
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def inventory():
    """The host's GPUs in the order of nvidia-smi's index."""
    gpus = []
    for line in smi("--query-gpu=index,uuid,memory.free,mig.mode.current,name", "--format=csv,noheader,nounits"):
        index, uuid, free, mig, name = (part.strip() for part in line.split(",", 4))
        free_mib = int(free) if free.isdigit() else 0
        gpus.append({"index": int(index), "uuid": uuid, "name": name, "free_mib": free_mib, "mig": mig == "Enabled"})
    return gpus


def compute_processes(ours):
    """Processes that compute on any GPU, without those of `ours` (process ids)."""
    found = []
    for line in smi("--query-compute-apps=gpu_uuid,pid,used_memory,process_name", "--format=csv,noheader,nounits"):
        parts = [part.strip() for part in line.split(",", 3)]
        if len(parts) == 4 and parts[1] not in ours:
            found.append({"uuid": parts[0], "pid": parts[1], "mib": parts[2], "name": parts[3]})
    return found


# ---- children -------------------------------------------------------------------------------------------------------


def child_argv():
    """How a child is started; the JSON text of its task follows."""
    return [sys.executable, os.path.abspath(__file__), "--child"]


def read(path):
    """A file's text; nothing when it is gone."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


class Children:
    """Processes of one measurement: each writes JSON lines into a file of its own. Ends all of them on leaving."""

    def __init__(self, folder, tasks, environment):
        self.folder, self.tasks, self.environment = folder, tasks, environment
        self.running, self.stuck, self.segments = [], [], set()

    def __enter__(self):
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self):
        for number, task in enumerate(self.tasks):
            with open(self._file("out", number), "wb") as out, open(self._file("err", number), "wb") as err:
                argv = [*child_argv(), json.dumps({**task, "parent": os.getpid()})]
                child = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    env=self.environment,
                    cwd=self.folder,
                    start_new_session=True,
                )
                self.running.append(child)

    def __exit__(self, *exc):
        self.note_segments()
        for child in self.running:
            if child.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
        end = time.monotonic() + 10
        for child in self.running:
            try:
                child.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.stuck.append(child.pid)
        for path in self.segments:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _file(self, kind, number):
        return os.path.join(self.folder, f"{kind}.{number}")

    def note_segments(self):
        """Shared memory of NCCL that a killed child would leave: what our own children have mapped, nothing else."""
        for child in self.running:
            maps = read(f"/proc/{child.pid}/maps")
            self.segments.update(re.findall(r"(/dev/shm/nccl-\w+)\n", maps))

    def said(self, number):
        """Whole lines that a child has written, decoded."""
        lines = read(self._file("out", number)).split("\n")[:-1]
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):
                message = json.loads(line)
                if isinstance(message, dict):
                    found.append(message)
        return found

    def quiet(self):
        """Seconds since a child wrote something."""
        return time.time() - max(os.path.getmtime(self._file("out", number)) for number in range(len(self.running)))

    def complaint(self, number):
        """The last line of a child's stderr that says something, or how it ended."""
        lines = [line.strip() for line in read(self._file("err", number)).split("\n") if line.strip()]
        told = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)] or lines
        ended = self.running[number].returncode
        return told[-1][:400] if told else f"it ended with exit status {ended} and no word"

    def wait(self, limit, done):
        """Until all ended (None), one failed (its number), or `limit` seconds are over (-1).

        done(self): every answer is there. What then does not end within 10 s is ended on leaving.
        """
        end = time.monotonic() + limit
        complete = None
        for turn in itertools.count():
            states = [child.poll() for child in self.running]
            failed = next((number for number, state in enumerate(states) if state), None)
            if complete is None and done(self):
                complete = time.monotonic()
            if complete is not None and (None not in states or time.monotonic() > complete + 10):
                return None
            if failed is not None and complete is None:
                return failed
            if None not in states:
                return None
            if time.monotonic() > end and complete is None:
                return -1
            if turn % 10 == 9:
                self.note_segments()
            time.sleep(POLL)
        return None


class Run:
    """One run of the program: its limits, its folder, its children's ids."""

    def __init__(self, options, folder):
        self.options, self.folder = options, folder
        self.started = time.monotonic()
        self.pids, self.left, self.count = set(), [], 0

    def remaining(self):
        return self.options.seconds - (time.monotonic() - self.started)

    def children(self, tasks, environment):
        self.count += 1
        folder = os.path.join(self.folder, str(self.count))
        os.mkdir(folder)
        return Children(folder, tasks, environment)

    def finish(self, children):
        self.pids.update(str(child.pid) for child in children.running)
        self.left += [f"process {pid} does not end: it is stuck in the driver" for pid in children.stuck]

    def probe(self):
        """What torch sees, from a process of its own: versions and devices. Refused when it sees nothing."""
        environment = dict(os.environ)
        if "CUDA_VISIBLE_DEVICES" not in environment:
            environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # then the order is that of nvidia-smi
        with self.children([{"task": "probe"}], environment) as children:
            limit = min(START_LIMIT, max(self.remaining(), 0))
            failed = children.wait(limit, lambda them: any("devices" in m or "error" in m for m in them.said(0)))
            said = children.said(0)
        self.finish(children)
        answer = next((message for message in said if "devices" in message or "error" in message), None)
        if failed == -1:
            raise Refused(
                f"torch gave no answer within {limit:.0f} s, while {_phase(said)}. Look at dmesg for Xid lines."
            )
        if answer is None:
            raise Refused(f"{sys.executable} cannot use torch: {children.complaint(0)}")
        if "error" in answer:
            raise Refused(answer["error"])
        return answer

    def environment(self, gpus, folder):
        """The caller's, with the GPUs by UUID, and NCCL's messages where the caller did not ask for them."""
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpu["uuid"] for gpu in gpus)}
        if "NCCL_DEBUG" not in environment and "NCCL_DEBUG_FILE" not in environment:
            log = os.path.join(folder, "nccl.%p")
            environment.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,P2P,SHM,NET", NCCL_DEBUG_FILE=log)
        return environment

    def blocked(self, gpus):
        """Why not to go on: time is over, or somebody came. A process that just ended is still named for a moment."""
        if self.remaining() <= 0:
            return f"the limit of {self.options.seconds:g} s for the whole run was reached before"
        if self.options.shared:
            return None
        for pause in (1, 2, 0):
            came = users(gpus, compute_processes(self.pids))
            if came is None or not pause:
                return came
            time.sleep(pause)
        return None

    def measure(self, gpus, parts):
        """{peer_access, copy, allreduce} of these GPUs; only what `parts` names is filled."""
        told = {"peer_access": None, "copy": {}, "allreduce": None}
        why = self.blocked(gpus)
        if why:
            return self.fill(told, gpus, parts, lambda part: result("skipped", why))
        limit = min(self.options.each, self.remaining())
        common = {
            "task": "measure",
            "ranks": len(gpus),
            "parts": parts,
            "mib": self.options.mib,
            "repeats": self.options.repeats,
            "patience": self.options.each + 60,
        }
        folder = os.path.join(self.folder, str(self.count + 1))
        store = os.path.join(folder, "store")
        tasks = [{**common, "rank": rank, "store": store} for rank in range(len(gpus))]

        def done(children):
            return all(any("allreduce" in m for m in children.said(rank)) for rank in range(len(gpus)))

        with self.children(tasks, self.environment(gpus, folder)) as children:
            ended = children.wait(limit, done)
            said = [children.said(rank) for rank in range(len(gpus))]
            quiet = children.quiet()
        self.finish(children)
        self.take(told, gpus, said)
        if ended is None:
            why, state = "a process ended without an answer", "failed"
        elif ended == -1:
            cut = limit < self.options.each and quiet < QUIET
            doing = "; ".join(f"rank {rank} {_phase(messages)}" for rank, messages in enumerate(said))
            why, state = f"no answer within {limit:.0f} s: {doing}", "skipped" if cut else "hung"
        else:
            why, state = children.complaint(ended), "failed"
        self.fill(told, gpus, parts, lambda part: result(state, why))
        logs = [read(os.path.join(folder, name)) for name in os.listdir(folder) if name.startswith("nccl.")]
        told["allreduce"]["transport"] = transports("\n".join(logs)) or None
        return told

    def take(self, told, gpus, said):
        """Take over what the ranks answered."""
        size = self.options.mib * 2**20
        for message in said[0]:
            if "peer_access" in message:
                told["peer_access"] = message["peer_access"]
            if "copy" in message:
                source, target = message["copy"]
                rates = [size / seconds / 1e9 for seconds in message["seconds"]]
                key = f"{gpus[source]['index']}-{gpus[target]['index']}"
                told["copy"][key] = result("measured", rates=rates, wrong=message["wrong"])
        answers = [message for messages in said for message in messages if "allreduce" in message]
        if len(answers) == len(gpus):
            told["allreduce"] = merge(len(gpus), size, answers)

    @staticmethod
    def fill(told, gpus, parts, make):
        """What is still missing of `parts` becomes make(part)."""
        if "copy" in parts:
            for source, target in itertools.permutations(gpus, 2):
                told["copy"].setdefault(f"{source['index']}-{target['index']}", make("copy"))
        if "allreduce" in parts and told["allreduce"] is None:
            told["allreduce"] = make("allreduce")
        return told

    def pair(self, gpus):
        """A pair: copies and all-reduce in one go, the all-reduce alone once more when a copy kept it from starting."""
        told = self.measure(gpus, ["copy", "allreduce"])
        if any(copy["state"] in ("hung", "failed") for copy in told["copy"].values()):
            told["allreduce"] = self.measure(gpus, ["allreduce"])["allreduce"]
        return told


def _phase(messages):
    phases = [message["phase"] for message in messages if "phase" in message]
    return phases[-1] if phases else "starting"


def visible_gpus(seen):
    """The GPUs of nvidia-smi that torch sees, by UUID where torch tells it (2.5 and newer), by order otherwise."""
    host = inventory()
    uuids = [device["uuid"] for device in seen["devices"]]
    if None not in uuids:
        return [gpu for gpu in host if gpu["uuid"] in uuids]
    if "CUDA_VISIBLE_DEVICES" in os.environ or len(uuids) != len(host):
        raise Refused("this torch does not tell which GPU is which. Unset CUDA_VISIBLE_DEVICES and use --gpus.")
    return host


def work(options, folder):
    """The document and the exit status."""
    run = Run(options, folder)
    seen = run.probe()
    gpus = chosen(options.gpus, visible_gpus(seen))
    if len(gpus) < 2:
        why = f"{len(gpus)} GPU is visible or chosen, and a link has two ends"
        return {"nothing_to_measure": why}, 0
    sliced = next((gpu for gpu in gpus if gpu["mig"]), None)
    if sliced:
        raise Refused(f"GPU {sliced['index']} has MIG on: its instances reach no other GPU. Choose others with --gpus.")
    why = None if options.shared else objection(gpus, compute_processes(run.pids), options.mib)
    if why:
        raise Refused(why)
    document = {
        "gpus": [{name: gpu[name] for name in ("index", "uuid", "name")} for gpu in gpus],
        "torch": seen["torch"],
        "nccl": seen["nccl"],
        "cuda": seen["cuda"],
        "environment": {k: v for k, v in sorted(os.environ.items()) if re.match("NCCL_|CUDA_VISIBLE_DEVICES$", k)},
        "mib": options.mib,
        "repeats": options.repeats,
        "shared": options.shared,
        "pairs": {},
        "all": None,
    }
    for pair in itertools.combinations(gpus, 2):
        document["pairs"]["-".join(str(gpu["index"]) for gpu in pair)] = run.pair(list(pair))
    if len(gpus) > 2:
        told = run.measure(gpus, ["allreduce"])
        document["all"] = {"gpus": [gpu["index"] for gpu in gpus], "allreduce": told["allreduce"]}
    document["left"] = run.left
    document["seconds"] = round(time.monotonic() - run.started, 1)
    return document, 0 if all(item["state"] == "measured" for item in results(document)) else 1


def results(document):
    """Every RESULT of a document."""
    for pair in document["pairs"].values():
        yield from pair["copy"].values()
        yield pair["allreduce"]
    if document["all"]:
        yield document["all"]["allreduce"]


def stop(number, frame):
    raise Stopped(number)


def main(argv):
    options = arguments(argv)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    try:
        with tempfile.TemporaryDirectory(prefix="bandwidth-") as folder:
            document, status = work(options, folder)
    except Refused as why:
        print(f"bandwidth: {why}", file=sys.stderr)
        document, status = {"refused": str(why)}, 2
    except Stopped as why:
        print(f"bandwidth: stopped by {signal.Signals(why.args[0]).name}", file=sys.stderr)
        return 128 + why.args[0]
    print(json.dumps(document, indent=2))
    return status


# ---- inside a child: from here on with torch ------------------------------------------------------------------------


def emit(**message):
    """A line for the parent, on a descriptor of its own: NCCL writes its messages to stdout when the caller asks."""
    os.write(ANSWERS, (json.dumps(message) + "\n").encode())


def die_with(parent):
    """Ask the kernel to end this process with its parent (prctl(2), PR_SET_PDEATHSIG = 1)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def look():
    """Task `probe`: versions and devices, or in one line why there are none."""
    emit(phase="importing torch")
    try:
        import torch
    except ImportError as why:
        emit(error=f"{sys.executable} has no usable torch ({why}). Run this with the Python of a vLLM release.")
        return
    emit(phase="asking CUDA")
    if torch.version.cuda is None:
        emit(error=f"torch {torch.__version__} is built without CUDA. Run this with the Python of a CUDA release.")
        return
    try:
        torch.cuda.init()
        count = torch.cuda.device_count()
    except (RuntimeError, AssertionError) as why:
        emit(error=f"torch {torch.__version__} finds no CUDA: {' '.join(str(why).split())[:300]}")
        return
    devices = []
    for number in range(count):
        uuid = getattr(torch.cuda.get_device_properties(number), "uuid", None)
        devices.append({"uuid": f"GPU-{str(uuid).removeprefix('GPU-')}" if uuid else None})
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None
    if nccl is None:
        emit(error=f"torch {torch.__version__} is built without NCCL. Run this with the Python of a CUDA release.")
        return
    emit(devices=devices, torch=torch.__version__, cuda=torch.version.cuda, nccl=nccl)


def pattern(torch, count, device, step, offset):
    return torch.arange(count, dtype=torch.int32, device=device).mul_(step).add_(offset)


def differing(torch, values, step, offset):
    """How many values are not those of the pattern."""
    want = pattern(torch, values.numel(), values.device, step, offset)
    return int(torch.ne(values, want).sum().item())


def copies(torch, task):
    """Rank 0: both directions between devices 0 and 1."""
    emit(phase="asking for peer access")
    emit(peer_access=all(torch.cuda.can_device_access_peer(a, b) for a, b in ((0, 1), (1, 0))))
    for source, target in ((0, 1), (1, 0)):
        emit(phase=f"copying from its GPU {source} to {target}")
        count = task["mib"] * 2**20 // 4
        values = pattern(torch, count, f"cuda:{source}", STEP, signed(OFFSET * (source + 1)))
        there = torch.zeros(count, dtype=torch.int32, device=f"cuda:{target}")
        wrong, seconds = 0, []

        def settle():
            torch.cuda.synchronize(0)
            torch.cuda.synchronize(1)

        with torch.cuda.device(source):  # torch copies on the current stream of the source
            for turn in range(task["repeats"] + 3):
                if turn in (0, task["repeats"] + 2):
                    there.zero_()
                settle()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                there.copy_(values, non_blocking=True)
                end.record()
                settle()
                if turn in (0, task["repeats"] + 1, task["repeats"] + 2):
                    wrong += differing(torch, there, STEP, signed(OFFSET * (source + 1)))
                if 2 <= turn < task["repeats"] + 2:
                    seconds.append(begin.elapsed_time(end) / 1e3)
        emit(copy=[source, target], seconds=seconds, wrong=wrong)
        del values, there
        torch.cuda.empty_cache()


def all_reduce(torch, task):
    """Every rank: time batches in place, compare after each."""
    import torch.distributed as dist

    rank, ranks = task["rank"], task["ranks"]
    emit(phase="waiting for the other ranks")
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{task['store']}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=task["patience"]),
    )
    emit(phase="setting up NCCL")
    count = task["mib"] * 2**20 // 4
    values = pattern(torch, count, f"cuda:{rank}", STEP, signed(OFFSET * (rank + 1)))
    work = values.clone()
    dist.all_reduce(work)
    torch.cuda.synchronize()
    emit(phase="in an all-reduce")
    wrong, seconds = differing(torch, work, *summed(ranks, 1)), []
    tiny = torch.ones(1, device=f"cuda:{rank}")
    for _ in range(-(-task["repeats"] // BATCH)):
        work.copy_(values)
        dist.all_reduce(tiny)  # nobody starts before all are here
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(BATCH):
            dist.all_reduce(work)
        end.record()
        torch.cuda.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3 / BATCH)
        wrong += differing(torch, work, *summed(ranks, BATCH))
    emit(allreduce=True, seconds=seconds, wrong=wrong)
    dist.destroy_process_group()


def child(text):
    global ANSWERS  # noqa: PLW0603
    ANSWERS = os.dup(1)
    os.dup2(2, 1)
    task = json.loads(text)
    die_with(task["parent"])
    if task["task"] == "probe":
        look()
        return
    emit(phase="importing torch")
    import torch

    emit(phase="starting CUDA")
    if "copy" in task["parts"] and task["rank"] == 0:
        copies(torch, task)
    if "allreduce" in task["parts"]:
        all_reduce(torch, task)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2])
    else:
        sys.exit(main(sys.argv[1:]))
