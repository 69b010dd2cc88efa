"""TLS from two files, which may be replaced while the server runs."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NoReturn

from sluiceway.kernel.errors import invalid

_CERTIFICATE = "server.tls_certificate"
_KEY = "server.tls_key"


class TlsFiles:
    """The certificate (with its chain) and its private key, as PEM files.

    `context` stays the same object: a listener that has it serves the certificate loaded last. Raises `invalid_request`, which names the
    file at fault and never shows its content.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        self._certificate, self._key = certificate, key
        self.context = _new_context()
        self.reload()

    def reload(self) -> None:
        """Read the files again. New connections get the new certificate, present ones keep theirs.

        If the files do not match, nothing changes. Raises as the constructor does.
        """
        # A failed load would spoil the context in use, so the files are tested in a new one first.
        self._load_into(_new_context())
        self._load_into(self.context)

    def _load_into(self, context: ssl.SSLContext) -> None:
        certificate = _pem(self._certificate, b"CERTIFICATE", _CERTIFICATE)
        _pem(self._key, b"PRIVATE KEY", _KEY)
        try:
            context.load_cert_chain(self._certificate, self._key, password=self._no_password)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise invalid(_KEY, f"{self._key} is not the private key of the certificate in {self._certificate}") from None
            field, path = (_KEY, self._key) if _is_sound(certificate) else (_CERTIFICATE, self._certificate)
            raise invalid(field, f"{path} is damaged or not supported by OpenSSL: {error.reason}") from None

    def _no_password(self) -> NoReturn:
        raise invalid(_KEY, f"{self._key} is encrypted; use a key without a password that only the server can read")


def _new_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _pem(path: Path, kind: bytes, field: str) -> bytes:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise invalid(field, f"{path} cannot be read: {error.strerror}") from None
    if b"-----BEGIN " not in text or kind + b"-----" not in text:
        raise invalid(field, f"{path} has no {kind.decode().lower()} in PEM form")
    return text


def _is_sound(certificate: bytes) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=certificate.decode("ascii", "replace"))
    except (ssl.SSLError, ValueError):
        return False
    return True
