#!/usr/bin/python
"""Documentation of the action plugin of the same name; it runs on the controller, so this file does nothing."""

from __future__ import annotations

DOCUMENTATION = r"""
module: mirror
short_description: List or fetch everything that the fleet needs, for a site without a way out
description:
  - Reads from the inventory what its GPU hosts need, Debian packages, wheels and models, and says how much of it a folder has.
  - Unless in check mode it fetches the rest, and writes C(SHA256SUMS) once everything was found right. Nothing is fetched
    twice; what a run that was cut off left is continued; what is not right any more comes again.
  - Runs on the controller; no host is contacted. Use it with C(run_once).
author: The gpu_fleet authors
options:
  folder:
    description: Absolute path on the controller. Empty, nothing is fetched and everything is listed.
    type: path
    default: ""
  parts: {description: What to look after., type: list, elements: str, choices: [packages, wheels, models], default: [packages, wheels, models]}
  packages: {description: Packages of the systems that are wanted beside what the roles install., type: list, elements: str, default: []}
  kernels: {description: Kernels of the hosts whose headers are to come., type: list, elements: str, default: []}
  sources: {description: "Sources of a system, deb822, by its name such as C(debian-12).", type: dict, default: {}}
  sign_with: {description: Key of gpg that signs the repositories; empty for none., type: str, default: ""}
  driver_source: {description: Where the driver is fetched from., type: str, choices: ["", nvidia, distribution], default: ""}
  driver_repository: {description: Another address than NVIDIA's own., type: str, default: ""}
  driver_keyring: {description: File of the controller with that repository's key., type: path, default: ""}
attributes:
  check_mode: {description: Says what would be fetched., support: full}
  diff_mode: {description: Shows the files that are to come., support: full}
"""

EXAMPLES = r"""
- name: Fill a folder
  gpu_fleet.vllm.mirror:
    folder: /media/carried
  run_once: true
"""

RETURN = r"""
summary:
  description: One line a part, for people.
  returned: success
  type: list
  elements: str
notes:
  description: What is worth knowing, such as packages that no source offers.
  returned: success
  type: list
  elements: str
missing:
  description: Paths of the files that the folder did not have, or not as they should be.
  returned: success
  type: list
  elements: str
files:
  description: How many files the fleet needs.
  returned: success
  type: int
bytes:
  description: How much that is.
  returned: success
  type: int
left_over:
  description: Files of the folder that nothing needs. They are not touched.
  returned: success
  type: list
  elements: str
"""
