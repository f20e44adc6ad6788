"""The folder that is carried to a site without a way out: what is needed, what of it is there, and how it is proved."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import types

import pytest
import tiny
import yaml
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import mirror
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.mirror import Content, File, Host, MirrorError, Target
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import mirror as fill
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import mirror_apt
from conftest import REPOSITORY

DEBIAN = Target("debian-12", "x86_64")
KNOWN = yaml.safe_load((REPOSITORY / "data" / "mirror.yml").read_text())
DIGEST = "8d98f0c882f269aaee8437bcfe89346e" * 2
URIS = f"""'http://deb.example.org/debian/pool/main/g/glibc/libc6_2.36-9%2bdeb12u14_amd64.deb' libc6_2.36-9+deb12u14_amd64.deb 2759320 SHA256:{DIGEST}
'http://deb.example.org/debian/pool/main/n/numactl/libnuma1_2.0.16-1_amd64.deb' libnuma1_1%3a2.0.16-1_amd64.deb 22208 SHA256:{DIGEST}
"""


# What apt says


def test_files_of_apt_have_the_names_of_an_archive():
    found = mirror.read_uris(URIS)
    assert [item.path for item in found] == ["libc6_2.36-9+deb12u14_amd64.deb", "libnuma1_2.0.16-1_amd64.deb"]
    assert found[0] == File(
        "libc6_2.36-9+deb12u14_amd64.deb",
        2759320,
        DIGEST,
        "http://deb.example.org/debian/pool/main/g/glibc/libc6_2.36-9%2bdeb12u14_amd64.deb",
    )


def test_a_source_without_sha256_is_refused():
    with pytest.raises(MirrorError, match=r"gives no SHA256 for 'http://a/b.deb'"):
        mirror.read_uris("'http://a/b.deb' b.deb 12 MD5Sum:8e7e741807b1e1939df8f58323affdcb\n")


def test_the_same_package_for_two_hosts_is_one_file_and_two_contents_of_a_name_are_refused():
    one, same = File("a_1_all.deb", 1, "aa", "http://x/a"), File("a_1_all.deb", 1, "aa", "http://y/a")
    assert mirror.one_file_each([one, same], "debian-12") == [one]
    with pytest.raises(MirrorError, match=r"a_1_all.deb comes with two contents"):
        mirror.one_file_each([one, File("a_1_all.deb", 1, "bb", "http://y/a")], "debian-12")


def test_the_private_apt_knows_nothing_of_this_machine_but_how_it_fetches():
    text = mirror.apt_conf("/r", "arm64", 'Acquire::http::Proxy "http://proxy:3128";\n')
    folders = re.findall(r'^Dir::(?:State|Cache|Log|Etc)(?:::\w+)? "([^"]*)";$', text, re.MULTILINE)
    others = {path for path in folders if not path.startswith("/r")}
    assert others == {"/etc/apt/auth.conf", "/etc/apt/auth.conf.d", "/etc/apt/trusted.gpg", "/etc/apt/trusted.gpg.d"}
    assert 'APT::Architectures { "arm64"; };' in text
    assert text.endswith('Acquire::http::Proxy "http://proxy:3128";\n')


@pytest.mark.parametrize("system", sorted(yaml.safe_load((REPOSITORY / "data/versions.yml").read_text())["systems"]))
@pytest.mark.parametrize("architecture", ["x86_64", "aarch64"])
def test_every_system_has_sources_of_its_own(system, architecture):
    text = mirror.sources(Target(system, architecture), KNOWN["sources"], ["contrib"])
    paragraphs = text.strip().split("\n\n")
    assert paragraphs
    for paragraph in paragraphs:
        assert re.search(
            r"^Types: deb\nURIs: http\S+\nSuites: [a-z -]+\nComponents: main.* contrib\nSigned-By: /usr/share/keyrings/\S+$",
            paragraph,
        )
    code = KNOWN["sources"][system]["code"]
    assert f"{code}-security" in text
    assert ("ports.ubuntu.com" in text) == (system.startswith("ubuntu") and architecture == "aarch64")


def test_a_system_without_known_sources_is_refused_with_the_way_out():
    with pytest.raises(MirrorError, match="give them in mirror_sources"):
        mirror.sources(Target("debian-11", "x86_64"), KNOWN["sources"])


def test_of_the_controller_only_its_systems_own_sources_are_taken():
    found = [
        {"uri": "http://mirror/debian", "suite": "bookworm", "components": ["main"], "signed_by": "/k.gpg"},
        {"uri": "http://mirror/debian", "suite": "bookworm-backports", "components": ["main"], "signed_by": None},
        {"uri": "http://docker", "suite": "bookworm", "components": ["stable"], "signed_by": None},
        {"uri": "http://mirror/debian", "suite": "trixie", "components": ["main"], "signed_by": None},
    ]
    text = mirror.own_sources(found, "bookworm", ["contrib", "main"])
    assert (
        text
        == "Types: deb\nURIs: http://mirror/debian\nSuites: bookworm\nComponents: main contrib\nSigned-By: /k.gpg\n"
    )
    assert mirror.own_sources(found, "sid") == ""


# The repository


def carried(tmp_path):
    """A folder with one package, and that as a file of the mirror."""
    built = tmp_path / "work/DEBIAN"
    built.mkdir(parents=True)
    (built / "control").write_text(
        "Package: carried\nVersion: 1:2-3\nArchitecture: all\nMaintainer: A <a@example.org>\nDescription: it\n more\n"
    )
    folder = tmp_path / "packages"
    folder.mkdir()
    name = "carried_2-3_all.deb"
    subprocess.run(
        ["dpkg-deb", "--build", "--root-owner-group", str(built.parent), str(folder / name)],
        check=True,
        capture_output=True,
    )
    raw = (folder / name).read_bytes()
    item = File(name, len(raw), hashlib.sha256(raw).hexdigest())
    return folder, item


def test_packages_and_release_are_what_apt_reads(tmp_path):
    """By apt itself: a flat repository of one package, read and resolved in a private root."""
    folder, item = carried(tmp_path)
    assert mirror_apt.write_repository(folder, DEBIAN, "amd64", [item])
    assert not mirror_apt.write_repository(folder, DEBIAN, "amd64", [item])
    apt = mirror_apt.PrivateApt(tmp_path / "root", DEBIAN, "amd64")
    apt.prepare([("carried", f"Types: deb\nURIs: file:{folder}/\nSuites: ./\nTrusted: yes\n")])
    apt.update()
    (found,) = apt.resolve(["carried=1:2-3"])
    assert (found.path, found.size, found.sha256) == (item.path, item.size, item.sha256)
    assert apt.available(["carr*"], []) == {"carried": [{"version": "1:2-3", "origin": "gpu_fleet"}]}
    assert [line for line in (folder / "Packages").read_text().splitlines() if line.startswith(" ")] == [" more"]
    with pytest.raises(MirrorError, match=r"apt finds no way to install absent.*Unable to locate package absent"):
        apt.resolve(["absent"])


def test_a_signed_repository_is_read_by_its_key_alone(tmp_path, monkeypatch):
    home = tmp_path / "g"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("GNUPGHOME", str(home))
    made = [
        "gpg",
        "--batch",
        "--quiet",
        "--passphrase",
        "",
        "--quick-gen-key",
        "fleet@example.org",
        "rsa2048",
        "sign",
        "never",
    ]
    subprocess.run(made, check=True, capture_output=True)
    folder, item = carried(tmp_path)
    mirror_apt.write_repository(folder, DEBIAN, "amd64", [item])
    with pytest.raises(MirrorError, match="mirror_sign_with nobody"):
        mirror_apt.sign(folder, "nobody")
    mirror_apt.sign(folder, "fleet@example.org")
    signed = (folder / "InRelease").read_bytes()
    mirror_apt.sign(folder, "fleet@example.org")
    assert (folder / "InRelease").read_bytes() == signed
    key = folder.parent / mirror_apt.KEY
    apt = mirror_apt.PrivateApt(tmp_path / "root", DEBIAN, "amd64")
    apt.prepare([("carried", f"Types: deb\nURIs: file:{folder}/\nSuites: ./\nSigned-By: {key}\n")])
    apt.update()
    assert [found.path for found in apt.resolve(["carried"])] == [item.path]
    (folder / "InRelease").write_bytes(signed.replace(b"Label: gpu", b"Label: GPU"))
    with pytest.raises(MirrorError, match="BADSIG"):
        apt.update()
    mirror_apt.sign(folder, "")
    assert not (folder / "InRelease").exists()
    subprocess.run(["gpgconf", "--kill", "all"], check=False, capture_output=True)


def test_a_source_that_does_not_answer_is_no_source_left_out(tmp_path):
    apt = mirror_apt.PrivateApt(tmp_path / "root", DEBIAN, "amd64")
    apt.prepare([("gone", f"Types: deb\nURIs: file:{tmp_path}/nowhere/\nSuites: ./\nTrusted: yes\n")])
    with pytest.raises(MirrorError, match=r"apt-get update for debian-12: .*nowhere"):
        apt.update()


def test_an_archive_whose_key_is_not_here_is_refused_by_name(tmp_path):
    apt = mirror_apt.PrivateApt(tmp_path / "root", Target("ubuntu-24.04", "x86_64"), "amd64")
    text = mirror.sources(apt.target, KNOWN["sources"]).replace("/usr/share/keyrings/", f"{tmp_path}/")
    with pytest.raises(MirrorError, match=r"ubuntu-24.04: this machine has no .*ubuntu-archive-keyring.gpg"):
        apt.prepare([("system", text)])


def test_what_came_other_than_announced_is_thrown_away(tmp_path):
    source = tmp_path / "a.deb"
    source.write_bytes(b"altered")
    apt = mirror_apt.PrivateApt(tmp_path / "root", DEBIAN, "amd64")
    item = File("a_1_all.deb", 7, "0" * 64, f"file:{source}")
    with pytest.raises(MirrorError, match=r"a_1_all.deb did not come as file:"):
        apt.fetch([item], tmp_path / "into", tmp_path / "work", lambda text: None)
    assert not list((tmp_path / "into").iterdir())
    assert not list((tmp_path / "work").iterdir())


# The driver


def test_the_drivers_packages_are_planned_for_every_kind_of_gpus():
    table = KNOWN["stand_for"]
    kinds = mirror.stand_ins({"source": "nvidia", "version": "580.126.20"}, table, "x86_64")
    assert [kind["name"] for kind in kinds] == ["plain", "switched", "nvlink5", "older"]
    assert [kind["facts"]["nvswitch"]["devices"] for kind in kinds] == [0, 4, 2, 0]
    nodes = {"source": "nvidia", "modules": "open", "imex_nodes": ["10.0.0.1"]}
    kinds = {kind["name"]: kind for kind in mirror.stand_ins(nodes, table, "aarch64")}
    assert set(kinds) == {"plain", "switched", "nvlink5", "rack"}
    assert kinds["rack"]["want"]["imex_nodes"] == ["10.0.0.1"]
    assert kinds["plain"]["want"]["imex_nodes"] == []
    assert kinds["plain"]["facts"]["machine"] == "aarch64"


# Checksums, space, words


def test_sha256sum_accepts_what_is_written(tmp_path):
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b/c").write_bytes(b"x")
    (tmp_path / "z").write_bytes(b"y")
    files = {name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in ("z", "a b/c")}
    (tmp_path / mirror.SUMS).write_text(mirror.sums(files))
    done = subprocess.run(
        ["sha256sum", "--strict", "-c", mirror.SUMS], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.splitlines()) == (0, ["a b/c: OK", "z: OK"])
    assert mirror.read_sums((tmp_path / mirror.SUMS).read_text()) == files
    with pytest.raises(MirrorError, match="rename the file"):
        mirror.sums({"a\nb": "0"})


def test_too_little_disk_is_refused_with_numbers():
    from ansible_collections.gpu_fleet.vllm.plugins.module_utils.models import size

    mirror.check_space("/f", {"wheels": 0}, 0, size)  # nothing has to come
    mirror.check_space("/f", {"wheels": 1 << 30}, (1 << 30) + mirror.RESERVE, size)
    with pytest.raises(
        MirrorError,
        match=r"/f: 3.0 GiB have to come \(wheels 1.0 GiB, models 2.0 GiB\), 3.0 GiB are free .* Nothing was fetched",
    ):
        mirror.check_space("/f", {"packages": 0, "wheels": 1 << 30, "models": 2 << 30}, 3 << 30, size)


def test_the_site_gets_its_variables():
    told = yaml.safe_load(mirror.use(["chat", "big"], {"big": "org/big at 0123"}, drivers=True))
    assert told["model_store_models"] == [
        {"name": "chat", "folder": "{{ fleet_carried }}/models/chat"},
        {"name": "big", "folder": "{{ fleet_carried }}/models/big"},
    ]
    assert told["gpu_driver_source"] == "mirror"
    assert told["package_source_only"] is True
    assert "gpu_driver_source" not in yaml.safe_load(mirror.use([], {}, drivers=False))


def test_every_variable_of_the_site_is_one_of_a_role():
    from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import data

    known = {name for role in data.role_names() for name in data.role_options(role)}
    assert set(yaml.safe_load(mirror.use(["a"], {}, drivers=True))) <= known


def test_a_summary_says_what_is_to_come_and_what_came():
    content = Content()
    content.files["wheels"] = [File("wheels/a", 10, "0"), File("wheels/b", 5, "1")]
    missing = content.files["wheels"][:1]
    assert mirror.summary(content, missing, str)[1] == "wheels: 2 files, 15; 1 of them, 10, are to come"
    assert mirror.summary(content, missing, str, fetched=True)[1] == "wheels: 2 files, 15; 1 of them, 10, came now"
    assert mirror.summary(content, [], str)[1] == "wheels: 2 files, 15"


# Which packages roles install


def test_no_role_installs_a_package_that_would_not_be_carried():
    """Every apt task of every role: names by word are in data/mirror.yml, names by variable are known to be planned elsewhere."""
    planned = {"__vllm_runtime_look.packages_missing"}  # versions.yml
    carried = {name for group in KNOWN["roles"].values() for name in group}
    seen = set()
    for path in sorted((REPOSITORY / "roles").glob("*/tasks/*.yml")):
        for task in _tasks(yaml.safe_load(path.read_text()) or []):
            names = (task.get("ansible.builtin.apt") or {}).get("name") or []
            for name in [names] if isinstance(names, str) else names:
                seen.add(name.strip("{} "))
    assert "nftables" in seen
    assert seen - planned <= carried


def _tasks(items):
    for item in items:
        yield item
        for key in ("block", "rescue", "always"):
            yield from _tasks(item.get(key) or [])


# A whole folder


@pytest.fixture
def fleet(tmp_path, monkeypatch):
    """A host's wheels and a model, made here, so that nothing leaves this machine; packages have their own tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "tiny/wheels"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    tiny.make(tmp_path / "tiny")
    model = tmp_path / "source"
    (model / "sub").mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "sub/model.safetensors").write_bytes(os.urandom(5000))
    host = Host("gpu-01", DEBIAN, str(tmp_path / "tiny/tiny.lock"))

    def run(folder=tmp_path / "carried", parts=("wheels", "models"), entries=None):
        entries = entries or [{"name": "mini", "folder": str(model)}]
        return fill.Mirror(fill.Wish(folder, parts=parts), [host], entries, False, str(tmp_path))

    return types.SimpleNamespace(run=run, folder=tmp_path / "carried", model=model, host=host)


def good(folder):
    done = subprocess.run(
        ["sha256sum", "--strict", "--quiet", "-c", "SHA256SUMS"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode == 0


def test_a_folder_is_filled_once_and_then_left_alone(fleet):
    run = fleet.run()
    assert run.fill(run.look())
    assert good(fleet.folder)
    listed = mirror.read_sums((fleet.folder / "SHA256SUMS").read_text())
    assert {"models/mini/config.json", "models/mini/sub/model.safetensors", "use.yml"} <= set(listed)
    assert len([path for path in listed if path.startswith("wheels/")]) == 3
    before = {path: path.stat().st_mtime_ns for path in fleet.folder.rglob("*") if path.name != ".lock"}
    again = fleet.run()
    assert again.look() == []
    assert not again.fill([])
    assert {path: path.stat().st_mtime_ns for path in fleet.folder.rglob("*") if path.name != ".lock"} == before


def test_what_hands_altered_comes_again_and_what_is_strange_stays(fleet):
    run = fleet.run()
    run.fill(run.look())
    weights = fleet.folder / "models/mini/sub/model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[7] ^= 1
    weights.write_bytes(bytes(raw))
    (fleet.folder / "models/mini/config.json").unlink()
    wheel = next((fleet.folder / "wheels").glob("torch-*.whl"))
    wheel.write_bytes(wheel.read_bytes()[:-1])
    (fleet.folder / "wheels/strange.whl").write_bytes(b"")
    again = fleet.run()
    missing = again.look()
    assert {item.path for item in missing} == {
        "models/mini/sub/model.safetensors", "models/mini/config.json", f"wheels/{wheel.name}",
    }  # fmt: skip
    assert again.fill(missing)
    assert good(fleet.folder)
    assert again.left_over() == ["wheels/strange.whl"]
    assert "strange" not in (fleet.folder / "SHA256SUMS").read_text()


def test_a_run_that_is_cut_off_leaves_no_proof_and_is_repaired(fleet, monkeypatch):
    run = fleet.run()
    run.fill(run.look())
    (fleet.model / "config.json").write_text('{"new": 1}')
    cut = fleet.run()
    monkeypatch.setattr(cut, "_fill_model", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        cut.fill(cut.look())
    assert not (fleet.folder / "SHA256SUMS").exists()
    (fleet.folder / "models/mini/sub/model.safetensors.part").write_bytes(b"half")
    again = fleet.run()
    missing = again.look()
    assert [item.path for item in missing] == ["models/mini/config.json"]
    again.fill(missing)
    assert good(fleet.folder)
    assert (fleet.folder / "models/mini/config.json").read_text() == '{"new": 1}'


def test_what_a_killed_run_left_fetching_is_waited_for(fleet, tmp_path):
    """A download that outlives its run has the lock of the folder, so that the next run does not write beside it."""
    run = fleet.run()
    run.apts[DEBIAN] = apt = mirror_apt.PrivateApt(tmp_path / "root", DEBIAN, "amd64")
    lock = tmp_path / ".lock"
    with run._turn(lock):
        _status, out, _err = apt.run(["ls", "-l", "/proc/self/fd"], 10)
    assert str(lock) in out
    assert str(lock) not in apt.run(["ls", "-l", "/proc/self/fd"], 10)[1]


def test_too_little_disk_refuses_before_anything_comes(fleet, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(total=1, used=0, free=1000))
    run = fleet.run()
    with pytest.raises(MirrorError, match="Nothing was fetched"):
        run.fill(run.look())
    assert not (fleet.folder / "models").exists()
    assert not (fleet.folder / "wheels").exists()


def test_one_part_alone_keeps_what_is_known_of_the_others(fleet):
    run = fleet.run()
    run.fill(run.look())
    listed = mirror.read_sums((fleet.folder / "SHA256SUMS").read_text())
    (fleet.model / "more.json").write_text("[]")
    alone = fleet.run(parts=("models",))
    alone.fill(alone.look())
    assert good(fleet.folder)
    now = mirror.read_sums((fleet.folder / "SHA256SUMS").read_text())
    assert set(now) == {*listed, "models/mini/more.json"}
    assert alone.left_over() == []


def test_pickles_are_not_carried_and_a_missing_folder_is_named(fleet):
    (fleet.model / "old.bin").write_bytes(b"x")
    run = fleet.run()
    assert not [item for item in run.look() if item.path.endswith(".bin")]
    assert "run code" in run.content.notes[0]
    with pytest.raises(MirrorError, match="model gone: the controller has no folder"):
        fleet.run(entries=[{"name": "gone", "folder": "nowhere"}]).look()


def test_a_model_of_a_hub_comes_whole_and_its_small_files_are_proved_by_the_hub(fleet, monkeypatch, tmp_path):
    from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import hub

    small = b"{}"
    remote = [
        hub.Remote("config.json", 2, None, hashlib.sha1(b"blob 2\0" + small, usedforsecurity=False).hexdigest()),
        hub.Remote("model.safetensors", 4, hashlib.sha256(b"wwww").hexdigest(), None),
    ]
    monkeypatch.setattr(hub, "contents", lambda *_: (remote, []))

    def fetch(name, repository, revision, allow_pickle, into):
        into.mkdir(parents=True, exist_ok=True)
        (into / "config.json").write_bytes(small)
        (into / "model.safetensors").write_bytes(b"wwww")

    monkeypatch.setattr(hub, "fetch", fetch)
    entries = [{"name": "chat", "hub": "org/chat", "revision": "a" * 40}]
    run = fleet.run(parts=("models",), entries=entries)
    assert run.fill(run.look())
    assert good(fleet.folder)
    assert "chat" in (fleet.folder / "use.yml").read_text()
    assert "# org/chat at aaaa" in (fleet.folder / "use.yml").read_text()
    (fleet.folder / "models/chat/config.json").write_bytes(b"[]")  # of the same size
    again = fleet.run(parts=("models",), entries=entries)
    assert [item.path for item in again.look()] == ["models/chat/config.json"]


def test_a_lock_that_is_not_there_is_named(fleet):
    fleet.host.lock = "/nowhere/vllm-9.9.lock"
    with pytest.raises(MirrorError, match=r"/nowhere/vllm-9.9.lock: .*docs/releases.md"):
        fleet.run().look()


def test_what_the_inventory_says_becomes_hosts(tmp_path):
    from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils.inventory import Inventory

    hostvars = {
        "gpu-01": {"fleet_system": "ubuntu-24.04", "vllm_runtime_accelerator": "cu130", "gpu_driver_source": "mirror", "gpu_driver_version": "580.126.20"},
        "cpu-01": {"vllm_runtime_accelerator": "cpu", "gpu_driver_source": "nvidia", "vllm_runtime_packages": ["libnuma1"]},
        "gpu-02": {"vllm_runtime_accelerator": "cu130", "vllm_runtime_packages_managed": False, "vllm_runtime_lock": "own.lock"},
    }  # fmt: skip
    groups = {"all": list(hostvars), "gpu_hosts": list(hostvars)}
    first, cpu, second = fill.hosts(Inventory(hostvars, groups), str(tmp_path))
    assert first.target == Target("ubuntu-24.04", "x86_64")
    assert first.lock.endswith("locks/vllm-0.26.0-cu130-py312-x86_64.lock")
    assert {"nftables", "python3-apt", "libnuma1", "g++"} <= set(first.packages)
    assert (first.driver["source"], first.driver["version"]) == ("mirror", "580.126.20")
    assert cpu.driver["source"] == "nvidia"
    assert cpu.packages[-1] == "libnuma1"
    assert second.driver == {}  # preinstalled, the default
    assert second.packages == ["python3-apt", "nftables"]
    assert second.lock == str(tmp_path / "own.lock")
    groups["gateways"] = ["gpu-01"]
    assert fill.hosts(Inventory(hostvars, groups), str(tmp_path))[2].packages == [
        "python3-apt",
        "nftables",
        "haproxy",
        "ca-certificates",
        "keepalived",
    ]
    groups["monitors"] = ["gpu-01"]
    assert {"haproxy", "prometheus"} <= set(fill.hosts(Inventory(hostvars, groups), str(tmp_path))[2].packages)


def test_a_key_is_proved_by_its_fingerprint(tmp_path):
    with pytest.raises(MirrorError, match="name the file that has it with mirror_driver_keyring"):
        mirror_apt.key(tmp_path, {"url": "http://x", "fingerprint": None}, "", "debian-13")
    (tmp_path / "no.gpg").write_bytes(b"hello")
    with pytest.raises(MirrorError, match="is no key"):
        mirror_apt.key(tmp_path, None, str(tmp_path / "no.gpg"), "debian-12")
    with pytest.raises(MirrorError, match="there is no file"):
        mirror_apt.key(tmp_path, None, str(tmp_path / "absent"), "debian-12")


def test_check_mode_plans_a_driver_with_the_lists_of_a_folder_that_is_not_sent_yet():
    from ansible_collections.gpu_fleet.vllm.plugins.module_utils import driver_scratch

    uri, path = "file:/var/lib/gpu_fleet/packages/x/", "/etc/apt/sources.list.d/gpu-fleet-driver.sources"
    text = f"Types: deb\nURIs: {uri}\nSuites: ./\nTrusted: yes\n"
    scratch = driver_scratch.Scratch()
    try:
        scratch.configure(
            files={path: text}, carried={"uri": uri, "packages": "Package: a\n", "release": "Origin: b\n"}
        )
        with open(scratch.path("sources.list.d/gpu-fleet-driver.sources"), encoding="utf-8") as handle:
            assert handle.read() == text.replace(uri, f"file:{scratch.path('carried')}/")
        with open(scratch.path("carried/Packages"), encoding="utf-8") as handle:
            assert handle.read() == "Package: a\n"
        scratch.configure(files={path: text})
        with open(scratch.path("sources.list.d/gpu-fleet-driver.sources"), encoding="utf-8") as handle:
            assert handle.read() == text
    finally:
        scratch.remove()


def test_the_command_line_says_what_the_playbook_found():
    sys.path.insert(0, str(REPOSITORY / "scripts"))
    from gpu_fleet import events, runs

    outcome = runs.FleetResult()
    told = {"summary": ["wheels: 3 files"], "notes": ["a note"], "left_over": ["wheels/x"], "changed": True}
    data = {"host": "gpu-01", "task": "Fetch", "res": told, "resolved_action": "gpu_fleet.vllm.mirror"}
    runs._read(outcome, events.read({"event": "runner_on_ok", "event_data": data}))
    assert outcome.summary == ["wheels: 3 files", "a note", "left over, needed by nothing and not touched: wheels/x"]
    assert outcome.differing == {"gpu-01": ["Fetch"]}


def test_the_playbook_says_no_word_twice(tmp_path):
    """A mistake is one message, not a traceback with a message in it."""
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(
        json.dumps(
            {"gpu_hosts": {"hosts": {"gpu-01": {"ansible_host": "10.9.9.9", "vllm_runtime_accelerator": "cpu"}}}}
        )
    )
    done = subprocess.run(
        [
            f"{os.path.dirname(sys.executable)}/ansible-playbook",
            "playbooks/mirror.yml",
            "-i",
            str(inventory),
            "-e",
            "mirror_folder=relative",
        ],
        cwd=REPOSITORY,
        env={**os.environ, "ANSIBLE_CONFIG": str(REPOSITORY / "ansible.cfg")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout.count("write it as an absolute path") == 1
    assert "exception" not in done.stdout.lower()
