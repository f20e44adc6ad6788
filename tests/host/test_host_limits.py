"""Limits are looked at on running processes: files alone prove nothing."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def user(host):
    """A service user, as role vllm_service will make it."""
    host.run_expect([0, 9], "useradd --system --user-group --shell /bin/sh vllm")  # 9: there already


def test_a_unit_gets_what_the_role_proved(host):
    host.run_expect(
        [0],
        "systemd-run --quiet --collect --service-type=oneshot --property=LimitNOFILE=16384 --property=LimitMEMLOCK=4194304 "
        "--property=StandardOutput=truncate:/run/limits.test cat /proc/self/limits",
    )
    said = {line.split("  ")[0]: line.split()[3:5] for line in host.check_output("cat /run/limits.test").splitlines()}
    assert said["Max open files"] == ["16384", "16384"]
    assert said["Max locked memory"] == ["4194304", "4194304"]


def test_a_login_of_the_service_user_gets_them_too(host, user):
    assert host.check_output("su - vllm -c 'ulimit -Hn; ulimit -Sn; ulimit -l'").split() == ["16384", "16384", "4096"]


def test_other_users_keep_theirs(host):
    assert host.check_output("su - nobody -s /bin/sh -c 'ulimit -Hn'") != "16384"


def test_the_kernel_parameter_is_set_now_and_at_boot(host):
    assert host.check_output("cat /proc/sys/net/core/somaxconn") == "8192"
    host.run_expect([0], "sysctl -w net.core.somaxconn=100")
    host.run_expect([0], "/lib/systemd/systemd-sysctl")
    assert host.check_output("cat /proc/sys/net/core/somaxconn") == "8192"


def test_files_are_roots_and_readable(host):
    for path in ("/etc/security/limits.d/60-gpu-fleet.conf", "/etc/sysctl.d/60-gpu-fleet-limits.conf"):
        file = host.file(path)
        assert (file.mode, file.user, file.group) == (0o644, "root", "root")


def test_nothing_is_left_of_the_proof(host):
    assert host.check_output("find /run -maxdepth 1 -name 'gpu-fleet-limits*'") == ""
    assert host.check_output("systemctl list-units --failed --plain --no-legend") == ""
