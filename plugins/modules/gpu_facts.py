#!/usr/bin/python
# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What a host says about its GPUs, its driver and what lies between."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_facts
short_description: GPUs, links, driver and PCI tree of a host, without judgement
version_added: 0.1.0
description:
  - Looks at the GPUs of a host and at what decides whether they work together. Changes nothing, returns no facts by itself.
  - Asks NVML where nvidia-ml-py is in the Python that the module runs with, C(nvidia-smi) otherwise; C(amd-smi) or C(rocm-smi) on AMD
    hosts; sysfs and procfs for the rest. Each command has 20 seconds, so that a GPU that hangs does not hang the play.
  - A host without GPUs, and one whose tools are missing or fail, is an answer, not a failure.
  - What only root may read is null for others, and told in RV(unread).
author: The gpu_fleet authors (@gpu-fleet)
options:
  source:
    description:
      - Who is asked about NVIDIA GPUs. V(auto) is NVML where it answers and C(nvidia-smi) otherwise.
      - The topology tables are always those of C(nvidia-smi).
    type: str
    choices: [auto, nvml, nvidia-smi]
    default: auto
  root:
    description:
      - Where sysfs, procfs and C(/etc) are looked for. Another folder than V(/) holds the files of a recorded host, and the facts
        are that host's; commands, C(nvidia-smi) among them, are still those of this one.
    type: path
    default: /
attributes:
  check_mode: {support: full, description: Only looks.}
  diff_mode: {support: none, description: Changes nothing.}
"""

EXAMPLES = r"""
- name: Ask the host about its GPUs
  gpu_fleet.vllm.gpu_facts:
  become: true
  register: gpu
"""

RETURN = r"""
root:
  description: Where was looked; another folder than V(/) means that this is the replay of a recording.
  type: str
  returned: success
vendor:
  description: V(nvidia), V(amd) or V(none); what the PCI bus says, with or without a driver.
  type: str
  returned: success
source:
  description: Who answered for RV(gpus), C(nvml), C(nvidia-smi), C(amd-smi) or C(rocm-smi); null when nobody did.
  type: str
  returned: success
error:
  description: The tool's own words when it is there and fails; null otherwise.
  type: str
  returned: success
  sample: "Failed to initialize NVML: Driver/library version mismatch; NVML library version: 580.178"
pci_gpus:
  description: Display controllers and accelerators of NVIDIA and AMD on the PCI bus; C(driver) is the bound kernel driver or null.
  type: list
  elements: dict
  returned: success
  sample: [{address: "0000:00:06.0", vendor_id: "10de", device_id: "2335", driver: nvidia}]
gpus:
  description: The GPUs, in the order of the tool's index. A null is not supported by the GPU, or not told.
  type: list
  elements: dict
  returned: success
  contains:
    index: {description: The tool's number., type: int}
    name: {description: Product name., type: str}
    uuid: {description: Identifier of this very card., type: str}
    pci_address: {description: As sysfs writes it., type: str, sample: "0000:00:06.0"}
    memory_mib: {description: Memory in MiB., type: int}
    compute_capability: {description: CUDA compute capability., type: str, sample: "9.0"}
    driver: {description: Bound kernel driver., type: str}
    mig: {description: "C(current) and C(pending): Enabled, Disabled or null.", type: dict}
    persistence: {description: Whether the driver keeps the GPU initialised without a client., type: bool}
    ecc:
      description: C(mode), and errors counted as C(uncorrected_volatile) and C(corrected_volatile) since the driver was loaded, and as
        C(uncorrected_aggregate) over the card's life.
      type: dict
    remapped_rows: {description: "Memory rows: C(uncorrectable) counts, C(pending) and C(failure) are bool.", type: dict}
    retired_pages_pending: {description: Whether memory pages wait for retirement (cards before Ampere)., type: bool}
    pcie:
      description: Generation as C(gen_current), C(gen_gpumax) and C(gen_hostmax), lanes as C(width_current) and C(width_max). The current
        generation falls while the GPU idles.
      type: dict
    numa_node: {description: Node of the PCI device; null when the firmware names none., type: int}
    fabric: {description: "C(state), C(status) and C(health) of the NVLink fabric, in nvidia-smi's words.", type: dict}
    processes:
      description: Compute processes on the GPU with C(pid), C(name), C(memory_mib) and C(unit), the systemd unit they are in or null.
      type: list
      elements: dict
    nvlinks: {description: "GB/s of each link by number, null for an inactive one; empty when none is active.", type: list, elements: float}
    bridges:
      description: PCI bridges above the GPU, nearest first, with C(address) and C(acs), the bits that are set in the ACS control register;
        null when it has no such register or it is not readable.
      type: list
      elements: dict
      sample: [{address: "0000:00:01.0", acs: [SrcValid, ReqRedir]}]
driver:
  description: C(loaded) is the running kernel module's version, C(installed) that of the module on disk, C(flavour) open or proprietary,
    C(cuda) the newest CUDA that the driver supports.
  type: dict
  returned: success
  sample: {loaded: "580.159.04", installed: "580.159.04", flavour: open, cuda: "13.0"}
nvswitch:
  description: NVSwitches that the host sees as PCI devices (C(devices)). Those of HGX B200 and newer are not among them.
  type: dict
  returned: success
  sample: {devices: 4}
fabric_manager:
  description: C(installed) is the program's version; C(state) is systemd's word for its unit, or C(absent), or null when nobody could tell.
  type: dict
  returned: success
  sample: {installed: "580.159.04", state: active}
iommu:
  description: C(groups) counts; C(passthrough) is true when the groups of the GPUs have an identity domain, null without any.
  type: dict
  returned: success
  sample: {groups: 0, passthrough: null}
xid:
  description: Errors that the NVIDIA driver wrote to the kernel log since boot, the last 100 at most.
  type: list
  elements: dict
  returned: success
  sample: [{address: "0000:00:06.0", code: 79, line: "NVRM: Xid (PCI:0000:00:06): 79, GPU has fallen off the bus."}]
nouveau:
  description: Whether the kernel module nouveau is loaded.
  type: bool
  returned: success
secure_boot:
  description: Whether Secure Boot is on; null on a host that did not boot through EFI.
  type: bool
  returned: success
kernel:
  description: C(release) of the running kernel, and C(headers), whether what a driver is built against lies there.
  type: dict
  returned: success
  sample: {release: 6.1.0-18-amd64, headers: true}
glibc:
  description: Version of the C library.
  type: str
  returned: success
  sample: "2.36"
python:
  description: Minor version of /usr/bin/python3.
  type: str
  returned: success
  sample: "3.11"
machine:
  description: The architecture, as uname says it.
  type: str
  returned: success
  sample: x86_64
topology:
  description: Raw text of C(nvidia-smi topo -m) as C(matrix), and of C(topo -p2p r), C(w) and C(n) as C(read), C(write) and C(nvlink) of
    C(p2p); on AMD hosts C(matrix) is what C(amd-smi topology) or C(rocm-smi --showtopo) prints. null when not told.
  type: dict
  returned: success
nics:
  description: RDMA devices with their network interface.
  type: list
  elements: dict
  returned: success
  sample: [{name: mlx5_0, netdev: eth1, pci_address: "0000:01:00.0", numa_node: 0}]
unread:
  description: What was asked and not told, with the reason in the tool's own words.
  type: list
  elements: dict
  returned: success
  sample: [{what: fabric.state, why: "Field \"fabric.state\" is not a valid field to query."}]
seconds:
  description: How long the look took.
  type: float
  returned: success
  sample: 0.4
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import gpu_facts


def main():
    """Look, and return."""
    sources = ["auto", "nvml", "nvidia-smi"]
    module = AnsibleModule(
        argument_spec={
            "source": {"type": "str", "choices": sources, "default": "auto"},
            "root": {"type": "path", "default": "/"},
        },
        supports_check_mode=True,
    )
    try:
        import pynvml
    except Exception:  # a pynvml that does not load is none, whatever it raises
        pynvml = None
    root, source = module.params["root"], module.params["source"]
    module.exit_json(
        changed=False,
        root=root,
        **gpu_facts.gather(gpu_facts.command, root=root, nvml=pynvml, source=source),
    )


if __name__ == "__main__":
    main()
