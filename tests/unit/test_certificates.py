"""The fleet's private CA: what it signs, when it is renewed, and by whom it is believed."""

from __future__ import annotations

import dataclasses
import datetime
import ipaddress
import os
import ssl
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import certificates
from cryptography import x509

CALLED = ("gpu-01.vllm", "gpu-01", "192.0.2.1", "2001:db8::1")
NOW = datetime.datetime.now(datetime.UTC)


def read(text):
    return x509.load_pem_x509_certificate(text.encode())


def have(folder, name="vllm/gpu-01", called=CALLED, days=0, **more):
    return certificates.have(str(folder), name, called, now=NOW + datetime.timedelta(days=days), **more)


def test_a_certificate_is_for_its_names_and_verifies_as_strictly_as_python_can(tmp_path):
    made = have(tmp_path)
    names = read(made.certificate).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["gpu-01.vllm", "gpu-01"]
    assert names.get_values_for_type(x509.IPAddress) == [*map(ipaddress.ip_address, CALLED[2:])]
    # As Python 3.13 and newer do by themselves: key identifiers, usages and constraints as RFC 5280 has them.
    check = ["openssl", "verify", "-x509_strict", "-purpose", "sslserver", "-verify_hostname", "gpu-01.vllm"]
    check += ["-CAfile", str(tmp_path / "ca.pem"), str(tmp_path / "vllm/gpu-01.pem")]
    assert subprocess.run(check, capture_output=True, check=False).returncode == 0
    check[6] = "gpu-02.vllm"
    assert subprocess.run(check, capture_output=True, check=False).returncode != 0


def test_keys_are_for_the_controllers_user_alone(tmp_path):
    have(tmp_path / "new")
    for name in ("ca.key", "vllm/gpu-01.key"):
        assert stat.S_IMODE(os.stat(tmp_path / "new" / name).st_mode) == 0o600, name
    assert stat.S_IMODE(os.stat(tmp_path / "new").st_mode) == 0o700


def test_it_is_renewed_in_its_last_month_with_the_same_key_and_ca(tmp_path):
    made = have(tmp_path)
    assert have(tmp_path, days=366) == made
    later = have(tmp_path, days=368)
    assert later.certificate != made.certificate
    assert (later.key, later.ca) == (made.key, made.ca)
    assert have(tmp_path, days=368) == later


@pytest.mark.parametrize("what", ["names", "ca", "key", "nonsense"])
def test_it_is_made_anew_for_other_names_another_ca_another_key_and_where_it_is_none(tmp_path, what):
    made = have(tmp_path)
    for path in {"ca": ["ca.key", "ca.pem"], "key": ["vllm/gpu-01.key"]}.get(what, []):
        (tmp_path / path).unlink()
    if what == "nonsense":
        (tmp_path / "vllm/gpu-01.pem").write_text("nothing")
    again = have(tmp_path, called=(*CALLED, "more") if what == "names" else CALLED)
    assert again.certificate != made.certificate
    read(again.certificate).verify_directly_issued_by(read(again.ca))
    assert (again.key == made.key) == (what != "key")
    assert (again.ca == made.ca) == (what != "ca")


def test_without_making_it_is_what_is_there(tmp_path):
    assert have(tmp_path, make=False) == certificates.Made(due=True)
    assert list(tmp_path.iterdir()) == []
    made = have(tmp_path)
    assert have(tmp_path, make=False) == made
    assert have(tmp_path, days=368, make=False) == dataclasses.replace(made, due=True)
    assert have(tmp_path, called=["other"], make=False).due
    assert certificates.have(str(tmp_path)) == certificates.Made(made.ca)


def test_many_at_once_have_one_ca(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda number: have(tmp_path, f"vllm/gpu-{number}"), range(16)))
    assert len({each.ca for each in made}) == 1
    for each in made:
        read(each.certificate).verify_directly_issued_by(read(made[0].ca))


def test_what_is_no_key_is_named_and_not_replaced(tmp_path):
    have(tmp_path)
    (tmp_path / "ca.key").write_text("nothing")
    with pytest.raises(ValueError, match=r"ca\.key is no private key"):
        have(tmp_path)


def test_a_ca_of_the_community_crypto_collection_goes_on(tmp_path):
    """As earlier releases of the collection made them: a key in the traditional format, and a certificate that openssl can make, too."""
    subprocess.run(
        ["openssl", "ecparam", "-genkey", "-name", "prime256v1", "-noout", "-out", tmp_path / "ca.key"], check=True
    )
    subject = ["-subj", "/CN=gpu_fleet gateway CA", "-addext", "basicConstraints=critical,CA:TRUE,pathlen:0"]
    usage = ["-addext", "keyUsage=critical,keyCertSign,cRLSign", "-days", "3650"]
    command = ["openssl", "req", "-x509", "-key", tmp_path / "ca.key", "-out", tmp_path / "ca.pem", *subject, *usage]
    subprocess.run(command, check=True, capture_output=True)
    before = (tmp_path / "ca.pem").read_text()
    made = have(tmp_path)
    assert made.ca == before
    context = ssl.create_default_context(cadata=made.ca)
    assert context.cert_store_stats()["x509_ca"] == 1
    read(made.certificate).verify_directly_issued_by(read(before))
