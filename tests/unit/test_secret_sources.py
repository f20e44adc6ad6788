"""Keys out of Ansible Vault and SOPS by their own lookups (docs/secrets.md): they are judged as keys, and no run shows one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from conftest import REPOSITORY

ANSIBLE = os.path.dirname(sys.executable)
GOOD, SHORT = "a-key-of-forty-characters-out-of-a-vault", "out-of-a-vault"
INVENTORY = """
all:
  children:
    gpu_hosts:
      hosts: {gpu-01: {ansible_host: 192.0.2.11}}
      vars:
        vllm_runtime_version: "0.32.0"
        vllm_runtime_accelerator: cpu
        vllm_services: [{name: chat, model: /srv/models/none}]
"""
# Stand-in for sops, made for a test: what the lookup asks it for its version, and to decrypt.
SOPS = """#!/bin/sh
case "$*" in *--version*) echo "sops 3.10.2";; *keys.sops.yml*) echo "chat: KEY";; *) exit 1;; esac
"""


def judged(folder, keys: str, secret: str) -> subprocess.CompletedProcess[str]:
    """playbooks/validate.yml on an inventory whose keys are given by an expression, as loud as Ansible gets."""
    (folder / "bin").mkdir()
    (folder / "bin" / "sops").write_text(SOPS.replace("KEY", secret))
    (folder / "bin" / "sops").chmod(0o755)
    (folder / "keys.sops.yml").touch()
    (folder / "password").write_text("secret\n")
    encrypted = subprocess.run(
        [
            f"{ANSIBLE}/ansible-vault",
            "encrypt_string",
            "--vault-password-file",
            "password",
            "--stdin-name",
            "vault_chat",
        ],
        cwd=folder,
        input=secret,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    (folder / "group_vars").mkdir()
    (folder / "group_vars" / "gpu_hosts.yml").write_text(f"{encrypted}\nvllm_service_api_keys: {keys}\n")
    (folder / "hosts.yml").write_text(INVENTORY)
    return subprocess.run(
        [
            f"{ANSIBLE}/ansible-playbook",
            str(REPOSITORY / "playbooks/validate.yml"),
            *("-i", str(folder / "hosts.yml"), "--vault-password-file", str(folder / "password"), "-vvv", "--diff"),
        ],
        env={
            **os.environ,
            "PATH": f"{folder}/bin:{os.environ['PATH']}",
            "ANSIBLE_CONFIG": str(REPOSITORY / "ansible.cfg"),
        },
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "keys",
    [
        '{chat: "{{ vault_chat }}"}',
        "\"{{ lookup('community.sops.sops', inventory_dir ~ '/keys.sops.yml') | from_yaml }}\"",
    ],
    ids=["ansible-vault", "sops"],
)
def test_a_key_comes_from_there_is_judged_and_shown_by_nobody(tmp_path, keys):
    (tmp_path / "good").mkdir()
    (tmp_path / "short").mkdir()
    run = judged(tmp_path / "good", keys, GOOD)
    assert run.returncode == 0, run.stdout[-2000:]
    assert GOOD not in run.stdout + run.stderr
    run = judged(tmp_path / "short", keys, SHORT)
    assert run.returncode != 0 and "its API key is too short" in " ".join(run.stdout.split())
    assert SHORT not in run.stdout + run.stderr
