"""The controller's wheelhouse: exactly the lock's wheels, proved, in spite of damage, interruption and company."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny
from gpu_fleet import domain, wheelhouse


@pytest.fixture
def lock(tmp_path, monkeypatch):
    """A tiny lock whose wheels pip finds in a folder."""
    lock = tiny.make(tmp_path / "source", padding=1 << 20)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "source" / "wheels"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return lock


@pytest.fixture
def house(tmp_path):
    return tmp_path / "house"


def silent(text):
    pass


def wheels(folder):
    return sorted(path.name for path in folder.glob("*.whl"))


def test_fetches_exactly_the_locks_wheels(lock, house):
    result = wheelhouse.fetch([lock], house, silent)
    assert (result.wheels, result.fetched) == (3, 3)
    assert wheels(house) == sorted(wheel.filename for wheel in lock.wheels)
    assert sorted(path.name for path in house.iterdir() if path.suffix != ".whl") == [".lock", ".record.json"]


def test_second_run_fetches_and_hashes_nothing(lock, house, monkeypatch):
    wheelhouse.fetch([lock], house, silent)
    monkeypatch.setattr(wheelhouse, "_sha256", lambda path: pytest.fail(f"{path} was hashed"))
    monkeypatch.setattr(wheelhouse, "Fetcher", lambda *_: pytest.fail("a pip was started"))
    assert wheelhouse.fetch([lock], house, silent).fetched == 0


def test_an_altered_wheel_of_the_same_size_is_reported_and_replaced(lock, house):
    wheelhouse.fetch([lock], house, silent)
    path = house / lock.wheels[0].filename
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    said = []
    result = wheelhouse.fetch([lock], house, said.append)
    assert result.altered == [path.name]
    assert path.name in said[0]
    assert wheelhouse._sha256(path) == lock.wheels[0].sha256


def test_a_touched_wheel_is_kept(lock, house):
    wheelhouse.fetch([lock], house, silent)
    os.utime(house / lock.wheels[0].filename, (1, 1))
    assert wheelhouse.fetch([lock], house, silent).fetched == 0


def test_a_wheel_with_another_hash_is_not_taken_in_and_others_are_kept(lock, house):
    wrong = dataclasses.replace(lock, wheels=(dataclasses.replace(lock.wheels[0], sha256="0" * 64), *lock.wheels[1:]))
    with pytest.raises(
        wheelhouse.WheelhouseError, match=r"torch==2.13.0 .*DO NOT MATCH|torch==2.13.0 .*Expected sha256"
    ):
        wheelhouse.fetch([wrong], house, silent)
    assert wheels(house) == sorted(wheel.filename for wheel in lock.wheels[1:])


def test_a_wheel_nobody_has_is_one_line_with_the_remedy(lock, house, monkeypatch):
    table = {"indices": {"pytorch": {"url": "http://127.0.0.1:9/{accelerator}", "packages": ["torch"]}}}
    monkeypatch.setattr(domain, "data_cached", lambda name: table)
    missing = dataclasses.replace(lock.wheels[0], version="2.13.0+cpu", filename="torch-2.13.0+cpu-py3-none-any.whl")
    with pytest.raises(wheelhouse.WheelhouseError) as error:
        wheelhouse.fetch([dataclasses.replace(lock, wheels=(missing, *lock.wheels[1:]))], house, silent)
    assert len(str(error.value).splitlines()) == 1
    for word in ("torch==2.13.0+cpu", "http://127.0.0.1:9/cpu", "PIP_FIND_LINKS"):
        assert word in str(error.value)
    assert wheels(house) == sorted(wheel.filename for wheel in lock.wheels[1:])


def run(house, lock_file, **options):
    environment = {**os.environ, "PYTHONPATH": str(domain.COLLECTION / "scripts")}
    return subprocess.Popen(
        [sys.executable, "-m", "gpu_fleet.wheelhouse", "fetch", str(lock_file), "--into", str(house)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options,
    )  # fmt: skip


def test_two_runs_at_once_both_end_well(lock, house, tmp_path):
    runs = [run(house, tmp_path / "source" / "tiny.lock") for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in runs]
    assert [process.returncode for process in runs] == [0, 0], outputs
    assert wheels(house) == sorted(wheel.filename for wheel in lock.wheels)


def open_once_read(fifo, process):
    """The write end of a FIFO as soon as the process or a child of it reads the other end."""
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        try:
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # ENXIO: no reader yet
            time.sleep(0.01)
    return pytest.fail(f"nothing read {fifo}: {process.communicate()[0]}")


def at_work(group):
    """Whether a process of a process group still runs (5: its group, 3: its state, proc(5))."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                return True
    return False


def test_a_killed_run_leaves_nothing_that_the_next_minds(lock, house, tmp_path):
    wheel = tmp_path / "source" / "wheels" / lock.wheels[0].filename
    kept = wheel.rename(tmp_path / wheel.name)
    os.mkfifo(wheel)  # pip stays at reading it, so that the kill meets a run that is under way on any machine
    process = run(house, tmp_path / "source" / "tiny.lock", start_new_session=True)
    end = open_once_read(wheel, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    while at_work(process.pid):  # a pip of the run may be for a moment more
        time.sleep(0.01)
    os.close(end)
    assert list(house.glob(".part-*"))
    kept.replace(wheel)
    wheelhouse.fetch([lock], house, silent)
    assert not list(house.glob(".part-*"))
    assert wheels(house) == sorted(wheel.filename for wheel in lock.wheels)


def test_a_damaged_lock_is_refused_by_name(house, tmp_path):
    tiny.make(tmp_path / "source")
    path = tmp_path / "source" / "tiny.lock"
    path.write_text(path.read_text().replace("torch==2.13.0", "torch==2.14.0"))
    process = run(house, path)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 1
    assert str(path) in output
    assert "was changed after it was made" in output


def test_small_wheels_share_a_pip_and_big_ones_do_not(lock):
    made = [
        dataclasses.replace(lock.wheels[1], name=f"p{number}", size=size)
        for number, size in enumerate([50_000_000, *[1000] * 13])
    ]
    groups = wheelhouse.batches(wheelhouse.Need(wheel, lock) for wheel in made)
    assert [len(group) for group in groups] == [1, 12, 1]
