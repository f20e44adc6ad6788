# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What one question about a host's driver is about, and the shape of the answer (driver_plan.py asks it).

Pure: standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Dict, List, Mapping, Optional

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import driver_packages as names
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.findings import Finding

SOURCES = ("nvidia", "distribution", "mirror", "preinstalled")
NVIDIA = "10de"  # vendor id on the PCI bus
# What `host` may hold, and what stands for it when it is not told.
HOST: Dict[str, Any] = {
    "system": None,  # debian-12, debian-13, ubuntu-22.04, ubuntu-24.04
    "kernels": {},  # every kernel that can be booted: {release: {headers: bool}}
    "packages": {},  # installed: {name: {version, origin (Origin of the source that offers it, None for none), hold: bool}}
    "available": None,  # after apt-get update: {name: [{version, origin}, ...]}, newest first; None: not looked yet
    "sources": [],  # every enabled one: {file, uri, suite, signed_by or None}
    "secure_boot": None,  # output of `mokutil --sb-state`; None: no such command, the fact of gpu_facts counts
    "key_enrolled": None,  # whether DKMS's key is in the firmware's list (mokutil --test-key); None: not known
    "dkms_key": None,  # the certificate that DKMS signs with: {path, there: whether it is there yet}; None: not looked
    "nvlink5": False,  # the VPD of an InfiniBand device says SW_MNG
    "modules": None,  # {name: bool}, whether the running kernel has ib_umad and mlx5_ib; None: not looked
    "units": [],  # active units
    "nouveau_in_initramfs": None,
    "runfile": False,  # /usr/bin/nvidia-uninstall is there
    "compat": [],  # cuda-compat folders on the loader's path
    "audit": "",  # output of `dpkg --audit`
    "unsettled": {},  # what dpkg left half done: {name: state}
    "interrupted": False,  # whether dpkg was stopped while it wrote its status
    "mark": None,  # what an unfinished run of the role left: {packages: {name: version}, stopped: [units]}
    "dkms": None,  # output of `dkms status`; None: not looked
    "kernel": None,  # the running one; None: not looked
    "files": None,  # what the role writes (PATHS), as it is: {path: text, None where there is none}; None: not looked
    "params": {},  # /proc/driver/nvidia/params: {name: value}, of the driver that is loaded
}
# What the role writes, by kind as in DriverPlan.files.
PATHS: Dict[str, str] = {
    "source": "/etc/apt/sources.list.d/gpu-fleet-driver.sources",
    "preferences": "/etc/apt/preferences.d/gpu-fleet-driver",
    "blocklist": "/etc/apt/apt.conf.d/52gpu-fleet-driver",  # after unattended-upgrades' own 50unattended-upgrades
    "modprobe": "/etc/modprobe.d/gpu-fleet-driver.conf",
    "modules": "/etc/modules-load.d/gpu-fleet-driver.conf",
    "imex": "/etc/nvidia-imex/nodes_config.cfg",  # every node of the NVLink domain, this one too, one a line
    "persistenced": "/etc/systemd/system/nvidia-persistenced.service.d/gpu-fleet.conf",
    "dcgm_engine": "/etc/systemd/system/nvidia-dcgm.service.d/gpu-fleet.conf",
    "dcgm_exporter": "/etc/systemd/system/nvidia-dcgm-exporter.service.d/gpu-fleet.conf",
    "vllm": "/etc/systemd/system/vllm@.service.d/gpu-fleet-driver.conf",
    "agent": "/etc/systemd/system/vllm-agent@.service.d/gpu-fleet-driver.conf",
    "ray": "/etc/systemd/system/ray@.service.d/gpu-fleet-driver.conf",
}
# What waits, by those files, while another driver is not proved yet: a reboot starts every unit that is enabled.
WAITING = ("vllm", "agent", "ray")
# Written before another driver is installed, taken away when it is proved.
UNPROVED = "/var/lib/gpu_fleet/driver-unproved"
# The key of a mirror; that of NVIDIA's own repository lies where its keyring package has it (data/driver.yml).
MIRROR_KEYRING = "/usr/share/keyrings/gpu-fleet-driver.gpg"

# What `want` may hold: the role's variables without gpu_driver_.
WANT: Dict[str, Any] = {
    "source": "nvidia",
    "branch": None,
    "version": None,  # 580.126.20, or a package's whole version
    "modules": "auto",  # auto, open, proprietary
    "releases": [],  # that are to run here: {version, accelerator}
    "repository": None,  # another address than NVIDIA's own; needed with source mirror
    "suite": "/",  # of that repository; what ends in a slash is a flat one, without components
    "components": [],
    "trusted": False,  # a folder whose files were compared with their checksums by the role itself; it has no key
    "replace_sources": None,  # true: files that other ways of installing left may go, see `other_files` of data/driver.yml
    "in_service": True,  # false: nothing takes the host's replicas out of service, so that a driver under them does not change
    "packages": [],  # names, where data/driver.yml has none
    "imex_nodes": [],  # addresses of the nodes of an NVLink domain
    "gpu_firmware": True,  # false: NVreg_EnableGpuFirmware=0
    "mig_layout": None,
    "root": "/",  # where procfs is looked for; another one on a recorded host
    "persistence": True,  # nvidia-persistenced, where the source has it
    "toolkit": None,  # exact version of the container toolkit
    "dcgm": None,  # exact version of DCGM
    "dcgm_exporter": None,  # exact version of its exporter, numbered by itself
    "dcgm_listen": "127.0.0.1:9400",  # of the exporter
    "dcgm_cuda": None,  # major version of CUDA that DCGM is built for, where the driver's is not known
    "reboot": None,
    "stop_services": None,
}


@dataclass
class DriverPlan:
    """What is to be done. Every package that is installed, replaced or taken away has its name here.

    packages  name to exact version; None where the lists of packages were not read yet
    because   why a package that is not the driver itself is there
    beside    names of packages that change without the driver: DCGM, container toolkit
    moves     names of installed parts of the driver that only go along to its version: what nobody named is neither pinned by
              itself nor held, so that a plan is the same before and after
    headers   packages to install before the driver
    may_remove  installed packages of the other kind of modules, and pinning packages for another driver: the only ones that may go
    removes   those of them that apt is told to take away, of the other kind when this one comes: both conflict, and what is held
              stands in the way
    unhold    what is held now and has to change
    holds     for apt-mark hold
    blocklist regular expressions for unattended-upgrades
    stop      active units, in the order to stop them; start them the other way round
    load      kernel modules to load before the Fabric Manager
    fabric    units of the fabric that have to run
    changes   whether anything of the driver changes; what is beside it has beside_changes, and disturbs nothing
    reboot    whether it takes a reboot, and why
    options   of the module nvidia, name to value, that the loaded driver has to have
    files     what is written, by kind; PATHS says where
    writes    paths of those that are not there, or other than they would be
    gone      files of apt that are taken away
    builds    kernels that the modules are to be built for
    finishes  packages that an earlier run of the role left half done, with their state
    starts    units that an earlier run stopped and did not start again
    """

    system: str
    source: str
    branch: str
    version: str
    modules: str
    reason: str
    packages: Dict[str, Optional[str]] = field(default_factory=dict)
    because: Dict[str, str] = field(default_factory=dict)
    beside: List[str] = field(default_factory=list)
    moves: List[str] = field(default_factory=list)
    headers: List[str] = field(default_factory=list)
    may_remove: List[str] = field(default_factory=list)
    removes: List[str] = field(default_factory=list)
    unhold: List[str] = field(default_factory=list)
    holds: List[str] = field(default_factory=list)
    blocklist: List[str] = field(default_factory=list)
    stop: List[str] = field(default_factory=list)
    load: List[str] = field(default_factory=list)
    fabric: List[str] = field(default_factory=list)
    changes: bool = True
    beside_changes: bool = False
    reboot: bool = False
    reboot_because: List[str] = field(default_factory=list)
    secure_boot: Optional[str] = None
    initramfs: bool = False
    options: Dict[str, str] = field(default_factory=dict)
    files: Dict[str, str] = field(default_factory=dict)
    writes: List[str] = field(default_factory=list)
    gone: List[str] = field(default_factory=list)
    builds: List[str] = field(default_factory=list)
    finishes: Dict[str, str] = field(default_factory=dict)
    starts: List[str] = field(default_factory=list)
    notes: List[str] = field(default_factory=list)

    @property
    def arguments(self) -> List[str]:
        """For apt-get install: every package with its exact version, headers first; a minus takes one away, apt-get(8)."""
        exact = [f"{name}={version}" if version else name for name, version in sorted(self.packages.items())]
        return [*self.headers, *exact, *(f"{name}-" for name in self.removes)]

    def as_dict(self) -> Dict[str, Any]:
        return {**asdict(self), "arguments": self.arguments}


@dataclass
class Choice:
    """A plan, or none with the findings that stand against it; warnings may stand beside a plan."""

    plan: Optional[DriverPlan]
    findings: List[Finding] = field(default_factory=list)

    @property
    def refused(self) -> bool:
        return self.plan is None


class Case:
    """What one question is about."""

    def __init__(
        self,
        facts: Mapping[str, Any],
        want: Mapping[str, Any],
        host: Mapping[str, Any],
        known: Mapping[str, Any],
        *,
        versions: Optional[Mapping[str, Any]],
        where: str,
    ) -> None:
        for given, table, what in ((want, WANT, "want"), (host, HOST, "host")):
            strange = sorted(set(given) - set(table))
            if strange:
                raise ValueError(f"{what} has no {', '.join(strange)}")
        self.facts, self.known, self.versions, self.where = facts, known, versions, where
        self.want = {**WANT, **{key: value for key, value in want.items() if value is not None or WANT[key] is None}}
        self.host = {**HOST, **host}
        self.findings: List[Finding] = []
        self.system = str(self.host["system"])
        self.family = self.system.split("-")[0]
        self.ids = [str(gpu.get("device_id")) for gpu in facts.get("pci_gpus") or [] if gpu.get("vendor_id") == NVIDIA]
        self.driver = facts.get("driver") or {}
        self.origin = "distribution" if self.want["source"] == "distribution" else "nvidia"

    def refuse(self, id_: str, message: str, fix: str, severity: str = "error") -> None:
        self.findings.append(Finding(id_, self.where, message, fix, severity))

    @property
    def refused(self) -> bool:
        return any(finding.severity == "error" for finding in self.findings)

    @property
    def distribution(self) -> List[str]:
        """Origins of the distribution's own packages; none for a system that is not known."""
        found = self.known["origins"].get(self.family)
        return [found] if found else []

    def ours(self, origin: Optional[str]) -> bool:
        """Whether an origin is that of the wanted provider."""
        if origin is None or origin in self.known["other_providers"]:
            return False
        return (origin in self.distribution) == (self.origin == "distribution")

    def candidates(self, name: str) -> List[Mapping[str, Any]]:
        """What the wanted provider offers of a package, newest first; of packages that are no driver's, what anybody offers."""
        offered = (self.host["available"] or {}).get(name) or []
        anybody = self.want["source"] == "mirror" or not names.matches(name, self.known["globs"])
        return [item for item in offered if anybody or self.ours(item.get("origin"))]

    def persistence(self, branch: str) -> List[str]:
        """The package with nvidia-persistenced."""
        table = self.known["sources"][self.origin]["persistence"]
        return [name.format(branch=branch) for name in table.get(self.family, [])]

    def offers(self, branch: str) -> List[str]:
        """Versions of a branch that are offered for the driver's own packages, newest first."""
        for kind in names.KINDS:
            for name in names.names(self.origin, self.system, branch, kind, self.known) or []:
                found = [item["version"] for item in self.candidates(name)]
                found = [names.upstream(version) for version in found if names.branch(version) == branch]
                if found:
                    return list(dict.fromkeys(found))
        return []
