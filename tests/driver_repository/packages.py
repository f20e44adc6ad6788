"""The stand-in packages: names, versions and dependencies of NVIDIA's repository for Debian 12, and what lies in them here.

What is public and was followed:
  names, and that 580 dropped the branch from the Fabric Manager's, NSCQ's and IMEX' names   data/driver.yml says from where
  one version for nvidia-driver, nvidia-driver-cuda, nvidia-kernel-open-dkms, nvidia-open    listings by `dpkg -l`, 595.45.04-1
  the DKMS module is called nvidia                                                           listings by `dkms status`
  cuda-drivers-580 asks for nvidia-driver (>= 580.65.06), which any newer branch meets       forums.developer.nvidia.com/t/353805
  nvidia-kernel-dkms of 615.71.09-2 is a transitional package that brings the open modules   a listing by `dpkg -l`
  epoch 1 in the versions of datacenter-gpu-manager-4-*, 1:4.4.1-1                           install lines in public scripts
  a pinning package provides, conflicts with and replaces nvidia-driver-pinning              `apt-cache show` in public pages
  it brings /etc/apt/preferences.d/nvidia-driver-pin, version 595.71.05-* at priority 1000   a host's file in a public page
Not public, and so made up here: that libraries are asked for with >= (the loosest form, so that only pins keep them
together), the folder a file lies in where the tool's help does not say, and which packages a pinning package names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
FILES = HERE / "files"
REPLAY = HERE.parent / "replay" / "nvidia-smi"
LIBRARY = "usr/lib/x86_64-linux-gnu"
OLD, NEW, NEXT, LAST = "580.105.08", "580.126.20", "590.48.01", "615.71.09"
DRIVERS = {OLD: f"{OLD}-1", NEW: f"{NEW}-1", NEXT: f"{NEXT}-1", LAST: f"{LAST}-2"}
# One whose library is not in the repository any more, as happens there: it cannot be installed.
WITHDRAWN = "580.95.05"
LOWEST = "580.65.06"
TOOLKIT = ("1.17.8-1", "1.18.1-1")
DCGM = ("1:4.4.1-1", "1:4.5.2-1")


@dataclass
class Package:
    """One package. files: path to a text, or to a path of this machine to copy; mode by `programs`."""

    name: str
    version: str
    about: str
    architecture: str = "amd64"
    relations: dict[str, str] = field(default_factory=dict)
    files: dict[str, str | Path] = field(default_factory=dict)
    programs: tuple[str, ...] = ()
    scripts: dict[str, str] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        return f"{self.name}_{self.version.split(':')[-1]}_{self.architecture}.deb"


def text_of(name: str, version: str = "") -> str:
    return (FILES / name).read_text(encoding="utf-8").replace("@VERSION@", version)


def nvidia(library: dict[str, Path], key: Path) -> list[Package]:
    """Everything of the stand-in for NVIDIA's repository. library: libcuda by version."""
    found: list[Package] = [*keyring(key), *pinning(), *metapackages(), *toolkit(), *dcgm(), *subnet_manager()]
    for version, exact in DRIVERS.items():
        found += driver(version, exact, library[version]) + fabric(version, exact)
    return [*found, *withdrawn()]


def driver(version: str, exact: str, library: Path) -> list[Package]:
    same = f"(= {exact})"
    transitional = {"relations": {"Depends": f"nvidia-kernel-open-dkms {same}"}}
    return [
        Package("libcuda1", exact, "CUDA library", files={f"{LIBRARY}/libcuda.so.1": library}),
        Package("libnvidia-ml1", exact, "management library, empty"),
        Package(
            "nvidia-driver-cuda",
            exact,
            "CUDA integration, with nvidia-smi",
            relations={"Depends": f"python3, libcuda1 (>= {version}), libnvidia-ml1 (>= {version})"},
            files={"usr/bin/nvidia-smi": text_of("nvidia-smi", version), "usr/lib/nvidia-stand-in/replay.py": REPLAY},
            programs=("usr/bin/nvidia-smi",),
        ),
        Package(
            "nvidia-driver",
            exact,
            "metapackage with everything",
            relations={"Depends": f"nvidia-driver-cuda {same}, nvidia-kernel-open-dkms | nvidia-kernel-dkms"},
        ),
        modules("nvidia-kernel-open-dkms", version, exact, "Dual MIT/GPL", f"nvidia-kernel-dkms (<< {LAST})"),
        Package("nvidia-kernel-dkms", exact, "transitional package", **transitional)
        if version == LAST
        else modules("nvidia-kernel-dkms", version, exact, "NVIDIA", "nvidia-kernel-open-dkms"),
        Package(
            "nvidia-persistenced",
            exact,
            "persistence daemon",
            files={
                "usr/bin/nvidia-persistenced": text_of("nvidia-persistenced", version),
                "lib/systemd/system/nvidia-persistenced.service": text_of("nvidia-persistenced.service"),
            },
            programs=("usr/bin/nvidia-persistenced",),
            scripts={
                "postinst": _unit("nvidia-persistenced.service", start=True),
                "prerm": _stop("nvidia-persistenced"),
            },
        ),
        pin(version, exact, f"{version}-*", "pin of a version"),
    ]


def modules(name: str, version: str, exact: str, licence: str, conflicts: str) -> Package:
    """A source for DKMS that it builds for real, in seconds."""
    folder = f"usr/src/nvidia-{version}"
    makefile = (
        f"ccflags-y := -DSTAND_IN_VERSION='\"{version}\"' -DSTAND_IN_LICENSE='\"{licence}\"'\n"
        "obj-m := nvidia.o nvidia-uvm.o\n"
    )
    configuration = (
        f'PACKAGE_NAME="nvidia"\nPACKAGE_VERSION="{version}"\nAUTOINSTALL="yes"\n'
        'MAKE[0]="make -C ${kernel_source_dir} M=${dkms_tree}/nvidia/${PACKAGE_VERSION}/build modules"\n'
        'CLEAN="true"\n'
        'BUILT_MODULE_NAME[0]="nvidia"\nDEST_MODULE_LOCATION[0]="/kernel/drivers/char"\n'
        'BUILT_MODULE_NAME[1]="nvidia-uvm"\nDEST_MODULE_LOCATION[1]="/kernel/drivers/char"\n'
    )
    source = text_of("nvidia.c")
    return Package(
        name,
        exact,
        "kernel modules, source for DKMS",
        relations={"Depends": "dkms", "Conflicts": conflicts, "Replaces": conflicts},
        files={
            f"{folder}/dkms.conf": configuration,
            f"{folder}/Makefile": makefile,
            f"{folder}/nvidia.c": source,
            f"{folder}/nvidia-uvm.c": source,
        },
        scripts={
            # the lines that dh_dkms (1) writes
            "postinst": f'if [ "$1" = configure ]; then\n  /usr/lib/dkms/common.postinst nvidia {version} /usr/share/{name} "" "$2"\nfi\n',
            "prerm": f'case "$1" in remove|upgrade|deconfigure)\n  if [ -d /var/lib/dkms/nvidia/{version} ]; then\n'
            f"    dkms remove -m nvidia -v {version} --all\n  fi ;;\nesac\n",
        },
    )


def fabric(version: str, exact: str) -> list[Package]:
    units = "lib/systemd/system"
    provides = {"Provides": f"nvidia-fabricmanager-{version.split('.', maxsplit=1)[0]}"}
    return [
        Package(
            "nvidia-fabricmanager",
            exact,
            "Fabric Manager",
            relations=provides,
            files={
                "usr/bin/nv-fabricmanager": text_of("nv-fabricmanager", version),
                "usr/share/nvidia/nvswitch/fabricmanager.cfg": "# Of a stand-in, made for a test.\nFABRIC_MODE=0\n",
                f"{units}/nvidia-fabricmanager.service": text_of("nvidia-fabricmanager.service"),
            },
            programs=("usr/bin/nv-fabricmanager",),
            scripts={"postinst": _unit(), "prerm": _stop("nvidia-fabricmanager")},
        ),
        Package("libnvidia-nscq", exact, "switch configuration library, empty"),
        Package("libnvsdm", exact, "switch management library, empty"),
        Package(
            "nvidia-imex",
            exact,
            "IMEX",
            files={
                "usr/bin/nvidia-imex": text_of("nvidia-imex", version),
                f"{units}/nvidia-imex.service": text_of("nvidia-imex.service"),
            },
            programs=("usr/bin/nvidia-imex",),
            scripts={"postinst": _unit(), "prerm": _stop("nvidia-imex")},
        ),
    ]


def withdrawn() -> list[Package]:
    exact = f"{WITHDRAWN}-1"
    needs = {"Depends": f"libcuda1 (= {exact}), libnvidia-ml1 (= {exact})"}
    return [
        Package("nvidia-driver-cuda", exact, "CUDA integration whose libraries are gone", relations=needs),
        modules("nvidia-kernel-open-dkms", WITHDRAWN, exact, "Dual MIT/GPL", "nvidia-kernel-dkms"),
    ]


def metapackages() -> list[Package]:
    newest = DRIVERS[LAST]
    return [
        Package("cuda-drivers-580", DRIVERS[NEW], "metapackage", relations={"Depends": f"nvidia-driver (>= {LOWEST})"}),
        Package("cuda-drivers", newest, "metapackage", relations={"Depends": f"nvidia-driver (>= {LAST})"}),
        Package(
            "nvidia-open",
            newest,
            "metapackage, latest version",
            relations={"Depends": f"nvidia-driver (>= {LAST}), nvidia-kernel-open-dkms (>= {LAST})"},
        ),
    ]


def pinning() -> list[Package]:
    """Of a branch; those of a version are beside the driver."""
    return [pin(branch, f"{branch}-5", f"{branch}.*", "pin of a branch") for branch in ("580", "590")]


def pin(what: str, exact: str, versions: str, about: str) -> Package:
    """One at a time, all with the same file."""
    text = f"# Of a stand-in, made for a test.\nPackage: nvidia-* libnvidia-* libcuda1\nPin: version {versions}\nPin-Priority: 1000\n"
    return Package(
        f"nvidia-driver-pinning-{what}",
        exact,
        about,
        "all",
        relations=dict.fromkeys(("Provides", "Conflicts", "Replaces"), "nvidia-driver-pinning"),
        files={"etc/apt/preferences.d/nvidia-driver-pin": text},
    )


def keyring(key: Path) -> list[Package]:
    source = "deb [signed-by=/usr/share/keyrings/cuda-archive-keyring.gpg] file:/srv/driver-repository/nvidia/ /\n"
    return [
        Package(
            "cuda-keyring",
            "1.1-1",
            "key and source of the repository, the key thrown away after the test",
            "all",
            files={
                "usr/share/keyrings/cuda-archive-keyring.gpg": key,
                "etc/apt/sources.list.d/cuda-debian12-x86_64.list": source,
            },
        )
    ]


def toolkit() -> list[Package]:
    """Named and joined as in NVIDIA/libnvidia-container and nvidia-container-toolkit, packaging/debian/control."""
    found = []
    for version in TOOLKIT:
        loose = version.rsplit("-", 1)[0]
        found += [
            Package("libnvidia-container1", version, "container library, empty"),
            Package(
                "libnvidia-container-tools",
                version,
                "container library's tool, empty",
                relations={"Depends": f"libnvidia-container1 (>= {loose})"},
            ),
            Package(
                "nvidia-container-toolkit-base",
                version,
                "container toolkit's command",
                files={"usr/bin/nvidia-ctk": text_of("nvidia-ctk", loose)},
                programs=("usr/bin/nvidia-ctk",),
            ),
            Package(
                "nvidia-container-toolkit",
                version,
                "container toolkit, empty",
                relations={
                    "Depends": f"nvidia-container-toolkit-base (= {version}), libnvidia-container-tools (>= {loose})"
                },
            ),
        ]
    return found


def dcgm() -> list[Package]:
    units = "lib/systemd/system"
    found = []
    for version in DCGM:
        plain = version.split(":")[-1].rsplit("-", 1)[0]
        found.append(
            Package(
                "datacenter-gpu-manager-4-core",
                version,
                "DCGM's host engine",
                files={
                    "usr/bin/nv-hostengine": text_of("nv-hostengine", plain),
                    f"{units}/nvidia-dcgm.service": text_of("nvidia-dcgm.service"),
                },
                programs=("usr/bin/nv-hostengine",),
                scripts={"postinst": _unit(), "prerm": _stop("nvidia-dcgm")},
            )
        )
        for major in ("12", "13"):
            needs = {"Depends": f"datacenter-gpu-manager-4-core (= {version})"}
            name = f"datacenter-gpu-manager-4-cuda{major}"
            found.append(Package(name, version, f"DCGM's parts for CUDA {major}, empty", relations=needs))
    found.append(
        Package(
            "datacenter-gpu-manager-exporter",
            DCGM[-1],
            "dcgm-exporter",
            relations={"Depends": "python3, datacenter-gpu-manager-4-core"},
            files={
                "usr/bin/dcgm-exporter": text_of("dcgm-exporter"),
                "etc/dcgm-exporter/default-counters.csv": "# Of a stand-in, made for a test.\n",
                f"{units}/nvidia-dcgm-exporter.service": text_of("nvidia-dcgm-exporter.service"),
            },
            programs=("usr/bin/dcgm-exporter",),
            scripts={"postinst": _unit(), "prerm": _stop("nvidia-dcgm-exporter")},
        )
    )
    return found


def subnet_manager() -> list[Package]:
    return [Package("nvlsm", "2025.10.14-1", "NVLink subnet manager, empty")]


def debian() -> list[Package]:
    """Another provider of the same names: the driver of Debian 12 as in its lists, non-free and security."""
    exact = "535.309.01-0+deb12u1"
    same = f"(= {exact})"
    return [
        Package("nvidia-alternative", exact, "Debian's nvidia-alternative, empty"),
        Package(
            "libnvidia-ml1", exact, "Debian's management library, empty", relations={"Depends": "nvidia-alternative"}
        ),
        Package("libcuda1", exact, "Debian's CUDA library, empty", relations={"Depends": "nvidia-alternative"}),
        Package("nvidia-smi", exact, "Debian's nvidia-smi, empty", relations={"Depends": f"libnvidia-ml1 {same}"}),
    ]


def _unit(name: str = "", *, start: bool = False) -> str:
    text = "[ ! -d /run/systemd/system ] || systemctl daemon-reload\n"
    if start:  # as Debian's packages do: a failure is no failure of the package
        text += (
            f'if [ "$1" = configure ]; then\n  systemctl enable {name} || true\n  systemctl start {name} || true\nfi\n'
        )
    return text


def _stop(name: str) -> str:
    return f'[ "$1" != remove ] || systemctl stop {name}.service || true\n'
