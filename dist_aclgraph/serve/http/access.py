"""Access: which requests are allowed, by their headers: API key, Host, and the site of the page.

A page of another site can have a browser send requests to this service, without a preflight where
they look like those of a form. So a POST must be JSON, and must not come from another site. The
owner of another site's name can also point it at this machine (DNS rebinding), so on loopback
``Host`` must be a name of this machine.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from dist_aclgraph.config import ServeConfig
from dist_aclgraph.environment import API_KEY_VARIABLE, api_key
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.serve.openai.errors import ForbiddenError, NotJsonError, UnauthorizedError

# For probes, which have no key, and for the status page, which asks its user for one.
OPEN_PATHS = ("/health", "/ready", "/")
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
MIN_KEY_CHARS = 16
MAX_KEYS_BYTES = 1 << 20

Headers = Mapping[bytes, bytes]


@dataclass(frozen=True)
class Access:
    """The rules of access.

    Attributes:
        digests: SHA-256 of each API key; without any, requests need no key.
        hosts: names that the Host header may have; None allows all.
    """

    digests: tuple[bytes, ...] = ()
    hosts: frozenset[str] | None = None

    def authorize(self, method: str, path: str, headers: Headers) -> None:
        """Return if the request may be read.

        Raises:
            ForbiddenError: it names another host, or a page of another site sends it.
            UnauthorizedError: it has no valid key, and needs one.
            NotJsonError: it has a body of another type.
        """
        host = headers.get(b"host", b"").decode("latin-1")
        if self.hosts is not None and host and _name(host) not in self.hosts:
            raise ForbiddenError(
                f"this service is not known as {host[:200]!r}; it may be added to "
                "serve.allowed_hosts"
            )
        if self.digests and path not in OPEN_PATHS:
            self._check_key(headers.get(b"authorization", b""))
        if method == "POST":
            _check_site(headers, host)
            _check_type(headers.get(b"content-type", b""))

    def _check_key(self, authorization: bytes) -> None:
        scheme, _, key = authorization.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        # Every key is compared, so that the time of an answer tells nothing about the keys.
        found = [hmac.compare_digest(digest, known) for known in self.digests]
        if scheme.lower() != b"bearer" or not any(found):
            raise UnauthorizedError(
                "the API key is missing or wrong; send it as Authorization: Bearer KEY"
            )


def read_access(config: ServeConfig, *, checks_host: bool) -> Access:
    """Read the API keys that the configuration and the environment name.

    Args:
        checks_host: whether ``serve.host`` is the address that clients connect to.

    Raises:
        ConfigError: the file cannot be read or has no proper keys, or the service would be open
            to anyone who reaches it over a network.
    """
    keys = _read_keys(Path(config.api_keys_file)) if config.api_keys_file else []
    if (key := api_key()) is not None:
        _check_length(key, API_KEY_VARIABLE)
        keys.append(key)
    digests = tuple(hashlib.sha256(key.encode()).digest() for key in keys)
    if not checks_host:
        return Access(digests)
    if is_loopback(config.host):
        return Access(digests, frozenset({*LOOPBACK_NAMES, config.host, *config.allowed_hosts}))
    if not digests and not config.insecure:
        raise ConfigError(
            f"serve.host is {config.host}, which others can reach, and there is no API key: put "
            f"keys into a file and name it with serve.api_keys_file, or set {API_KEY_VARIABLE}, "
            "or let anyone in with serve.insecure=true"
        )
    hosts = frozenset(config.allowed_hosts)
    return Access(digests, hosts | {*LOOPBACK_NAMES} if hosts else None)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read_keys(path: Path) -> list[str]:
    try:
        if path.stat().st_size > MAX_KEYS_BYTES:
            raise ConfigError(f"serve.api_keys_file {path} exceeds {MAX_KEYS_BYTES} bytes")
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as e:
        raise ConfigError(f"cannot read serve.api_keys_file {path}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise ConfigError(f"serve.api_keys_file {path} is not text: {e}") from e
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"serve.api_keys_file {path} has no keys; write one on each line")
    for key in keys:
        _check_length(key, f"serve.api_keys_file {path}")
    return keys


def _check_length(key: str, where: str) -> None:
    if len(key) < MIN_KEY_CHARS:
        raise ConfigError(
            f"{where} has a key of {len(key)} characters; keys have at least {MIN_KEY_CHARS}, "
            "as of: openssl rand -hex 16"
        )


def _check_site(headers: Headers, host: str) -> None:
    origin = headers.get(b"origin")
    is_foreign = origin is not None and urlsplit(origin.decode("latin-1")).netloc != host
    if is_foreign or headers.get(b"sec-fetch-site") == b"cross-site":
        raise ForbiddenError("requests from pages of other sites are refused")


def _check_type(given: bytes) -> None:
    kind = given.partition(b";")[0].strip().lower()
    if kind and kind != b"application/json" and not kind.endswith(b"+json"):
        raise NotJsonError(
            f"the body is {kind[:100].decode('latin-1')}; send Content-Type: application/json"
        )


def _name(host: str) -> str:
    """Return a Host header without its port; an IPv6 address is in brackets there."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
