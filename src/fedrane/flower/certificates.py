"""A CA, a certificate for the server and a key for each node: for a trial."""

from __future__ import annotations

import datetime
import ipaddress
import re
from typing import Any

from fedrane.errors import ConfigError

DAYS = 30
"""How long they are valid."""
_LONGEST_NAME = 64
"""The first is also the certificate's common name, which has a limit."""
_LABEL = r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)"


def _host_name(host: str) -> str:
    labels = host.split(".")
    numbers = all(label.isdecimal() for label in labels)  # an address with a mistake is not a name
    if len(host) > _LONGEST_NAME or numbers or not all(re.fullmatch(_LABEL, label) for label in labels):
        raise ConfigError(
            f"--host {host!r} is neither a host name nor an address",
            f"a name has up to {_LONGEST_NAME} letters, digits and hyphens, with dots between its parts",
            "Write for instance --host server.example.org, an international name in its form with xn--",
        )
    return host


def certificates(hosts: list[str], nodes: int) -> dict[str, tuple[bytes, int]]:
    """Contents and modes by path. The CA's own key is not kept: nobody can sign with it again."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    now = datetime.datetime.now(datetime.UTC)

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def begun(subject: str, key: Any) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(named(subject))
            .issuer_name(named("fedrane trial CA"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=DAYS))
        )

    def address(host: str) -> x509.GeneralName:
        try:
            return x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            return x509.DNSName(_host_name(host))

    def usage(signs_certificates: bool) -> x509.KeyUsage:
        rest = dict.fromkeys(
            ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only"), False
        )
        return x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=signs_certificates,
            crl_sign=signs_certificates,
            decipher_only=False,
            **rest,
        )

    addresses = [address(host) for host in hosts]
    ca_key, server_key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    ca = (
        begun("fedrane trial CA", ca_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage(True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    certificate = (
        begun(hosts[0], server_key)
        .add_extension(x509.SubjectAlternativeName(addresses), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage(False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    files = {
        "ca.crt": (ca.public_bytes(pem), 0o644),
        "server.pem": (certificate.public_bytes(pem), 0o644),
        "server.key": (server_key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain), 0o600),
    }
    for node in range(nodes):
        key = ec.generate_private_key(ec.SECP384R1())
        files[f"node-{node}"] = key.private_bytes(pem, serialization.PrivateFormat.OpenSSH, plain), 0o600
        public = key.public_key()
        ssh = public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        files[f"node-{node}.pub"] = ssh + b"\n", 0o644
    return files
