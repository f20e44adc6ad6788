"""Prints a certificate that ended in 2020, or ends in the year that is given: for tests of what expired certificates lead to."""

import datetime
import sys

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

key = ec.generate_private_key(ec.SECP256R1())
name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "expired.example")])
begins, ends = (datetime.datetime(year, 1, 1, tzinfo=datetime.UTC) for year in (2019, int((*sys.argv, 2020)[1])))
made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
made = made.serial_number(1).not_valid_before(begins).not_valid_after(ends).sign(key, hashes.SHA256())
print(made.public_bytes(serialization.Encoding.PEM).decode(), end="")
