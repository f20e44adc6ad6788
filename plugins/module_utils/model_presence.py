# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Whether the files of a host's models are there, whole as far as their sizes tell. Nothing is read but the records of their arrival.

Role model_store keeps a record beside each model (models.py says where). A server that runs does not notice that files are gone; its
next start does. Standard library only, Python 3.9.
"""

from __future__ import annotations

import glob
import os
from typing import Dict, List

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import tree

RECORD = ".record.json"
MOST = 5  # faults of a model that are named, the rest is counted


def look(store: str) -> Dict[str, List[str]]:
    """Every model of a store that has a record, and what is wrong with it: sentences, none where it is whole."""
    found: Dict[str, List[str]] = {}
    for path in sorted(glob.glob(os.path.join(glob.escape(store), f".*{RECORD}"))):
        name = os.path.basename(path)[1 : -len(RECORD)]
        try:
            recorded = tree.load(path)
        except tree.TreeError:
            continue  # role model_store hashes anew where a record cannot be read
        if recorded:
            found[name] = _faults(os.path.join(store, name), recorded)
    return found


def _faults(folder: str, recorded: tree.Record) -> List[str]:
    if not os.path.isdir(folder):
        return [f"{folder} is not there"]
    faults = []
    for path, entry in sorted(recorded["files"].items()):
        try:
            size = os.lstat(os.path.join(folder, path)).st_size
        except FileNotFoundError:
            faults.append(f"{path} is not there")
            continue
        except OSError as error:
            faults.append(f"{path}: {error.strerror}")
            continue
        if "link" not in entry and size != entry["size"]:
            faults.append(f"{path} has {size} of {entry['size']} bytes")
    more = [f"and {len(faults) - MOST} more"] if len(faults) > MOST else []
    return faults[:MOST] + more
