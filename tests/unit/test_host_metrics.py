"""What a host tells a monitor, on recorded hosts (tests/replay): a stand-in for nvidia-smi answers."""

import base64
import datetime
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import host_metrics, tree
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import data
from conftest import REPOSITORY

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "replay"))

import hosts

LINKS = """GPU 0: NVIDIA H200 (UUID: GPU-0)
\t Link 0: Replay Errors: 2
\t Link 0: Recovery Errors: 0
\t Link 0: CRC Errors: 1
\t Link 1: Replay Errors: 3
GPU 1: NVIDIA H200 (UUID: GPU-1)
\t Link 0: Replay Errors: 0
"""


# Of what is asked for the monitor alone the recordings have no values.
IDLE = {
    "memory.used": "4",
    "utilization.gpu": "0",
    "temperature.gpu": "31",
    "power.draw": "76.10",
    **{f"clocks_event_reasons.{name}": "Not Active" for name in host_metrics.REASONS},
}


def recording(gpus=None, calls=None, **changes):
    every = {index: {**IDLE, **(gpus or {}).get(index, {})} for index in (0, 1)}
    return hosts.recording("h200x2", gpus=every, calls={"nvlink -e": {"out": LINKS}, **(calls or {})}, **changes)


def collect(folder, recorded, now=1000.0):
    root = tempfile.mkdtemp(dir=folder)
    hosts.lay_out(recorded, root)
    config = {"certificates": [], "models": f"{folder}/models", "folder": str(folder)}
    text = host_metrics.collect(config, hosts.runner(recorded), now, root=root)
    return dict(re.findall(r"^([a-z_]+\{.*\}) (\S+)$", text, re.MULTILINE))


def test_a_healthy_host_has_nothing_that_an_alert_fires_on(tmp_path):
    told = collect(tmp_path, recording())
    assert told['gpu_fleet_gpu_ecc_uncorrected{gpu="1"}'] == "0"
    assert told["gpu_fleet_topology_changed{}"] == "0"
    assert told['gpu_fleet_gpu_throttled{gpu="0",reason="thermal"}'] == "0"
    assert told['gpu_fleet_gpu_memory_bytes{gpu="0"}'] == f"{143771 << 20:.10g}"
    assert told['gpu_fleet_gpu_nvlink_errors{gpu="0",kind="replay"}'] == "5"
    assert told['gpu_fleet_gpu_nvlink_errors{gpu="1",kind="replay"}'] == "0"
    assert not [name for name in told if name.startswith("gpu_fleet_xid_events")]


def test_what_goes_wrong_with_gpus_is_told(tmp_path):
    recorded = recording(
        gpus={
            1: {
                "ecc.errors.uncorrected.volatile.total": "4",
                "clocks_event_reasons.hw_thermal_slowdown": "Active",
                "remapped_rows.failure": "Yes",
            }
        },
        commands={"modinfo -F version nvidia": {"out": "590.1\n"}},
        xid=["NVRM: Xid (PCI:0000:00:06): 79, pid=1, GPU has fallen off the bus."] * 2,
    )
    told = collect(tmp_path, recorded)
    assert told['gpu_fleet_gpu_ecc_uncorrected{gpu="1"}'] == "4"
    assert told['gpu_fleet_gpu_throttled{gpu="1",reason="thermal"}'] == "1"
    assert told['gpu_fleet_gpu_throttled{gpu="1",reason="power_brake"}'] == "0"
    assert told['gpu_fleet_gpu_row_remap_failed{gpu="1"}'] == "1"
    assert told["gpu_fleet_driver_matches{}"] == "0"
    assert told['gpu_fleet_xid_events{pci="0000:00:06.0",xid="79"}'] == "2"


def test_a_topology_that_changes_is_told_until_the_kept_one_is_removed(tmp_path):
    assert collect(tmp_path, recording())["gpu_fleet_topology_changed{}"] == "0"
    worse = recording(cells={(0, 1): "SYS"})
    assert collect(tmp_path, worse)["gpu_fleet_topology_changed{}"] == "1"
    assert collect(tmp_path, worse)["gpu_fleet_topology_changed{}"] == "1"
    (tmp_path / "topology.txt").unlink()
    assert collect(tmp_path, worse)["gpu_fleet_topology_changed{}"] == "0"


def test_gpus_that_are_gone_are_a_change(tmp_path):
    collect(tmp_path, recording())
    every = {"rc": 9, "out": "NVIDIA-SMI has failed\n"}
    assert collect(tmp_path, recording(every=every))["gpu_fleet_topology_changed{}"] == "1"


def test_each_metric_that_alerts_use_is_one_that_is_written():
    used = {
        name
        for entry in data.load("alerts")
        for name in re.findall(r"\bgpu_fleet_[a-z_]+", entry["expr"])
        if not name.startswith(("gpu_fleet_rank", "gpu_fleet_restarts", "gpu_fleet_limit", "gpu_fleet_peers"))
    }
    assert used and used <= set(host_metrics.HELP)


# --- models and room ---------------------------------------------------------------------------------------------------------


def test_a_model_that_is_not_whole_is_told(tmp_path):
    for name in ("whole", "cut"):
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text("x" * 100)
        tree.save(str(tmp_path / "models" / f".{name}.record.json"), tree.record(str(folder)))
    (tmp_path / "models/cut/model.safetensors").write_text("x" * 99)
    told = collect(tmp_path, recording())
    assert told['gpu_fleet_model_complete{model="whole"}'] == "1"
    assert told['gpu_fleet_model_complete{model="cut"}'] == "0"


MOUNTS = """\
overlay / overlay rw 0 0
/dev/sdb1 /var/lib/vllm xfs rw 0 0
tmpfs /dev/shm tmpfs rw 0 0
tmpfs /srv/with\\040blank tmpfs rw 0 0
/dev/sdc1 /var/cache ext4 rw 0 0
tmpfs /var/cache/vllm tmpfs rw 0 0
proc /proc proc rw 0 0
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/opt/vllm", "overlay"),
        ("/var/lib/vllm", "xfs"),
        ("/var/lib/vllm2", "overlay"),
        ("/var/cache/vllm", "tmpfs"),
        ("/var/cache/other", "ext4"),
        ("/srv/with blank", "tmpfs"),
    ],
)
def test_the_file_system_under_a_folder(folder, kind):
    assert host_metrics.fstype(MOUNTS, folder) == kind


def test_room_is_told_where_the_node_exporter_does_not_look(tmp_path):
    mounts = f"/dev/sda1 / ext4 rw 0 0\noverlay {tmp_path} overlay rw 0 0\n"
    size, free = host_metrics.folder_samples(mounts, ["/", str(tmp_path), str(tmp_path / "absent")])
    assert size[:2] == ("gpu_fleet_folder_size_bytes", {"mountpoint": str(tmp_path), "fstype": "overlay"})
    assert free[0] == "gpu_fleet_folder_avail_bytes" and 0 < free[2] <= size[2]


# --- certificates ---------------------------------------------------------------------------------------------------------


def certificate(ends):
    """A certificate that ends then, in PEM, made by the library of the playbooks."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fleet.example")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC))
        .not_valid_after(ends)
        .sign(key, hashes.SHA256())
    )
    return made.public_bytes(serialization.Encoding.PEM).decode()


@pytest.mark.parametrize("year", [2026, 2049, 2050, 2061])
def test_the_end_of_a_certificate(year):
    ends = datetime.datetime(year, 7, 3, 4, 5, 6, tzinfo=datetime.UTC)
    assert host_metrics.expires(certificate(ends)) == ends.timestamp()


def test_of_a_chain_the_first_end_counts():
    soon, late = (datetime.datetime(year, 1, 1, tzinfo=datetime.UTC) for year in (2027, 2040))
    assert host_metrics.expires(certificate(late) + certificate(soon)) == soon.timestamp()


def test_files_without_a_certificate_are_told_as_such(tmp_path):
    short = base64.b64encode(b"\x30\x82\x01\x00\x30").decode()
    (tmp_path / "cut").write_text(f"-----BEGIN CERTIFICATE-----\n{short}\n-----END CERTIFICATE-----\n")
    (tmp_path / "none").write_text("nothing\n")
    paths = [str(tmp_path / name) for name in ("cut", "none", "absent")]
    samples = host_metrics.certificate_samples(paths)
    assert samples == [("gpu_fleet_certificate_readable", {"path": path}, 0) for path in paths]


def test_it_runs_from_a_folder_of_its_own(tmp_path):
    """As the unit runs it: the host's Python, isolated, with the copied modules alone."""
    package = tmp_path / "program" / "ansible_collections" / "gpu_fleet" / "vllm" / "plugins" / "module_utils"
    package.mkdir(parents=True)
    for name in ("host_metrics", "model_presence", "tree", "gpu_facts", "gpu_amd", "gpu_nvml", "gpu_sysfs"):
        source = REPOSITORY / "plugins" / "module_utils" / f"{name}.py"
        (package / source.name).write_text(source.read_text())
    starter = (REPOSITORY / "roles" / "monitoring" / "files" / "host_metrics_main.py").read_text()
    (tmp_path / "program" / "__main__.py").write_text(starter)
    into, config = tmp_path / "gpu_fleet.prom", tmp_path / "config.json"
    config.write_text(
        f'{{"certificates": [], "models": "{tmp_path}/models", "folder": "{tmp_path}/kept", "into": "{into}"}}'
    )
    done = subprocess.run(
        [sys.executable, "-I", "-B", str(tmp_path / "program"), str(config)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "gpu_fleet_host_metrics_time_seconds{} " in into.read_text()
