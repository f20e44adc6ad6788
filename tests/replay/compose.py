#!/usr/bin/env python3
"""Write tests/unit/fixtures/hosts/h100x8.json: a healthy HGX H100 with eight GPUs, composed, not recorded.

From the recorded pair of H200s (tests/unit/fixtures/hosts/h200x2.json): the driver with its fields, tables and legend.
From public listings of such hosts: names, memory, PCI ids (2330, NVSwitch 22a3) and addresses of GPUs and NVSwitches,
and the shape of the matrix: eight times NV18, four NICs, two NUMA nodes. Made up so that the rest fits: the bridges
above the GPUs (root port, two ports of a switch), UUIDs, kernel, NICs' addresses.
"""

import json
from pathlib import Path

HOSTS = Path(__file__).resolve().parents[1] / "unit" / "fixtures" / "hosts"

DRIVER = "580.159.04"
KERNEL = "6.1.0-18-amd64"
GPU_BUSES = (0x18, 0x2A, 0x3A, 0x5D, 0x9A, 0xAB, 0xBA, 0xDB)
SWITCH_BUSES = (0x05, 0x06, 0x07, 0x08)
NIC_OF = {0: 0, 2: 1, 4: 2, 6: 3}  # GPU and the NIC behind the same switch
# Of a GPU (row) to the four NICs (column); of a NIC to the NICs.
TO_NICS = (
    ("PIX", "PHB", "SYS", "SYS"),
    ("PXB", "PHB", "SYS", "SYS"),
    ("PHB", "PIX", "SYS", "SYS"),
    ("PHB", "PXB", "SYS", "SYS"),
    ("SYS", "SYS", "PIX", "PHB"),
    ("SYS", "SYS", "PXB", "PHB"),
    ("SYS", "SYS", "PHB", "PIX"),
    ("SYS", "SYS", "PHB", "PXB"),
)


def matrix(legend):
    """`nvidia-smi topo -m` with NICs, in the recorded form."""
    head = [*(f"GPU{n}" for n in range(8)), *(f"NIC{n}" for n in range(4))]
    columns = "\t".join([*head, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])
    lines = ["\t\x1b[4m" + columns + "\x1b[0m"]
    for gpu in range(8):
        cells = [" X " if other == gpu else "NV18" for other in range(8)]
        affinity = ("0-59", "0") if gpu < 4 else ("60-119", "1")
        lines.append("\t".join([f"GPU{gpu}", *cells, *TO_NICS[gpu], *affinity, "", "N/A"]))
    for nic in range(4):
        to_gpus = [TO_NICS[gpu][nic] for gpu in range(8)]
        to_nics = [" X " if other == nic else "PHB" if other // 2 == nic // 2 else "SYS" for other in range(4)]
        lines.append("\t".join([f"NIC{nic}", *to_gpus, *to_nics, "", "", ""]))
    return [*lines, *legend, "", "NIC Legend:", "", *(f"  NIC{n}: mlx5_{n}" for n in range(4)), ""]


def p2p(legend):
    """`nvidia-smi topo -p2p`: every pair OK."""
    lines = [" \t\x1b[4m" + "".join(f"GPU{n}\t" for n in range(8)) + "\x1b[0m"]
    lines += [f" GPU{n}\t" + "".join("X\t" if other == n else "OK\t" for other in range(8)) for n in range(8)]
    return lines + legend


def device(files, place, address, **about):
    """A PCI device: its folder, and the link to it in sys/bus/pci/devices."""
    files[f"sys/bus/pci/devices/{address}"] = {"link": f"../../../{place.removeprefix('sys/')}/{address}"}
    for name, text in about.items():
        files[f"{place}/{address}/{name}"] = f"{text}\n"
    return f"{place}/{address}"


def files():
    """sysfs, procfs and what else lies on the host."""
    made = {
        "proc/driver/nvidia/version": f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {DRIVER}  Release Build  (build)\n",
        "proc/modules": "nvidia_uvm 1830912 0 - Live 0x0000000000000000 (O)\nnvidia 14299136 9 - Live 0x0000000000000000 (O)\n",
        "proc/sys/kernel/osrelease": f"{KERNEL}\n",
        f"lib/modules/{KERNEL}/build": {"folder": True},
        "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c": {"base64": "BgAAAAA="},
    }
    for number, bus in enumerate(SWITCH_BUSES):
        address = f"0000:{bus:02x}:00.0"
        about = {"vendor": "0x10de", "device": "0x22a3", "class": "0x068000", "numa_node": 0}
        device(made, f"sys/devices/pci0000:00/0000:00:01.{number}", address, **about)
        made[f"proc/driver/nvidia-nvswitch/devices/{address}"] = {"folder": True}
    for number, bus in enumerate(GPU_BUSES):
        node = number // 4
        port = device(made, f"sys/devices/pci0000:{bus - 3:02x}", f"0000:{bus - 3:02x}:01.0")
        up = device(made, port, f"0000:{bus - 2:02x}:00.0")
        down = device(made, up, f"0000:{bus - 1:02x}:00.0")
        for bridge in (port, up, down):
            made[f"{bridge}/config"] = {"config": []}
        about = {"vendor": "0x10de", "device": "0x2330", "class": "0x030200", "numa_node": node}
        gpu = device(made, down, f"0000:{bus:02x}:00.0", **about)
        depth = "../" * (gpu.count("/"))
        made[f"{gpu}/driver"] = {"link": f"{depth}bus/pci/drivers/nvidia"}
        made[f"{gpu}/iommu_group"] = {"link": f"{depth}kernel/iommu_groups/{number}"}
        made[f"sys/kernel/iommu_groups/{number}/type"] = "identity\n"
        if number in NIC_OF:
            other = device(made, up, f"0000:{bus - 1:02x}:01.0")
            about = {"vendor": "0x15b3", "device": "0x1021", "class": "0x020700", "numa_node": node}
            nic = device(made, other, f"0000:{bus + 1:02x}:00.0", **about)
            made[f"{nic}/net/ibs{NIC_OF[number]}"] = {"folder": True}
            made[f"sys/class/infiniband/mlx5_{NIC_OF[number]}/device"] = {
                "link": f"../../../{nic.removeprefix('sys/')}"
            }
    return made


def compose(pair):
    """The recording, from that of the pair."""
    smi = pair["nvidia_smi"]
    legend = smi["calls"]["topo -m"]
    p2p_table = p2p(smi["calls"]["topo -p2p r"][3:])
    gpus = []
    for number, bus in enumerate(GPU_BUSES):
        fields = {
            **smi["gpus"][0]["fields"],
            "index": str(number),
            "name": "NVIDIA H100 80GB HBM3",
            "uuid": f"GPU-{number:08x}-0000-4000-8001-000000000000",
            "pci.bus_id": f"00000000:{bus:02X}:00.0",
            "memory.total": "81559",
            "driver_version": DRIVER,
            "pcie.link.gen.hostmax": "5",
        }
        del fields["memory.free"]
        gpus.append({"fields": fields, "nvlinks": smi["gpus"][0]["nvlinks"]})
    return {
        "about": "HGX H100 with eight GPUs, composed from public listings, not recorded",
        "nvidia_smi": {
            "fields": smi["fields"],
            "gpus": gpus,
            "apps": [],
            "calls": {
                "topo -m": matrix(legend[legend.index("") :]),
                **{f"topo -p2p {letter}": p2p_table for letter in "rwn"},
                "-q -d COMPUTE": smi["calls"]["-q -d COMPUTE"],
            },
        },
        "commands": {
            "uname -m": "x86_64\n",
            "getconf GNU_LIBC_VERSION": "glibc 2.36\n",
            "/usr/bin/python3 --version": "Python 3.11.2\n",
            "modinfo -F version nvidia": f"{DRIVER}\n",
            "nv-fabricmanager --version": f"Fabric Manager version is : {DRIVER}\n",
            "systemctl show nvidia-fabricmanager.service -p LoadState,ActiveState": [
                "LoadState=loaded",
                "ActiveState=active",
            ],
            "journalctl -k -b -o cat --no-pager -g NVRM: Xid": {"rc": 1},
            "dmesg": "",
        },
        "files": files(),
    }


if __name__ == "__main__":
    recorded = json.loads((HOSTS / "h200x2.json").read_text(encoding="utf-8"))
    (HOSTS / "h100x8.json").write_text(json.dumps(compose(recorded), indent=1) + "\n", encoding="utf-8")
