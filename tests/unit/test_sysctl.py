"""Kernel parameters: what a file says, and who would override it at the next boot."""

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import sysctl

RANGE = {"net.ipv4.ip_local_port_range": "40000 60999"}


def test_values_are_compared_without_regard_to_spaces():
    assert sysctl.normal_value("40000\t60999\n") == sysctl.normal_value(" 40000 60999") == "40000 60999"


@pytest.mark.parametrize(
    ("written", "normal", "path"),
    [
        ("net.ipv4.ip_forward", "net.ipv4.ip_forward", "/proc/sys/net/ipv4/ip_forward"),
        ("net/ipv4/ip_forward", "net.ipv4.ip_forward", "/proc/sys/net/ipv4/ip_forward"),
        (
            "net/ipv4/conf/eth0.100/forwarding",
            "net.ipv4.conf.eth0/100.forwarding",
            "/proc/sys/net/ipv4/conf/eth0.100/forwarding",
        ),
    ],
)
def test_both_ways_to_write_a_name_mean_one_file(written, normal, path):
    assert sysctl.normal_name(written) == normal
    assert sysctl.proc_path(normal) == path


def test_rendered_file_reads_back():
    text = sysctl.render(RANGE, "Made by a test.\nTwo lines.")
    assert text == "# Made by a test.\n# Two lines.\nnet.ipv4.ip_local_port_range = 40000 60999\n"
    assert sysctl.assignments(text) == RANGE


def test_only_assignments_count():
    text = "# a=1\n; b=2\n\nno value\n-c.d = 3\ne/f=4\n"
    assert sysctl.assignments(text) == {"c.d": "3", "e.f": "4"}


@pytest.fixture
def folders(tmp_path):
    etc, usr = tmp_path / "etc", tmp_path / "usr"
    etc.mkdir()
    usr.mkdir()
    return etc, usr


def test_a_later_file_that_says_otherwise_is_named(folders):
    etc, usr = folders
    (usr / "99-later.conf").write_text("net/ipv4/ip_local_port_range = 1024\t65535\n")
    (etc / "10-earlier.conf").write_text("net.ipv4.ip_local_port_range = 1 2\n")
    (etc / "99-same.conf").write_text("net.ipv4.ip_local_port_range=40000 60999\n")
    mine = str(etc / "60-mine.conf")
    (found,) = sysctl.overridden(mine, RANGE, (str(etc), str(usr)))
    assert found == f"{usr}/99-later.conf sets net.ipv4.ip_local_port_range = 1024 65535 and is read after {mine}"


def test_a_file_masked_by_one_of_its_name_does_not_count(folders):
    etc, usr = folders
    (usr / "99-later.conf").write_text("net.ipv4.ip_local_port_range = 1024 65535\n")
    (etc / "99-later.conf").symlink_to("/dev/null")
    assert sysctl.overridden(str(etc / "60-mine.conf"), RANGE, (str(etc), str(usr))) == []


def test_present_value_and_unknown_parameter(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_text("1\t2\n")
    assert sysctl.present("a.b", str(tmp_path)) == "1 2"
    assert sysctl.present("a.c", str(tmp_path)) is None
