"""Authentication of the cluster of a run: certificates, secrets, and addresses that need neither."""

from __future__ import annotations

import ipaddress
import os

from distributed.security import Security

from dasksc._compat.distributed import ssl_contexts
from dasksc.errors import InputError, WrongTypeError
from dasksc.storage.safety.permissions import exposure

__all__ = ["LOOPBACK", "SECRET_FILE", "is_loopback", "refuse_untrusted", "secured", "temporary_certificates"]

LOOPBACK = ("127.0.0.1", "localhost", "::1")

_ROLES = ("client", "scheduler", "worker")
# Text for error messages: the file to pass as `security`, and the command that creates it.
SECRET_FILE = (
    "the path of a file that every rank can open but other users cannot read, made by "
    "openssl req -x509 -newkey rsa:2048 -nodes -days 30 -subj /CN=dasksc -keyout ranks.pem -out ranks.pem"
)


def temporary_certificates() -> Security:
    """Create certificates for this run, kept in memory."""
    try:
        return Security.temporary()
    except ImportError as error:
        raise InputError(
            "connections on a host other than loopback are encrypted, but the package cryptography is not installed. "
            "Run pip install 'dasksc[cluster]', or give certificates with security="
        ) from error


def secured(given: object) -> Security | None:
    """Return the certificates given by the user; raise an error for a file that other users can access."""
    if given is None:
        return None
    if isinstance(given, Security):
        security, what = given, "security"
    elif isinstance(given, str | os.PathLike):
        path = os.path.abspath(os.path.expanduser(os.fspath(given)))
        what = f"security={path!r}"
        try:
            complaint = exposure(os.stat(path))
        except OSError as error:
            raise InputError(f"{what} cannot be read ({error}). Give {SECRET_FILE}") from error
        if complaint is not None:
            raise InputError(
                f"{what} is not secret: {complaint}. Others may have read it, so do not use it. Give {SECRET_FILE}"
            )
        fields = {f"tls_{role}_{part}": path for role in _ROLES for part in ("cert", "key")}
        security = Security(require_encryption=True, tls_ca_file=path, **fields)
    else:
        raise WrongTypeError(f"security={given!r} is neither a distributed.Security nor a path. Give {SECRET_FILE}")
    try:
        contexts = ssl_contexts(security, _ROLES)
    except OSError as error:  # Includes ssl.SSLError.
        raise InputError(
            f"{what} does not contain a private key and the matching certificate ({error}). Give {SECRET_FILE}"
        ) from error
    if None in contexts:
        raise InputError(
            f"{what} has no certificates (tls_ca_file, tls_scheduler_cert, ...): {given!r}. Give {SECRET_FILE}"
        )
    return security


def refuse_untrusted(address: str, security: Security | None) -> None:
    """Raise `ValueError` if the address of a scheduler, read from the store of the ranks, is not to be trusted.

    Any process may have written the address. Without `security`, it must be loopback; with `security`, it must begin
    with ``tls://``.
    """
    host = address.rpartition("://")[2].rpartition(":")[0].strip("[]")
    if security is None and not (host in LOOPBACK or is_loopback(host)):
        raise ValueError("the address is not on loopback, so this rank needs security=")
    if security is not None and not address.startswith("tls://"):
        raise ValueError("the address does not begin with tls://, but security= on this rank requires encryption")


def is_loopback(address: str) -> bool:
    """Return True if `address` is a loopback IP address; False for any host name, even ``localhost``."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # Not an address.
        return False
