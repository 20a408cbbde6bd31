"""Looks at one address from outside: a connection, TLS, HTTP. Blocking; run it in threads."""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import http.client
import socket
import ssl
import urllib.parse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cryptography import x509

from kvshuttle.addresses import split_address

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from pathlib import Path

    from kvshuttle.client import TlsOptions

Speaks = Literal["tls", "plain", "nothing"]


@dataclass(frozen=True, slots=True)
class Certificate:
    """What a certificate says of itself."""

    names: tuple[str, ...]
    not_before: datetime.datetime
    not_after: datetime.datetime


@dataclass(frozen=True, slots=True)
class Port:
    """What was found at an address. `distrust` says why the certificate is not accepted with the
    authorities that were given; empty where it is, or where there is none."""

    address: str
    speaks: Speaks
    error: str = ""
    certificate: Certificate | None = None
    distrust: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """An HTTP answer; `status` 0 where there was none. `time` is the server's own clock."""

    url: str
    status: int
    body: bytes = b""
    error: str = ""
    time: datetime.datetime | None = None


def port(address: str, tls: TlsOptions | None, timeout_s: float) -> Port:
    """Connects, and tries a TLS handshake, whatever is expected. ValueError: not host:port."""
    host, number = split_address(address)
    try:
        socket.create_connection((host, number), timeout_s).close()
    except OSError as error:
        return Port(address, "nothing", error=_why(error))
    found: Certificate | None = None
    trusting = _context(tls, verify=False)
    try:
        with _handshake(trusting, host, number, host, timeout_s) as secure:
            der = secure.getpeercert(binary_form=True)
            if der:
                found = certificate(der)
    except (ssl.SSLError, ConnectionError, TimeoutError, EOFError) as error:
        return Port(address, "plain", error=_why(error))
    name = (tls.server_name if tls else None) or host
    distrust = ""
    try:
        with _handshake(_context(tls, verify=True), host, number, name, timeout_s):
            pass
    except ssl.SSLCertVerificationError as error:
        distrust = error.verify_message or str(error)
    except (ssl.SSLError, OSError) as error:
        distrust = _why(error)
    return Port(address, "tls", certificate=found, distrust=distrust)


def _context(tls: TlsOptions | None, *, verify: bool) -> ssl.SSLContext:
    cafile = str(tls.ca_file) if tls and tls.ca_file else None
    context = ssl.create_default_context(cafile=cafile)
    context.set_alpn_protocols(["h2"])
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if tls and tls.cert_file and tls.key_file:
        context.load_cert_chain(tls.cert_file, tls.key_file)
    return context


@contextlib.contextmanager
def _handshake(
    context: ssl.SSLContext, host: str, number: int, name: str, timeout_s: float
) -> Generator[ssl.SSLSocket]:
    with (
        socket.create_connection((host, number), timeout_s) as raw,
        context.wrap_socket(raw, server_hostname=name) as secure,
    ):
        yield secure


def certificate(data: bytes) -> Certificate:
    """Of DER or PEM. ValueError where it is neither."""
    read = (
        x509.load_pem_x509_certificate if b"-----BEGIN" in data else x509.load_der_x509_certificate
    )
    found = read(data)
    names: list[str] = []
    with contextlib.suppress(x509.ExtensionNotFound):
        extension = found.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        names = [str(name.value) for name in extension.value]
    return Certificate(tuple(names), found.not_valid_before_utc, found.not_valid_after_utc)


def certificate_file(path: Path) -> Certificate:
    """The first certificate of a PEM file. OSError, ValueError."""
    return certificate(path.read_bytes())


def get(url: str, timeout_s: float, headers: Mapping[str, str] | None = None) -> Page:
    """One GET, followed nowhere."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return Page(url, 0, error="is not an http:// or https:// address")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=timeout_s)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        connection.request("GET", path, headers=dict(headers or {}))
        answer = connection.getresponse()
        body = answer.read(4 << 20)
        date = answer.getheader("date")
    except (OSError, http.client.HTTPException) as error:
        return Page(url, 0, error=_why(error))
    finally:
        connection.close()
    time = None
    if date:
        with contextlib.suppress(ValueError):
            time = email.utils.parsedate_to_datetime(date)
    return Page(url, answer.status, body, time=time)


def _why(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__
