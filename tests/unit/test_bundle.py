"""What leaves a site in a report: nothing secret, no address, and still to be followed."""

import stat
import tarfile

import conftest  # noqa: F401  makes scripts/gpu_fleet importable
import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import evidence, redact
from gpu_fleet import api, archive, collect, runs
from gpu_fleet.cli import app
from test_evidence import case, line
from typer.testing import CliRunner

KEY = "Zk3v9-abcDEF0123456789_secretsecret"


@pytest.mark.parametrize(
    "text",
    [
        f"VLLM_API_KEY={KEY}",
        f"Authorization: Bearer {KEY}",
        f'{{"api_key": "{KEY}"}}',
        f"vllm serve --api-key {KEY} --port 8000",
        f"non-default args: {{'api_key': ['{KEY}'], 'port': 1}}",
        f"https://user:{KEY}@proxy.example:3128/",
        "HF_TOKEN=hf_abcdefghijklmnopqrstuvwx",
        "key sk-abcdefghijklmnopqrstuvwxyz used",
        f"-----BEGIN EC PRIVATE KEY-----\n{KEY}\n-----END EC PRIVATE KEY-----",
        f"password: '{KEY}'",
    ],
)
def test_secrets_go(text):
    told = redact.Redactor().text(text)
    assert redact.SECRET in told
    for part in (KEY, "hf_abcdefgh", "sk-abcdefgh"):
        assert part not in told


@pytest.mark.parametrize(
    "text",
    [
        "10:21:24 INFO [core.py:120] 0000:1b:00.0 NVRM: Xid",
        "Listening on 127.0.0.1:8000 and [::1]:8000, 0.0.0.0",
        "nvidia-cudnn-cu12==9.1.0.70 vLLM 0.32.0 driver 580.159.04",
        "max_tokens: 16, num_tokens=3, tokenizer=slow, token: None",
        "GPU-00000000-0000-4000-8000-000000000000",
        "std::vector and a::b::c",
    ],
)
def test_what_is_no_secret_and_no_address_stays(text):
    assert redact.Redactor(["gpu-01"]).text(text) == text


def test_the_same_address_has_the_same_name_everywhere():
    hide = redact.Redactor(["gpu-01", "gpu-01.site.example"])
    one = hide.text("gpu-01 (10.1.2.3) to fd00::2 by 52:54:00:aa:bb:cc")
    assert one == "host-1 (address-2) to address-1 by mac-1"
    assert hide.text("tcp://10.1.2.3:29501 from FD00:0::2, gpu-01.site.example") == (
        "tcp://address-2:29501 from address-1, host-2"
    )
    assert hide.text("gpu-011 and my-gpu-01") == "gpu-011 and my-gpu-01"


def test_prompts_go():
    told = redact.Redactor().text("Received request cmpl-1: prompt: 'my \\'own\\' story', params: SamplingParams(n=1)")
    assert told == "Received request cmpl-1: prompt: [prompt], params: SamplingParams(n=1)"


def collected():
    journal = [
        line("gpu-01", 1, f"non-default args: {{'api_key': ['{KEY}'], 'host': '10.1.2.3'}}"),
        line("gpu-01", 2, "OSError: [Errno 28] No space left on device"),
    ]
    fleet = case(
        gpu_01={"journal": evidence.packed("\n".join(journal)), "addresses": "host0 UP 10.1.2.3/24 fd00::3/64\n"},
        gpu_02={"firewall": "ip saddr { 10.1.2.3 } accept\n"},
    )
    for told in fleet.evidence.values():
        for name in ("firewall", "addresses", "topology", "gpus"):
            told.setdefault(name, "")
    fleet.outcome.plan = {**fleet.outcome.plan, "addresses": {"gpu-01": "10.1.2.3", "gpu-02": "10.1.2.4"}}
    return fleet


def made(tmp_path):
    fleet, path = collected(), tmp_path / "case.tar.gz"
    archive.write(path, archive.contents(fleet, collect.examine(fleet), {"gpu_fleet.vllm": "0"}))
    return path


def test_an_archive_has_an_index_and_nothing_of_the_site(tmp_path):
    path = made(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with tarfile.open(path) as archive:
        texts = {member.name: archive.extractfile(member).read().decode() for member in archive}
    assert "case/index.md" in texts and "case/host-1/journal.json" in texts
    for name in texts:
        if name != "case/index.md":
            assert f"| {name.removeprefix('case/')} |" in texts["case/index.md"], name
    everything = "".join(texts) + "".join(texts.values())
    for part in (KEY, "10.1.2.3", "10.1.2.4", "fd00::3", "gpu-01", "gpu-02"):
        assert part not in everything
    assert '"cause_id": "disk_full"' in texts["case/findings.json"]
    assert "address-1" in texts["case/host-2/firewall.txt"] and "address-1" in texts["case/host-1/addresses.txt"]


def test_the_same_from_python(monkeypatch, tmp_path):
    fleet = collected()
    monkeypatch.setattr(collect, "collect", lambda *_: fleet)
    assert api.bundle("inv", tmp_path / "case.tar.gz") is fleet.outcome
    with tarfile.open(tmp_path / "case.tar.gz") as tar:
        assert "case/index.md" in tar.getnames()
    with pytest.raises(FileExistsError):
        api.bundle("inv", tmp_path / "case.tar.gz")


def test_it_replaces_no_file(tmp_path):
    path = made(tmp_path)
    before = path.read_bytes()
    assert CliRunner().invoke(app, ["bundle", "-i", "inventories/prod", "--into", str(path)]).exit_code == 2
    assert path.read_bytes() == before
    with pytest.raises(FileExistsError):
        archive.write(path, {"a": "b"})


def test_an_inventory_that_is_not_there(tmp_path):
    assert CliRunner().invoke(app, ["bundle", "-i", "/absent", "--into", str(tmp_path / "x.tar.gz")]).exit_code == 2


@pytest.mark.parametrize("verb", ["bundle", "doctor"])
def test_hosts_that_were_not_reached_are_named(monkeypatch, tmp_path, verb):
    why = {"gpu-01": "Connection refused", "gpu-02": "Connection refused"}
    outcome = runs.FleetResult(
        status=4,
        failures=[runs.Failure("gpu-03", "Look", "its disk is full")],
        unreachable=list(why),
        why_unreachable=why,
    )
    monkeypatch.setattr(collect, "collect", lambda *_: collect.Case(outcome))
    more = ["--into", str(tmp_path / "case.tar.gz")] if verb == "bundle" else []
    done = CliRunner().invoke(app, [verb, "-i", str(tmp_path), *more])
    assert done.exit_code == 2
    assert done.stderr.splitlines() == [
        "gpu-03: its disk is full",
        "gpu-01: not reached. Connection refused",
        "gpu-02: not reached. Connection refused",
    ]
    with pytest.raises(ValueError, match="gpu-02: not reached"):
        api.doctor(tmp_path)
