"""TLS between controller, agents and tools: given certificates, or an authority made for one job. An option: without
it, what they say can be neither forged nor repeated (:mod:`.handshake`), but it can be read on its way.

Certificates say what *listens*; a caller proves itself by the job's token, inside of TLS as without it.
"""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from flashrecovery.config import TlsSettings
from flashrecovery.errors import ConfigError, StrangerError

_VALID_DAYS = 3650
_FOR_EVER_AGO = datetime.timedelta(days=1)
"""Clocks differ."""


@dataclass(frozen=True)
class Tls:
    """PEM texts. ``ca``: whose certificates are believed; ``certificate`` and ``key``: of what listens here (none: this
    process does not); ``name``: that certificates are made out to, if not to the addresses that are dialled."""

    ca: bytes
    certificate: bytes = b""
    key: bytes = field(default=b"", repr=False)
    name: str = ""

    def dialling(self) -> tuple[grpc.ChannelCredentials, tuple[tuple[str, str], ...]]:
        """Credentials and options of a channel."""
        credentials = grpc.ssl_channel_credentials(root_certificates=self.ca)
        return credentials, ((("grpc.ssl_target_name_override", self.name),) if self.name else ())

    def listening(self) -> grpc.ServerCredentials:
        return grpc.ssl_server_credentials([(self.key, self.certificate)])

    def context(self) -> ssl.SSLContext:
        """An ``ssl.SSLContext`` for a client that does not use gRPC."""
        return ssl.create_default_context(cadata=self.ca.decode())


def given(settings: TlsSettings, here: str) -> Tls | None:
    """As it is configured, for a node with the address ``here``; None: not at all.

    Raises:
        ConfigError: a file cannot be read or is no certificate or key, or they do not fit each other.
    """
    if settings.certificate is None or settings.key is None or settings.ca is None:
        return None
    files = {"certificate": settings.certificate, "key": settings.key, "ca": settings.ca}
    texts: dict[str, bytes] = {}
    for key, path in files.items():
        try:
            texts[key] = path.read_bytes()
        except OSError as e:
            raise ConfigError(f"tls.{key} = {path}: {e.strerror}") from e
    tls = Tls(texts["ca"], texts["certificate"], texts["key"], settings.name or "")
    _check(tls, files, here)
    return tls


def _check(tls: Tls, files: Mapping[str, Path], here: str) -> None:
    """Do what the others will do: a handshake, in memory. ``files``: by setting."""
    try:
        client = tls.context()
    except (ssl.SSLError, ValueError) as e:
        raise ConfigError(f"tls.ca = {files['ca']}: this is no certificate in PEM: {e}") from e
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate, key = files["certificate"], files["key"]
    try:
        server.load_cert_chain(certificate, key, password=_no_password)
    except (ssl.SSLError, ValueError) as e:
        pair = f"tls.certificate = {certificate}, tls.key = {key}"
        raise ConfigError(f"{pair}: a certificate and its own key in PEM, without a password, are needed: {e}") from e
    try:
        _shake_hands(client, server, tls.name or here)
    except ssl.SSLCertVerificationError as e:
        wanted = f"tls.name {tls.name}" if tls.name else f"this node's address {here}; for another name, set tls.name"
        raise ConfigError(
            f"tls.certificate = {certificate}: others would refuse it ({e.verify_message}); it has to be "
            f"valid now, issued by tls.ca = {files['ca']}, and made out to {wanted}"
        ) from e


def _no_password() -> str:
    """Answers instead of the terminal, so that no user is asked for a pass phrase."""
    return ""


def _shake_hands(client: ssl.SSLContext, server: ssl.SSLContext, name: str) -> None:
    """Raises ssl.SSLError."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [client.wrap_bio(down, up, server_hostname=name), server.wrap_bio(up, down, server_side=True)]
    while sides:
        for side in list(sides):
            try:
                side.do_handshake()
                sides.remove(side)
            except ssl.SSLWantReadError:
                pass  # it is the other one's turn


async def stranger(tls: Tls, address: str, timeout_s: float) -> StrangerError | None:
    """Why TLS fails with what listens at ``address``, if it is this that fails: gRPC does not tell."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    opened = asyncio.open_connection(host, int(port), ssl=tls.context(), server_hostname=tls.name or host)
    try:
        _, writer = await asyncio.wait_for(opened, timeout_s)
    except ssl.SSLCertVerificationError as e:
        return StrangerError(f"what listens at {address} has no certificate of this job's: {e.verify_message}")
    except ssl.SSLError as e:
        return StrangerError(f"what listens at {address} does not speak TLS: {e.reason}")
    except (asyncio.TimeoutError, OSError):
        return None
    writer.close()
    return None


def made(folder: Path, names: tuple[str, ...]) -> Tls:
    """A new authority and a certificate for ``names`` (host names or addresses), which are also written to ``folder``;
    the authority's own key is kept nowhere, so no other certificate can be made.

    Raises:
        ConfigError: the library for it is missing, or ``folder`` cannot be written.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as e:
        raise ConfigError("tls.auto = true needs the extra `tls`: pip install 'flashrecovery[tls]'") from e
    now = datetime.datetime.now(datetime.timezone.utc)
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"flashrecovery job {os.urandom(8).hex()}")])
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "flashrecovery")])

    def certificate(of: x509.Name, public: ec.EllipticCurvePublicKey, *, ca: bool) -> x509.CertificateBuilder:
        builder = x509.CertificateBuilder(authority, of, public, x509.random_serial_number())
        builder = builder.not_valid_before(now - _FOR_EVER_AGO)
        builder = builder.not_valid_after(now + datetime.timedelta(days=_VALID_DAYS))
        constraints = x509.BasicConstraints(ca=ca, path_length=0 if ca else None)
        return builder.add_extension(constraints, critical=True)

    alternatives: list[x509.GeneralName] = []
    for name in names:
        try:
            alternatives.append(x509.IPAddress(ipaddress.ip_address(name)))
        except ValueError:
            alternatives.append(x509.DNSName(name))
    ca = certificate(authority, authority_key.public_key(), ca=True)
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)  # to sign certificates
    identifier = x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key())
    ca = ca.add_extension(usage, critical=True).add_extension(identifier, critical=False)
    own = certificate(subject, key.public_key(), ca=False)
    own = own.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    own = own.add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
    pem = serialization.Encoding.PEM
    tls = Tls(
        ca.sign(authority_key, hashes.SHA256()).public_bytes(pem),
        own.sign(authority_key, hashes.SHA256()).public_bytes(pem),
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in (("ca.pem", tls.ca), ("certificate.pem", tls.certificate), ("key.pem", tls.key)):
            with open(folder / file, "wb", opener=_private) as f:
                f.write(text)
    except OSError as e:
        raise ConfigError(f"tls.auto = true: {folder}: {e.strerror}") from e
    return tls


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
