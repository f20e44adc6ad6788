"""Releases built on this machine with the real uv, from tiny wheels: what must come out, and what must not be left."""

import base64
import errno
import functools
import hashlib
import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import releases
from gpu_fleet import domain

PYTHON = sys.executable
MINOR = f"{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.fixture
def lock(tmp_path):
    return tiny.make(tmp_path / "source", python=MINOR)


@pytest.fixture
def text(lock, tmp_path):
    return (tmp_path / "source" / "tiny.lock").read_text()


@pytest.fixture
def source(lock, tmp_path):
    return releases.Source(folder=str(tmp_path / "source" / "wheels"))


@pytest.fixture
def root(tmp_path):
    return tmp_path / "releases"


def build(text, root, source, uv=None, wait=900):
    return releases.build(text, str(root), releases.Tools(PYTHON, uv or domain.uv_binary()), source, wait)


def nothing_half_made(root):
    return not [path.name for path in root.iterdir() if path.name.startswith(releases.BUILDING)]


def test_a_release_is_whole_and_relocated(lock, text, root, source):
    answer = build(text, root, source)
    path = root / lock.id
    assert answer["path"] == str(path)
    assert releases.look(str(path), lock.digest).state == "right"
    assert (
        subprocess.run(
            [path / "bin" / "vllm"], capture_output=True, text=True, check=True, env={"PYTHONDONTWRITEBYTECODE": "1"}
        ).stdout
        == "0.32.0+cpu\n"
    )
    assert releases.BUILDING not in (path / "bin" / "vllm").read_text()
    assert nothing_half_made(root)
    assert not list(path.rglob("__pycache__"))
    assert [item for item in path.rglob("*") if not item.is_symlink() and item.stat().st_mode & 0o022] == []
    assert json.loads((path / ".complete").read_text())["lock_digest"] == lock.digest


def test_second_build_does_nothing(lock, text, root, source):
    build(text, root, source)
    before = (root / lock.id).stat().st_ino
    build(text, root, source, uv="/nonexistent")
    assert (root / lock.id).stat().st_ino == before


@pytest.mark.parametrize(
    ("harm", "state", "removable"),
    [
        (lambda path: (path / "bin" / "vllm").write_text("#!/bin/sh\n"), "altered", False),
        (lambda path: next(path.rglob("torch/__init__.py")).unlink(), "altered", False),
        (lambda path: next(path.rglob("torch/__init__.py")).chmod(0o666), "altered", False),
        (lambda path: (next(path.rglob("torch")) / "added.py").touch(), "altered", True),
        (lambda path: (path / ".complete").unlink(), "incomplete", False),
        (lambda path: (path / ".manifest.json").write_text("{"), "incomplete", False),
    ],
)
def test_harm_is_found_and_put_right(lock, text, root, source, harm, state, removable):  # noqa: PLR0917 (fixtures)
    build(text, root, source)
    path = root / lock.id
    harm(path)
    found = releases.look(str(path), lock.digest)
    assert (found.state, found.removable) == (state, removable)
    if removable:
        releases.remove_extra(str(path), found)
    else:
        build(text, root, source)
    assert releases.look(str(path), lock.digest).state == "right"
    assert nothing_half_made(root)


def test_bytecode_that_somebody_wrote_is_removed_with_its_folder(lock, text, root, source):
    build(text, root, source)
    path = root / lock.id
    subprocess.run([path / "bin" / "python", "-c", "import torch"], check=True, env={})
    found = releases.look(str(path), lock.digest)
    assert found.removable
    releases.remove_extra(str(path), found)
    assert not list(path.rglob("__pycache__"))


def test_another_lock_makes_another_release_and_both_stay(lock, text, root, source, tmp_path):
    build(text, root, source)
    second = tiny.make(tmp_path / "second", python=MINOR, torch="2.13.1")
    build(
        (tmp_path / "second" / "tiny.lock").read_text(),
        root,
        releases.Source(folder=str(tmp_path / "second" / "wheels")),
    )
    assert releases.others(str(root), second.id) == [lock.id]
    assert releases.look(str(root / lock.id), lock.digest).state == "right"


# What goes wrong leaves the former release alone


@pytest.fixture
def former(lock, text, root, source):
    """A damaged release, so that a build is due whose failure must not take it away."""
    build(text, root, source)
    script = root / lock.id / "bin" / "vllm"
    script.write_text("damaged")
    return script


def refused(text, root, source, said, former, **options):
    with pytest.raises(releases.ReleaseError, match=said) as error:
        build(text, root, source, **options)
    assert former.read_text() == "damaged"
    assert nothing_half_made(root)
    return str(error.value)


def test_a_tampered_lock(text, root, source, former):
    refused(text.replace("torch==2.13.0", "torch==2.12.0"), root, source, "was changed after it was made", former)


def damaged(folder):
    path = next(folder.glob("torch-*"))
    path.write_bytes(path.read_bytes().replace(b"__version__ = '2.13.0'", b"__version__ = '2.13.6'"))


def forged(folder):
    """A whole wheel of the same name and size with other content."""
    tiny.wheel(folder, "torch", "2.13.0", {"torch/__init__.py": "__version__ = '2.13.6'\n", "torch/ballast": b""})


@pytest.mark.parametrize("tamper", [damaged, forged])
def test_a_tampered_wheel(text, root, source, former, tamper):
    tamper(Path(source.folder))
    message = refused(text, root, source, "is not the one the lock names", former)
    assert "torch" in message


def test_missing_and_short_wheels_are_all_named(text, root, source, former, tmp_path):
    first, second = sorted((tmp_path / "source" / "wheels").glob("*.whl"))
    first.unlink()
    second.write_bytes(b"")
    message = refused(text, root, source, "2 of 3 wheels", former)
    assert first.name in message
    assert second.name in message


def test_too_little_room_is_refused_before_anything_is_written(text, root, source, former, monkeypatch):
    class Full:
        f_bavail, f_frsize, f_files, f_favail = 1, 4096, 0, 0

    monkeypatch.setattr(releases.os, "statvfs", lambda path: Full)
    refused(text, root, source, r"needs about .* GB, 0\.0 GB are free", former, uv="/nonexistent")


def test_a_disk_that_fills_up_meanwhile(text, root, source, former, tmp_path):
    uv = tmp_path / "uv"
    uv.write_text(
        "#!/bin/sh\necho 'error: failed to write to file: No space left on device (os error 28)' >&2; exit 2\n"
    )
    uv.chmod(0o755)
    refused(text, root, source, "the disk is full", former, uv=str(uv))


def test_an_interpreter_the_lock_is_not_for(tmp_path, root, source, text, former):
    other = tiny.make(tmp_path / "other", python="3.7")
    assert other.python == "3.7"
    refused((tmp_path / "other" / "tiny.lock").read_text(), root, source, "the lock is for Python 3.7", former)


def test_an_index_out_of_reach(text, root, former):
    closed = releases.Source(index_url="http://127.0.0.1:9/simple", environment={"UV_HTTP_RETRIES": "0"})
    refused(text, root, closed, "cannot be reached from this host; set vllm_runtime_index_url", former)


def test_a_package_that_only_its_own_index_has(lock, text, root, tmp_path):
    """The ordinary index lacks torch; the named one is asked for torch alone and needs nothing else."""
    tiny.mirror(tmp_path / "source", lock)
    own = tmp_path / "own"
    own.mkdir()
    shutil.move(tmp_path / "source" / "mirror" / "torch", own / "torch")
    build(
        text,
        root,
        releases.Source(index_url=(tmp_path / "source" / "mirror").as_uri(), fallbacks={"torch": own.as_uri()}),
    )
    assert releases.look(str(root / lock.id), lock.digest).state == "right"


def test_a_package_that_no_index_has(lock, text, root, tmp_path, former):
    tiny.mirror(tmp_path / "source", lock)
    shutil.rmtree(tmp_path / "source" / "mirror" / "torch")
    source = releases.Source(
        index_url=(tmp_path / "source" / "mirror").as_uri(),
        fallbacks={"torch": "http://127.0.0.1:9/cpu"},
        environment={"UV_HTTP_RETRIES": "0"},
    )
    message = refused(text, root, source, "torch==2.13.0 was found neither", former)
    for word in ("/mirror", "http://127.0.0.1:9/cpu", "vllm_runtime_find_links"):
        assert word in message


def test_a_release_that_does_not_import(root, former, tmp_path, lock, monkeypatch):
    broken = tmp_path / "broken"
    made = tiny.make(broken, python=MINOR)
    content = tiny.wheel(broken / "wheels", "torch", "2.13.0", {"torch/__init__.py": "import no_such_library\n"})
    wheels = tuple(content if wheel.name == "torch" else wheel for wheel in made.wheels)
    text = tiny.locks.render(tiny.locks.Lock(**{**made.__dict__, "wheels": wheels, "digest": ""}))
    refused(text, root, releases.Source(folder=str(broken / "wheels")), "(?s)does not import.*no_such_library", former)


# Killed, and in company

_RUNNER = """
import sys
sys.path[:0] = [sys.argv[1]]
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import releases
text = open(sys.argv[2]).read()
releases.build(text, sys.argv[3], releases.Tools(sys.argv[4], sys.argv[5]), releases.Source(folder=sys.argv[6]))
"""


def start(tmp_path, root, uv):
    return subprocess.Popen(
        [
            PYTHON,
            "-c",
            _RUNNER,
            domain.COLLECTION / "collections",
            tmp_path / "source" / "tiny.lock",
            root,
            PYTHON,
            uv,
            tmp_path / "source" / "wheels",
        ]
    )


def slow_uv(tmp_path):
    """A uv that does its work late: what runs meanwhile sees a build in progress."""
    path = tmp_path / "slow-uv"
    path.write_text(f'#!/bin/sh\necho $$ > "{tmp_path}/uv.pid"\nsleep 4\nexec {domain.uv_binary()} "$@"\n')
    path.chmod(0o755)
    return path


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_killed_half_way_then_converges(lock, text, root, source, former, tmp_path):  # noqa: PLR0917 (fixtures)
    process = start(tmp_path, root, slow_uv(tmp_path))
    wait_for(lambda: (tmp_path / "uv.pid").exists() and (tmp_path / "uv.pid").read_text().strip())
    pid = int((tmp_path / "uv.pid").read_text())
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_for(lambda: not alive(pid))  # a uv that lived on would write into a folder that the next run removes
    assert not nothing_half_made(root)
    assert former.read_text() == "damaged"
    build(text, root, source)
    assert nothing_half_made(root)
    assert releases.look(str(root / lock.id), lock.digest).state == "right"


def test_two_builds_at_once_make_one_release(lock, root, source, tmp_path):
    slow = start(tmp_path, root, slow_uv(tmp_path))
    wait_for((tmp_path / "uv.pid").exists)
    other = start(tmp_path, root, domain.uv_binary())
    assert (slow.wait(60), other.wait(60)) == (0, 0)
    assert releases.look(str(root / lock.id), lock.digest).state == "right"
    assert nothing_half_made(root)


def test_a_build_that_never_ends_is_not_waited_for(text, root, source, tmp_path):
    root.mkdir()
    slow = start(tmp_path, root, slow_uv(tmp_path))
    wait_for((tmp_path / "uv.pid").exists)
    with pytest.raises(releases.ReleaseError, match="another run has been building"):
        build(text, root, source, wait=1)
    assert slow.wait(60) == 0


# Small parts


def test_foreign_cuda_is_found_in_what_ldconfig_says():
    listing = """
\tlibcudart.so.12 (libc6,x86-64) => /usr/local/cuda/lib64/libcudart.so.12
\tlibcuda.so.1 (libc6,x86-64) => /lib/x86_64-linux-gnu/libcuda.so.1
\tlibcuda.so.1 (libc6,x86-64) => /usr/local/cuda-13.0/compat/libcuda.so.1
\tlibc.so.6 (libc6,x86-64) => /lib/x86_64-linux-gnu/libc.so.6
"""
    assert releases.foreign_cuda(listing) == [
        "/usr/local/cuda-13.0/compat/libcuda.so.1",
        "/usr/local/cuda/lib64/libcudart.so.12",
    ]


def test_pips_settings_of_a_host(tmp_path):
    machine, user = tmp_path / "a", tmp_path / "b"
    machine.write_text(
        "[global]\nindex-url = https://one/simple\nextra-index-url =\n  https://x/simple\n  https://y/simple\ncert = /etc/ca.pem\n"
    )
    user.write_text("[install]\nindex-url = https://two/simple\n")
    found = releases.host_pip_settings([str(machine), str(user)])
    assert found.index_url == "https://two/simple"
    assert found.extra_index_urls == ("https://x/simple", "https://y/simple")
    assert found.environment == {"SSL_CERT_FILE": "/etc/ca.pem"}


def wheels_to_send(*names):
    return [{"name": name, "size": 5, "sha256": hashlib.sha256(b"right").hexdigest()} for name in names]


def test_received_files_are_proved_before_they_are_in_place(tmp_path):
    folder, files = tmp_path / "folder", wheels_to_send("a.whl")
    arriving = folder / "arriving"
    assert releases.wanted_files(str(folder), files, 0) == ["a.whl"]
    assert arriving.stat().st_mode & 0o777 == 0o700
    (arriving / "a.whl").write_text("right")
    releases.receive(str(folder), files)
    assert releases.wanted_files(str(folder), files, 0) == []
    (folder / "a.whl").write_text("wrong")
    assert releases.wanted_files(str(folder), files, 0) == ["a.whl"]
    (arriving / "a.whl").write_text("wrong")
    with pytest.raises(releases.ReleaseError, match="arrived damaged"):
        releases.receive(str(folder), files)
    assert list(folder.rglob("*.whl")) == []


def test_an_interrupted_transfer_goes_on_with_the_files_that_lack(tmp_path):
    folder, files = tmp_path / "folder", wheels_to_send("a.whl", "b.whl", "c.whl")
    assert releases.wanted_files(str(folder), files, 0) == ["a.whl", "b.whl", "c.whl"]
    (folder / "arriving/a.whl").write_text("right")
    (folder / "arriving/b.whl").write_text("ri")  # here the connection was cut
    assert releases.wanted_files(str(folder), files, 0) == ["b.whl", "c.whl"]
    assert (folder / "a.whl").read_text() == "right"
    assert os.listdir(folder / "arriving") == []


def test_what_is_sent_has_to_fit_the_disk_it_goes_to(tmp_path, monkeypatch):
    folder, asked = tmp_path / "folder", []

    def statvfs(path):
        asked.append(path)
        return SimpleNamespace(f_bavail=1, f_frsize=4)

    monkeypatch.setattr(releases.os, "statvfs", statvfs)
    with pytest.raises(releases.ReleaseError, match=r"needs about .* are free there; make room"):
        releases.wanted_files(str(folder), wheels_to_send("a.whl"), 0)
    assert asked == [str(folder)]


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC])
@pytest.mark.parametrize("call", ["makedirs", "mkdir"])
def test_a_disk_that_takes_nothing_is_said_in_words(text, root, source, former, monkeypatch, number, call):  # noqa: PLR0917
    def refuse(path, *_, **__):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(releases.os, call, refuse)
    refused(text, root, source, f"{os.strerror(number)}; .* name another folder with vllm_runtime_root", former)
    if call == "makedirs":
        with pytest.raises(releases.ReleaseError, match=os.strerror(number)):
            releases.wanted_files(str(root / ".incoming"), [], 0)


def test_a_look_needs_no_disk_that_can_be_written(lock, text, root, source, monkeypatch):
    build(text, root, source)
    python = root / lock.id / "bin" / "vllm"
    python.chmod(python.stat().st_mode)  # a new ctime: its content is read, and what the kernel says kept

    def refuse(path, record):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    monkeypatch.setattr(releases.tree, "save", refuse)
    assert releases.look(str(root / lock.id), lock.digest, refresh=True).state == "right"


def test_nothing_is_sent_to_a_disk_without_room(tmp_path):
    with pytest.raises(releases.ReleaseError, match="make room"):
        releases.wanted_files(str(tmp_path), [], 1 << 60)


def test_tools_of_a_host_need_no_shell():
    assert shutil.which("true")
    assert releases.probe_python(PYTHON)["version"] == MINOR
    with pytest.raises(releases.ReleaseError, match="vllm_runtime_python"):
        releases.probe_python("/nonexistent/python")


def test_passwords_of_an_index_are_no_arguments_and_in_no_message(text, root, former, monkeypatch):
    calls = []
    run = releases._uv
    monkeypatch.setattr(
        releases, "_uv", lambda command, environment: calls.append((command, environment)) or run(command, environment)
    )
    source = releases.Source(
        index_url="http://me:geheim@127.0.0.1:9/simple", extra_index_urls=("http://u:geheim@127.0.0.1:9/x",)
    )
    message = refused(text, root, source, "cannot be reached", former)
    assert "geheim" not in message
    assert not [command for command, _ in calls if "geheim" in " ".join(command)]
    assert "geheim" in calls[-1][1]["UV_DEFAULT_INDEX"]


@pytest.fixture
def page(lock, tmp_path):
    """A page of wheels that wants a user and a password; its address with both."""

    class Guarded(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            if self.headers.get("Authorization") == "Basic " + base64.b64encode(b"me:geheim").decode():
                return super().do_GET()
            self.send_response(401)
            self.send_header("WWW-Authenticate", "Basic")
            return self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    serve = functools.partial(Guarded, directory=str(tmp_path / "source" / "wheels"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://me:geheim@127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_passwords_of_pages_of_wheels_are_in_a_file_of_roots(lock, text, root, tmp_path, page, monkeypatch):  # noqa: PLR0917
    calls = []
    run = releases._uv

    def noted(command, environment):
        named = [command[at + 1] for at, word in enumerate(command) if word == "--requirement"]
        files = [path for path in named if "geheim" in Path(path).read_text()]
        calls.append((command, [os.stat(path).st_mode & 0o777 for path in files]))
        return run(command, environment)

    monkeypatch.setattr(releases, "_uv", noted)
    (tmp_path / "empty").mkdir()
    source = releases.Source(
        index_url=(tmp_path / "empty").as_uri(), find_links=(page,), environment={"NO_PROXY": "127.0.0.1"}
    )
    build(text, root, source)
    assert releases.look(str(root / lock.id), lock.digest).state == "right"
    assert not [command for command, _ in calls if "geheim" in " ".join(command)]
    assert calls[-1][1] == [0o600]
    assert not [path for path in root.rglob("*") if path.is_file() and b"geheim" in path.read_bytes()]


def test_a_hardened_umask_does_not_close_a_release(lock, text, root, source):
    before = os.umask(0o077)
    try:
        build(text, root, source)
    finally:
        os.umask(before)
    assert [
        path for path in (root / lock.id).rglob("*") if path.is_dir() and path.stat().st_mode & 0o005 != 0o005
    ] == []


def test_folders_that_the_service_user_cannot_enter_are_named(tmp_path):
    (tmp_path / "opt/releases").mkdir(parents=True)
    tmp_path.chmod(0o711)
    (tmp_path / "opt").chmod(0o750)
    assert str(tmp_path / "opt") in releases.closed_folders(str(tmp_path / "opt/releases"))
    assert str(tmp_path) not in releases.closed_folders(str(tmp_path / "opt/releases"))
