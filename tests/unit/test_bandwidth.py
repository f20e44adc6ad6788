"""The bandwidth proof: its arithmetic, what stops it, what it does with children that hang, and the floors."""

import importlib.util
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import bandwidth as judging
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import data

SCRIPT = Path(__file__).resolve().parents[2] / "roles" / "gpu_topology" / "files" / "bandwidth.py"
FLOORS = data.load("links")


def load():
    spec = importlib.util.spec_from_file_location("bandwidth_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load()

# A child that plays its part without torch: it reads its task and what to do from the environment.
CHILD = """
import json, os, sys, time
task = json.loads(sys.argv[-1])
say = lambda **m: print(json.dumps(m), flush=True)
if task["task"] == "probe":
    say(**json.loads(os.environ["PLAY_PROBE"]))
    sys.exit()
with open(os.environ["PLAY_PIDS"], "a") as pids:
    pids.write(f"{os.getpid()}\\n")
play = os.environ["PLAY"]
say(phase="importing torch")
if play == "crash" and task["rank"] == 1:
    sys.exit("Traceback (most recent call last):\\n  File x\\nRuntimeError: CUDA error: out of memory\\nbye")
if "copy" in task["parts"] and task["rank"] == 0:
    say(peer_access=True)
    for a, b in ((0, 1), (1, 0)):
        if play == "hang-copy" and a == 1:
            say(phase="copying from its GPU 1 to 0")
            time.sleep(60)
        say(copy=[a, b], seconds=[0.001, 0.002, 0.004], wrong=7 if play == "corrupt" else 0)
if play == "hang-nccl" or (play == "hang-copy" and "copy" in task["parts"]):
    say(phase="in an all-reduce")
    time.sleep(60)
say(allreduce=True, seconds=[0.001 * (task["rank"] + 1)], wrong=3 if play == "corrupt" and task["rank"] else 0)
if play == "hang-exit":
    time.sleep(60)
"""

GPUS = ["GPU-a", "GPU-b", "GPU-c"]


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A stand-in nvidia-smi, stand-in children, and a temporary folder that must be empty again afterwards."""
    tools, left = tmp_path / "bin", tmp_path / "tmp"
    tools.mkdir()
    left.mkdir()

    def make(gpus=2, apps="", free=140000, play="good", mig="Disabled"):
        lines = "\n".join(f"{n}, {uuid}, {free}, {mig}, NVIDIA H200" for n, uuid in enumerate(GPUS[:gpus]))
        smi = tools / "nvidia-smi"
        smi.write_text(
            f"#!/bin/sh\ncase $1 in\n--query-gpu=*) cat <<'E'\n{lines}\nE\n;;\n*) cat <<'E'\n{apps}\nE\n;;\nesac\n"
        )
        smi.chmod(smi.stat().st_mode | stat.S_IXUSR)
        probe = {
            "devices": [{"uuid": uuid} for uuid in GPUS[:gpus]],
            "torch": "2.11.0",
            "cuda": "13.0",
            "nccl": "2.28.9",
        }
        monkeypatch.setenv("PLAY_PROBE", json.dumps(probe))
        monkeypatch.setenv("PLAY", play)

    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("PLAY_PIDS", str(tmp_path / "pids"))
    monkeypatch.setattr(script.tempfile, "tempdir", str(left))
    monkeypatch.setattr(script, "child_argv", lambda: [sys.executable, str(tmp_path / "child.py")])
    for name in ("CUDA_VISIBLE_DEVICES", "NCCL_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    make.pids = lambda: [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    yield make
    assert list(left.iterdir()) == []
    if (tmp_path / "pids").exists():
        assert [pid for pid in make.pids() if Path(f"/proc/{pid}").exists()] == []


def run(capsys, *argv):
    status = script.main(list(argv))
    out, err = capsys.readouterr()
    return status, json.loads(out), err


# ---- arithmetic


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("times", [1, 5])
def test_the_expected_sum_is_what_repeated_all_reduces_in_place_give(ranks, times):
    for place in (0, 1, 65535, 2**26 - 1):
        values = [(place * script.STEP + (rank + 1) * script.OFFSET) % 2**32 for rank in range(ranks)]
        for _ in range(times):
            values = [sum(values) % 2**32] * ranks
        step, offset = script.summed(ranks, times)
        assert -(2**31) <= step < 2**31
        assert -(2**31) <= offset < 2**31
        assert (place * step + offset) % 2**32 == values[0]


@pytest.mark.parametrize("bit", [0, 19])
def test_a_wrong_bit_in_the_first_all_reduce_of_a_batch_is_still_seen_after_the_last(bit):
    """Each all-reduce in place multiplies the error by the number of ranks; with eight, bits 0 to 19 stay inside."""
    step, offset = script.summed(8, script.BATCH)
    value = (sum(7 * script.STEP + (rank + 1) * script.OFFSET for rank in range(8)) % 2**32) ^ (1 << bit)
    for _ in range(script.BATCH - 1):
        value = value * 8 % 2**32
    assert value != (7 * step + offset) % 2**32


def test_bus_bandwidth_as_nccl_tests_has_it():
    assert script.bus_bandwidth(2, 2**28, 0.001) == pytest.approx(268.435456)
    assert script.bus_bandwidth(8, 2**28, 0.001) == pytest.approx(268.435456 * 1.75)


def test_the_last_rank_to_start_tells_the_time():
    answers = [{"seconds": [0.003, 0.001], "wrong": 0}, {"seconds": [0.001, 0.002], "wrong": 0}]
    assert script.merge(2, 10**9, answers)["gbps"] == 1000.0


def test_transports_from_nccls_own_lines():
    lines = (
        "h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n"
        "h:1:2 [0] NCCL INFO Channel 01 : 0[0] -> 1[1] via SHM/direct/direct\n"
        "h:1:2 [0] NCCL INFO Channel 01/0 : 1[1] -> 0[0] [receive] via NET/Socket/0\n"
        "h:1:2 [0] NCCL INFO Connected all rings, use ring PXN 0 GDR 1\n"
    )
    assert script.transports(lines) == ["NET/Socket", "P2P/CUMEM", "SHM/direct/direct"]


# ---- runs


def test_a_pair_is_measured_in_both_directions_and_by_all_reduce(host, capsys):
    host()
    status, told, _ = run(capsys)
    pair = told["pairs"]["0-1"]
    assert (status, pair["peer_access"], told["all"], told["left"]) == (0, True, None, [])
    assert {key: copy["gbps"] for key, copy in pair["copy"].items()} == {"0-1": 134.22, "1-0": 134.22}
    assert (pair["copy"]["0-1"]["slowest_gbps"], pair["copy"]["0-1"]["fastest_gbps"]) == (67.11, 268.44)
    assert (pair["allreduce"]["state"], pair["allreduce"]["gbps"]) == ("measured", 268.44)


def test_three_gpus_have_three_pairs_and_one_all_reduce_over_all(host, capsys):
    host(gpus=3)
    _, told, _ = run(capsys)
    assert list(told["pairs"]) == ["0-1", "0-2", "1-2"]
    assert list(told["pairs"]["1-2"]["copy"]) == ["1-2", "2-1"]
    assert told["all"]["gpus"] == [0, 1, 2]
    assert told["all"]["allreduce"]["gbps"] == round(268.435456 * 4 / 3, 2)


def test_wrong_data_is_corrupt_however_fast(host, capsys):
    host(play="corrupt")
    status, told, _ = run(capsys)
    pair = told["pairs"]["0-1"]
    assert status == 1
    assert (pair["copy"]["0-1"]["state"], pair["copy"]["0-1"]["wrong"]) == ("corrupt", 7)
    assert (pair["allreduce"]["state"], pair["allreduce"]["wrong"], pair["allreduce"]["gbps"]) == ("corrupt", 3, 268.44)


def test_nccl_that_hangs_is_a_result_and_the_copies_stay(host, capsys):
    host(play="hang-nccl")
    begun = time.monotonic()
    status, told, _ = run(capsys, "--each", "1.5")
    pair = told["pairs"]["0-1"]
    assert time.monotonic() - begun < 10
    assert (status, pair["allreduce"]["state"], pair["copy"]["1-0"]["state"]) == (1, "hung", "measured")
    assert "rank 1 in an all-reduce" in pair["allreduce"]["why"]


def test_a_copy_that_hangs_does_not_hide_the_all_reduce(host, capsys):
    host(play="hang-copy")
    _, told, _ = run(capsys, "--each", "1.5")
    pair = told["pairs"]["0-1"]
    assert [pair["copy"][key]["state"] for key in ("0-1", "1-0")] == ["measured", "hung"]
    assert pair["allreduce"]["state"] == "measured"
    assert len(host.pids()) == 4


def test_the_limit_of_the_run_ends_it_and_says_so(host, capsys):
    host(gpus=3, play="hang-nccl")
    begun = time.monotonic()
    status, told, _ = run(capsys, "--each", "60", "--seconds", "2")
    assert time.monotonic() - begun < 8
    assert (status, told["pairs"]["0-1"]["allreduce"]["state"]) == (1, "skipped")
    assert told["pairs"]["1-2"]["copy"]["2-1"]["why"] == "the limit of 2 s for the whole run was reached before"


def test_an_error_of_a_child_is_quoted(host, capsys):
    host(play="crash")
    status, told, _ = run(capsys)
    result = told["pairs"]["0-1"]["allreduce"]
    assert (status, result["state"], result["why"]) == (1, "failed", "RuntimeError: CUDA error: out of memory")


def test_one_gpu_has_nothing_to_measure(host, capsys):
    host(gpus=1)
    status, told, err = run(capsys)
    assert (status, err) == (0, "")
    assert told["nothing_to_measure"].startswith("1 GPU")


# ---- refusals


@pytest.mark.parametrize(
    ("how", "argv", "words"),
    [
        (
            {"apps": "GPU-b, 4711, 1200, /usr/bin/python3"},
            [],
            "GPU 1 is in use by pid 4711 (/usr/bin/python3, 1200 MiB)",
        ),
        ({"free": 4000}, [], "GPU 0 has 4000 MiB free, 4096 MiB are needed"),
        ({"mig": "Enabled"}, [], "GPU 0 has MIG on"),
        ({}, ["--gpus", "0,5"], "GPU 5 is not visible to torch. Visible: 0, 1"),
    ],
)
def test_refusals_start_nothing(host, capsys, how, argv, words):
    host(**how)
    status, told, err = run(capsys, *argv)
    assert status == 2
    assert words in told["refused"]
    assert err == f"bandwidth: {told['refused']}\n"
    with pytest.raises(FileNotFoundError):
        host.pids()


def test_a_gpu_that_is_not_chosen_may_be_in_use(host, capsys):
    host(gpus=3, apps="GPU-c, 4711, 1200, python3")
    assert run(capsys, "--gpus", "0,1")[0] == 0


def test_who_comes_to_the_gpus_in_between_stops_the_rest(host, capsys, monkeypatch):
    host(gpus=3)
    looks = iter([[], []])
    guest = [{"uuid": "GPU-c", "pid": "4711", "mib": "9", "name": "vllm"}]
    monkeypatch.setattr(script, "compute_processes", lambda ours: next(looks, guest))
    status, told, _ = run(capsys)
    assert (status, told["pairs"]["0-1"]["allreduce"]["state"]) == (1, "measured")
    assert told["pairs"]["0-2"]["allreduce"]["state"] == "skipped"
    assert "pid 4711 (vllm, 9 MiB)" in told["pairs"]["0-2"]["copy"]["2-0"]["why"]


def test_shared_measures_beside_others(host, capsys):
    host(apps="GPU-b, 4711, 1200, python3")
    status, told, _ = run(capsys, "--shared")
    assert (status, told["shared"]) == (0, True)


def test_without_torch_one_line_and_exit_status_2(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "has no usable torch (libcudart.so.13: cannot open" in json.loads(done.stdout)["refused"]


def test_bad_arguments_end_with_2():
    for argv in (["--gpus", "0,0"], ["--gpus", "x"], ["--mib", "0"], ["--seconds", "nan"]):
        with pytest.raises(SystemExit) as end:
            script.arguments(argv)
        assert end.value.code == 2


def test_a_signal_ends_the_children_and_removes_the_folder(tmp_path):
    """The program itself, with a torch that never finishes importing."""
    (tmp_path / "torch.py").write_text(
        "import os, time\nopen(os.environ['PID'], 'w').write(str(os.getpid()))\ntime.sleep(60)\n"
    )
    (tmp_path / "tmp").mkdir()
    pid = tmp_path / "pid"
    variables = {"PYTHONPATH": str(tmp_path), "TMPDIR": str(tmp_path / "tmp"), "PID": str(pid)}
    with subprocess.Popen(
        [sys.executable, str(SCRIPT)], env={**os.environ, **variables}, stderr=subprocess.PIPE
    ) as process:
        end = time.monotonic() + 20
        while not (pid.exists() and pid.read_text()) and time.monotonic() < end:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM
        assert process.stderr.read() == b"bandwidth: stopped by SIGTERM\n"
    assert not Path(f"/proc/{pid.read_text()}").exists()
    assert list((tmp_path / "tmp").iterdir()) == []


# ---- floors


def facts(capability="9.0", generation=5, width=16, host=None, count=2):
    pcie = {"gen_current": 1, "gen_gpumax": generation, "gen_hostmax": host, "width_current": width, "width_max": width}
    return {"gpus": [{"index": n, "compute_capability": capability, "pcie": pcie} for n in range(count)]}


def document(allreduce, copy=None, peer_access=True, environment=None, **more):
    one = {"state": "measured", "gbps": allreduce, "wrong": 0, "transport": None, "why": None, **more}
    both = {"0-1": {**one, "gbps": copy}, "1-0": {**one, "gbps": copy}} if copy else {}
    pair = {"peer_access": peer_access, "copy": both, "allreduce": one}
    return {"environment": environment or {}, "pairs": {"0-1": pair}, "all": None}


def allreduce(measured, link="NV18", known=None):
    return next(
        item for item in judging.judge(measured, {"0-1": link}, known or facts(), FLOORS) if item["what"] == "allreduce"
    )


def test_the_floor_passes_nvlink_and_catches_shared_memory_and_sockets():
    """The three rates are those of two H200s with NV18, 64 MiB."""
    assert allreduce(document(250.0))["ok"] is True
    slow = allreduce(document(25.7, transport=["SHM/direct/direct"], environment={"NCCL_P2P_DISABLE": "1"}))
    assert (slow["ok"], slow["floor_gbps"]) == (False, 148.3)
    assert slow["why"] == (
        "25.7 GB/s, where at least 148.3 GB/s is expected over NV18 (18 links x 20.6 GB/s x 0.4); "
        "NCCL used SHM/direct/direct; the environment has NCCL_P2P_DISABLE=1"
    )
    assert allreduce(document(2.5))["ok"] is False


@pytest.mark.parametrize(
    ("link", "known", "rate"),
    [
        ("NV12", {"capability": "8.0"}, 208.0),  # nccl-tests issue 178
        ("NV12", {"capability": "9.0"}, 115.37),  # nccl-tests issue 194
        ("NODE", {"capability": "8.0", "generation": 4}, 20.0),  # nccl-tests issue 178
    ],
)
def test_rates_of_other_hosts_are_above_the_floor(link, known, rate):
    assert allreduce(document(rate), link, facts(**known))["ok"] is True


def test_shared_memory_passes_where_it_is_the_way_and_sockets_do_not():
    for link in ("PHB", "NODE", "SYS"):
        assert allreduce(document(25.7), link)["ok"] is True
        for generation in (3, 4, 5):
            assert allreduce(document(2.5), link, facts(generation=generation))["ok"] is False


def test_the_slower_of_gpu_and_host_counts_and_no_number_is_made_up():
    assert allreduce(document(1.0), "PIX", facts(host=3))["floor_gbps"] == 5.5
    assert allreduce(document(1.0), "PIX", facts(generation=6))["ok"] is None
    assert allreduce(document(1.0), "PIX", facts(generation=None))["why"] == "the PCIe generation or width is not known"
    assert allreduce(document(1.0), "NV4", facts(capability=None))["ok"] is None
    assert allreduce(document(1.0), None)["ok"] is None


def test_copies_have_floors_of_their_own():
    def copies(link, rate, **more):
        return {item["ok"] for item in judging.judge(document(300, rate, **more), {"0-1": link}, facts(), FLOORS)[:2]}

    assert copies("NV18", 380.0) == {True}
    assert copies("NV18", 50.0, peer_access=False) == {False}
    assert copies("PIX", 54.0) == {True}
    assert copies("PIX", 20.0) == {False}
    assert copies("PIX", 20.0, peer_access=False) == {None}
    assert copies("SYS", 1.0) == {None}


@pytest.mark.parametrize(("state", "ok"), [("hung", False), ("corrupt", False), ("failed", False), ("skipped", None)])
def test_what_was_not_measured_right_is_never_ok(state, ok):
    entry = allreduce(document(400.0, state=state, why="as said"))
    assert entry["ok"] is ok
    assert entry["why"].startswith(f"{state}: as said")


def test_all_gpus_have_a_floor_only_where_every_pair_has_nvlink():
    measured = {
        **document(300.0),
        "all": {"gpus": [0, 1, 2], "allreduce": document(300.0)["pairs"]["0-1"]["allreduce"]},
    }
    links = {"0-1": "NV18", "0-2": "NV18", "1-2": "NV17"}
    entry = judging.judge(measured, links, facts(count=3), FLOORS)[-1]
    assert (entry["pair"], entry["link"], entry["ok"]) == ("0-1-2", "NV17", True)
    entry = judging.judge(measured, {**links, "1-2": "SYS"}, facts(count=3), FLOORS)[-1]
    assert (entry["link"], entry["ok"]) == (None, None)


def test_nothing_measured_gives_nothing():
    assert judging.judge({"nothing_to_measure": "1 GPU"}, {}, facts(count=1), FLOORS) == []


def test_every_class_of_link_has_an_entry_and_every_fraction_is_one():
    for what in ("copy", "allreduce"):
        assert list(FLOORS[what]) == ["NV", "PIX", "PXB", "PHB", "NODE", "SYS"]
        assert all(value is None or 0 < value < 1 for value in FLOORS[what].values())


RESULTS = Path(__file__).resolve().parents[2] / "docs" / "validation" / "2026-11-29-bandwidth-h200"
H200 = {
    "gpus": [
        {"index": number, "compute_capability": "9.0", "pcie": {"gen_gpumax": 5, "gen_hostmax": None, "width_max": 16}}
        for number in range(2)
    ]
}


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("nvlink", []),
        ("nvlink-64", []),
        ("no-p2p", ["27.32 GB/s, where at least 148", "SHM/direct/direct", "NCCL_P2P_DISABLE=1"]),
        ("sockets", ["3.44 GB/s, where at least 148", "NET/Socket", "NCCL_SHM_DISABLE=1"]),
    ],
)
def test_what_two_h200s_gave_passes_and_the_slow_ways_do_not(name, found):
    measured = json.loads((RESULTS / f"{name}.json").read_text())
    findings = judging.findings(measured, {"0-1": "NV18"}, H200, FLOORS, "gpu-01")
    assert len(findings) == bool(found)
    for finding in findings:
        assert (finding.id, finding.severity, finding.where) == ("bandwidth-low", "warning", "gpu-01")
        assert all(words in finding.message for words in found)


@pytest.mark.parametrize("state", ["corrupt", "hung", "failed"])
def test_wrong_data_a_hang_and_a_failure_are_errors(state):
    measured = json.loads((RESULTS / "nvlink.json").read_text())
    measured["pairs"]["0-1"]["allreduce"].update(state=state, why="told", gbps=None)
    (finding,) = judging.findings(measured, {"0-1": "NV18"}, H200, FLOORS, "gpu-01")
    assert (finding.id, finding.severity) == (f"bandwidth-{state}", "error")


def test_a_proof_that_refused_to_start_says_why():
    (finding,) = judging.findings({"refused": "GPU 0 is used by 4711"}, {}, H200, FLOORS, "gpu-01")
    assert "4711" in finding.message


def test_every_rate_is_told_with_its_link_and_its_floor():
    measured = json.loads((RESULTS / "nvlink.json").read_text())
    told = judging.lines(judging.judge(measured, {"0-1": "NV18"}, H200, FLOORS))
    assert len(told) == 3
    assert told[0].startswith("GPUs 0-1, copy 0-1: 38") and told[0].endswith(" GB/s (NV18, at least 278)")
    assert told[2].startswith("GPUs 0-1, all-reduce: 29") and told[2].endswith(" GB/s (NV18, at least 148)")
    skipped = {"pair": "0-1", "what": "copy 0-1", "link": None, "measured_gbps": None, "floor_gbps": None}
    assert judging.lines([skipped]) == ["GPUs 0-1, copy 0-1: no rate (nothing is expected)"]
