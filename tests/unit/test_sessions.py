"""Which SSH session a process came by."""

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import sessions


@pytest.fixture
def processes(tmp_path):
    """Write {pid: (parent, environment)} as /proc shows it."""

    def make(table):
        for pid, (parent, environment) in table.items():
            folder = tmp_path / str(pid)
            folder.mkdir()
            (folder / "environ").write_bytes(environment)
            (folder / "stat").write_text(f"{pid} (a) b) S {parent} 1 1 0 -1")
        return str(tmp_path)

    return make


CAME = b"LANG=C\0SSH_CONNECTION=192.0.2.7 50000 192.0.2.1 2222\0"


def test_its_own_environment_says_it(processes):
    assert sessions.ssh_session(9, processes({9: (1, CAME)})) == ("192.0.2.7", 2222)


def test_behind_sudo_the_parents_do(processes):
    root = processes({9: (8, b"SUDO_USER=x\0"), 8: (7, b""), 7: (1, CAME)})
    assert sessions.ssh_session(9, root) == ("192.0.2.7", 2222)


@pytest.mark.parametrize("environment", [b"", b"SSH_CONNECTION=short\0"])
def test_without_ssh_there_is_none(processes, environment):
    assert sessions.ssh_session(9, processes({9: (1, environment)})) is None


def test_a_process_that_is_gone_has_none(tmp_path):
    assert sessions.ssh_session(9, str(tmp_path)) is None
