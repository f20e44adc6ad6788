"""What role gpu_topology leaves behind: nothing."""

from __future__ import annotations

import os


def test_nothing_was_written_on_the_host(host):
    assert host.run("find /etc /opt /var/lib -name '*topology*' -newer /etc/machine-id").stdout == ""


def test_what_was_learned_is_on_the_controller(host_name):
    assert (
        host_name != "gpu-01"
        or os.environ.get("REPLAY") is None
        or os.path.exists(f"{os.environ['REPLAY']}/{host_name}.json")
    )
