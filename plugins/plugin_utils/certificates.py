"""The fleet's private CA and the certificates that it signs, in a folder of the controller. The CA's key never leaves it.

ca.key, ca.pem          made once, good for ten years
NAME.key, NAME.pem      a host's; the certificate is renewed in its last month, for other names, and for another CA, with the same key
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import ipaddress
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAYS, CA_DAYS, RENEWED = 397, 3650, datetime.timedelta(days=30)
LATE = datetime.timedelta(hours=1)  # that a host's clock may be behind the controller's


@dataclass(frozen=True)
class Made:
    """PEM texts; empty what there is not and was not to be made. due: a certificate that would be made or renewed."""

    ca: str = ""
    certificate: str = ""
    key: str = ""
    due: bool = False


def have(
    folder: str, name: str = "", called: Sequence[str] = (), make: bool = True, now: datetime.datetime | None = None
) -> Made:
    """The CA's certificate and, with a name, that of a host, good for the names and addresses that it is called by.

    Made or renewed where that is due; without `make` what is there, as it is. Two runs at once end with one of each.
    Raises OSError and ValueError, with the file, where one cannot be read or made.
    """
    home, now = Path(folder), now or datetime.datetime.now(datetime.UTC)
    if not make:
        there = (_text(home / f"{name}.pem"), _text(home / f"{name}.key")) if name else ("", "")
        return Made(_text(home / "ca.pem"), *there, due=bool(name) and _due(home, name, called, now))
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    (home / name).parent.mkdir(mode=0o700, exist_ok=True)
    with _alone(home):
        key, ca = _authority(home, now)
        made = Made(_pem(ca))
        if name:
            own = _key(home / f"{name}.key")
            path = home / f"{name}.pem"
            if not _good(_read(path), own, ca, called, now):
                _write(path, _pem(_sign(own, name.rpartition("/")[2], called, by=(key, ca), now=now)), 0o644)
            made = Made(_pem(ca), path.read_text(), (home / f"{name}.key").read_text())
    return made


def _due(home: Path, name: str, called: Sequence[str], now: datetime.datetime) -> bool:
    ca, key = _read(home / "ca.pem"), home / f"{name}.key"
    return not ca or not key.exists() or not _good(_read(home / f"{name}.pem"), _key(key), ca, called, now)


@contextlib.contextmanager
def _alone(home: Path) -> Iterator[None]:
    handle = os.open(home / ".lock", os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _authority(home: Path, now: datetime.datetime) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key, path = _key(home / "ca.key"), home / "ca.pem"
    found = _read(path)
    if found is None or found.public_key() != key.public_key():
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gpu_fleet CA")])
        usage = x509.KeyUsage(
            digital_signature=False,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        found = (
            _begin(name, name, key, now, CA_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(key, hashes.SHA256())
        )
        _write(path, _pem(found), 0o644)
    return key, found


def _sign(
    own: ec.EllipticCurvePrivateKey,
    name: str,
    called: Sequence[str],
    *,
    by: tuple[ec.EllipticCurvePrivateKey, x509.Certificate],
    now: datetime.datetime,
) -> x509.Certificate:
    key, ca = by
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(
        ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    )
    return (
        _begin(subject, ca.subject, own, now, DAYS)
        .add_extension(x509.SubjectAlternativeName(_names(called)), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(issuer, critical=False)
        .sign(key, hashes.SHA256())
    )


def _begin(
    subject: x509.Name, issuer: x509.Name, own: ec.EllipticCurvePrivateKey, now: datetime.datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(own.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - LATE)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(own.public_key()), critical=False)
    )


def _names(called: Sequence[str]) -> list[x509.GeneralName]:
    """As certificates write them: addresses as such, everything else as a name."""
    found: list[x509.GeneralName] = []
    for one in dict.fromkeys(called):
        try:
            found.append(x509.IPAddress(ipaddress.ip_address(one)))
        except ValueError:
            found.append(x509.DNSName(one))
    return found


def _good(
    found: x509.Certificate | None,
    own: ec.EllipticCurvePrivateKey,
    ca: x509.Certificate,
    called: Sequence[str],
    now: datetime.datetime,
) -> bool:
    """Whether a certificate is this key's, of this CA, for these names, and for longer than a month."""
    if found is None or found.public_key() != own.public_key() or found.not_valid_after_utc < now + RENEWED:
        return False
    try:
        found.verify_directly_issued_by(ca)
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (InvalidSignature, ValueError, TypeError, x509.ExtensionNotFound):
        return False
    return set(names) == set(_names(called))


def _key(path: Path) -> ec.EllipticCurvePrivateKey:
    if not path.exists():
        made = ec.generate_private_key(ec.SECP256R1())
        plain = serialization.NoEncryption()
        text = made.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain).decode()
        _write(path, text, 0o600)
    try:
        found = serialization.load_pem_private_key(path.read_bytes(), None)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is no private key") from error
    if not isinstance(found, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{path} is no key of an elliptic curve, as the collection makes them")
    return found


def _read(path: Path) -> x509.Certificate | None:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _write(path: Path, text: str, mode: int) -> None:
    beside = path.with_name(f"{path.name}.new")
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(handle, "w", encoding="ascii") as out:
        os.fchmod(out.fileno(), mode)
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    beside.replace(path)
