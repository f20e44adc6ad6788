"""The lab's decisions that need no root and no host."""

from __future__ import annotations

import ipaddress
import re
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "molecule" / "shared"), str(ROOT / "scripts")]

from gpufleet_lab import cgroups, cli, hosts, labs, machine, network  # noqa: E402
from gpufleet_lab.errors import LabError, UsageError  # noqa: E402
from gpufleet_lab.names import LabNames, check_host_name  # noqa: E402
from gpufleet_lab.state import Bind, Lab  # noqa: E402

LAB = Lab("demo-abc123", "demo", "/somewhere", "bookworm", "10.213.5.0/24", True, ("gpu-01", "gpu-02"))


# -- names ----------------------------------------------------------------------------------------------------------------


def test_a_bridge_name_fits_into_a_network_interface_name():
    names = LabNames.of("a" * 40, Path("/a/very/long/path/" + "x" * 200))
    assert len(names.bridge) <= 15
    assert names.bridge.startswith("gpufleet")


def test_a_bridge_has_an_address_of_its_own():
    one, other = LabNames.of("demo", Path("/one")), LabNames.of("demo", Path("/other"))
    assert re.fullmatch(r"02(:[0-9a-f]{2}){5}", one.bridge_address)  # locally administered, not multicast
    assert one.bridge_address != other.bridge_address


def test_two_clones_have_labs_of_their_own():
    one, other = LabNames.of("demo", Path("/one")), LabNames.of("demo", Path("/other"))
    assert one.lab_id != other.lab_id
    assert one.bridge != other.bridge
    assert one.table != other.table
    assert one.machine("gpu-01") != other.machine("gpu-01")


@pytest.mark.parametrize("name", ["", "Demo", "../etc", "a b", "-x", "x" * 41, "locks/.."])
def test_a_name_that_would_be_no_folder_of_ours_is_refused(name):
    with pytest.raises(UsageError, match="no name for a lab"):
        LabNames.of(name, Path("/one"))


@pytest.mark.parametrize("host", ["GPU", "gpu_01", "-gpu", "gpu-", "a/b", ""])
def test_a_host_name_that_dns_would_refuse_is_refused(host):
    with pytest.raises(UsageError, match="no host name"):
        check_host_name(host)


# -- network --------------------------------------------------------------------------------------------------------------


def test_a_network_in_use_is_not_taken():
    first = network.choose("0000000", [])
    second = network.choose("0000000", [first])
    assert not first.overlaps(second)
    assert second.prefixlen == 24


def test_the_whole_of_10_in_use_leaves_172():
    assert str(network.choose("0000000", [ipaddress.IPv4Network("10.0.0.0/8")])).startswith("172.27.")


def test_no_network_left_says_so():
    everything = [ipaddress.IPv4Network("0.0.0.0/0")]
    with pytest.raises(LabError, match="no free /24"):
        network.choose("0000000", everything)


def test_addresses_follow_the_order_of_the_hosts():
    assert LAB.gateway == "10.213.5.1"
    assert [LAB.address(host) for host in LAB.hosts] == ["10.213.5.11", "10.213.5.12"]


def test_a_lab_without_nat_drops_what_would_be_forwarded():
    closed = Lab(**{**LAB.__dict__, "nat": False})
    assert "masquerade" in network.ruleset(LAB)
    assert "masquerade" not in network.ruleset(closed)
    assert f'iifname "{LAB.names.bridge}" oifname != "{LAB.names.bridge}" drop' in network.ruleset(closed)


# -- what the machine is told -----------------------------------------------------------------------------------------------

DEB822 = """\
# a comment
Types: deb deb-src
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates bookworm-backports
Components: main contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: https://vendor.example/apt
Suites: bookworm
Components: stable

Enabled: no
Types: deb
URIs: http://off.example/debian
Suites: bookworm
Components: main
"""


def entries(tmp_path: Path) -> list[dict[str, str]]:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d" / "debian.sources").write_text(DEB822)
    (tmp_path / "sources.list").write_text(
        "deb [signed-by=/etc/apt/keyrings/corp.gpg] http://mirror.example/security bookworm-security main\n# deb http://x y main\n"
    )
    return machine._entries(tmp_path)


def test_debians_own_sources_are_taken_and_no_others(tmp_path):
    kept = machine.for_suite(entries(tmp_path), "bookworm", "bookworm")
    assert [entry["URIs"] for entry in kept] == ["http://mirror.example/security", "http://mirror.example/debian"]
    assert kept[1]["Suites"] == "bookworm bookworm-updates"
    assert kept[1]["Types"] == "deb"
    assert kept[0]["Signed-By"] == "/etc/apt/keyrings/corp.gpg"


def test_another_release_comes_from_the_same_mirrors(tmp_path):
    kept = machine.for_suite(entries(tmp_path), "bookworm", "trixie")
    assert [entry["Suites"] for entry in kept] == ["trixie-security", "trixie trixie-updates"]


def test_a_key_inside_the_source_survives():
    key = "Types: deb\nSigned-By:\n -----BEGIN PGP\n .\n abc\nURIs: http://m\n"
    assert machine.stanzas(key)[0]["Signed-By"] == "\n -----BEGIN PGP\n .\n abc"


# -- cgroups ----------------------------------------------------------------------------------------------------------------


def test_all_hierarchies_are_found_and_nothing_else(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n"
        "cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n"
        "cgroup2 /var/lib/machines/x/sys/fs/cgroup cgroup2 rw 0 0\n"
        "tmpfs /sys/fs/cgroup tmpfs rw 0 0\n"
    )
    assert cgroups.hierarchies(str(mounts)) == {
        Path("/sys/fs/cgroup/memory"): "cgroup",
        Path("/sys/fs/cgroup/unified"): "cgroup2",
    }


@pytest.fixture
def trees(tmp_path, monkeypatch):
    """Two hierarchies, as the kernel would show them: one of version 1, one of version 2."""
    found = {tmp_path / "one": "cgroup", tmp_path / "two": "cgroup2"}

    def made(root, kind, group):
        folder = root
        for part in Path(group).parts:
            folder = folder / part
            folder.mkdir(parents=True, exist_ok=True)
            name, usual, _ = cgroups.WEIGHTS[kind]
            if not (folder / name).exists():
                (folder / name).write_text(str(usual))
        return folder

    monkeypatch.setattr(cgroups, "hierarchies", lambda: found)
    monkeypatch.setattr(cgroups, "_make", made)
    return lambda group: [
        int((root / group / cgroups.WEIGHTS[kind][0]).read_text()) / cgroups.WEIGHTS[kind][1]
        for root, kind in found.items()
    ]


def test_each_host_weighs_as_a_machine_and_a_lab_as_its_hosts(trees):
    cgroups.enter("gpufleet/a/supervisors")
    cgroups.enter("gpufleet/a/gpu-01", 4)
    cgroups.enter("gpufleet/a/gpu-02", 4)
    cgroups.enter("gpufleet/b/gpu-01", 8)
    assert [trees(f"gpufleet/{group}") for group in ("a/gpu-01", "a", "b", ".")] == [[4, 4], [9, 9], [8, 8], [17, 17]]


def test_what_is_gone_weighs_nothing(trees, tmp_path):
    for host in ("gpu-01", "gpu-02"):
        cgroups.enter(f"gpufleet/a/{host}", 4)
    for root, name in (("one", "cpu.shares"), ("two", "cpu.weight")):
        folder = tmp_path / root / "gpufleet/a/gpu-02"
        (folder / name).unlink()
        (folder / "cgroup.procs").unlink()  # a real group's files go with it
    cgroups.remove("gpufleet/a/gpu-02")
    assert trees("gpufleet/a") == trees("gpufleet") == [4, 4]


def test_no_weight_is_more_than_the_kernel_takes(trees):
    for number in range(70):
        cgroups.enter(f"gpufleet/a/gpu-{number}", 4)
    assert trees("gpufleet/a") == [256, 100]


def test_a_weight_that_is_none_is_refused(monkeypatch):
    monkeypatch.delenv("LAB_WEIGHT", raising=False)
    assert hosts.weight() == 4
    monkeypatch.setenv("LAB_WEIGHT", "8")
    assert hosts.weight() == 8
    for wrong in ("0", "-1", "much", "101"):
        monkeypatch.setenv("LAB_WEIGHT", wrong)
        with pytest.raises(UsageError, match="LAB_WEIGHT"):
            hosts.weight()


# -- the command line -------------------------------------------------------------------------------------------------------


def test_without_root_one_line_says_so(monkeypatch, capsys):
    monkeypatch.setattr(labs.os, "geteuid", lambda: 1000)
    assert cli.main(["up", "x", "--host", "gpu-01"]) == 2
    said = capsys.readouterr().err.strip()
    assert "needs root" in said
    assert "\n" not in said


def test_a_missing_tool_is_named_with_its_package(monkeypatch, capsys):
    monkeypatch.setattr(labs.os, "geteuid", lambda: 0)
    monkeypatch.setattr(
        labs.shutil, "which", lambda tool, path: None if tool == "systemd-nspawn" else f"/usr/bin/{tool}"
    )
    assert cli.main(["up", "x", "--host", "gpu-01"]) == 2
    said = capsys.readouterr().err.strip()
    assert "systemd-nspawn" in said
    assert "systemd-container" in said
    assert "\n" not in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["up", "x", "--host", "gpu-01", "--host", "gpu-01"],
        ["up", "x", "--host", "GPU 1"],
        ["down"],
        ["down", "x", "--all"],
        ["exec", "no-such-lab", "gpu-01", "--", "true"],
    ],
)
def test_used_wrongly_is_exit_status_2(arguments):
    assert cli.main(arguments) == 2


def test_a_bind_needs_two_absolute_paths():
    assert cli._bind("/a/b:/srv/x:ro") == Bind("/a/b", "/srv/x")
    with pytest.raises(cli.argparse.ArgumentTypeError):
        cli._bind("a:/b")


def test_the_inventory_is_yaml_ansible_can_read():
    read = yaml.safe_load(labs.inventory(LAB))["all"]
    assert read["hosts"]["gpu-02"]["ansible_host"] == "10.213.5.12"
    assert read["hosts"]["gpu-02"]["fleet_address"] == "10.213.5.12"
    assert read["vars"]["fleet_system"] == "debian-12"
    assert "StrictHostKeyChecking=yes" in read["vars"]["ansible_ssh_common_args"]
