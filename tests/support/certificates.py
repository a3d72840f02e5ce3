"""Certificates for this machine, made by an authority of the tests' own that nobody else trusts."""

import ssl
from pathlib import Path

import trustme

_NAMES = ("localhost", "127.0.0.1")


def certificate_file(folder: Path) -> Path:
    """A file with a key, its certificate and the authority's: what a server shows, and what a client trusts."""
    authority = trustme.CA()
    made = folder / "cert.pem"
    shown = authority.issue_cert(*_NAMES).private_key_and_cert_chain_pem.bytes()
    made.write_bytes(shown + authority.cert_pem.bytes())
    return made


def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's context, and that of the one client that trusts it."""
    authority = trustme.CA()
    serving, trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert(*_NAMES).configure_cert(serving)
    authority.configure_trust(trusting)
    return serving, trusting
