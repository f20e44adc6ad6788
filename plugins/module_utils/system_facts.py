# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What the roles have to know of a host before anything is done there: its system, and what role package_source left.

Pure: standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

import os
import stat
from typing import Dict, List, Sequence

OS_RELEASE = "/etc/os-release"


def distribution_name(os_release: str, guess: str) -> str:
    """The system's name as module setup tells it of Debian, Ubuntu and what is made of these; of others the guess.

    As parse_distribution_file_Debian in ansible/module_utils/facts/system/distribution.py (ansible-core 2.18) has it: that
    a Raspbian counts as Debian stands in the text alone.
    """
    if "Debian" in os_release or "Raspbian" in os_release:
        return "Debian"
    return "Ubuntu" if "Ubuntu" in os_release else guess


def facts(os_release: str, guess: str, version: str, nodename: str) -> Dict[str, str]:
    """Facts under the names that module setup gives them. guess, version: of ansible.module_utils.common.sys_info."""
    version = version or "NA"
    return {
        "ansible_distribution": distribution_name(os_release, guess or "NA"),
        "ansible_distribution_version": version,
        "ansible_distribution_major_version": version.split(".")[0] or "NA",
        "ansible_nodename": nodename,
    }


def package_source_left(file: str, silence: str, aside: str, folders: Sequence[str]) -> List[str]:
    """What role package_source left in these folders: files of its own, and files of others that it set aside."""
    own = {os.path.basename(file), os.path.basename(silence)}
    return [
        os.path.join(folder, name)
        for folder in folders
        for name in sorted(_names(folder))
        if (name in own or name.endswith(aside)) and not name.startswith(".") and _plain(os.path.join(folder, name))
    ]


def _names(folder: str) -> List[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _plain(path: str) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False
