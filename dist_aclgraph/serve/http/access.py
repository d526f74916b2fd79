"""Decides by headers which requests are allowed: by API key, Host, and the site of a web page.

A page of another site can make a browser send requests to this service. If such a request looks
like a form's request, the browser sends no preflight first. So a POST must be JSON. A POST must not
come from a page of another site, unless ``serve.allowed_origins`` contains the site's origin. The
CORS headers tell browsers which origin is allowed.

The owner of another site's name can also make this name point to this machine (DNS rebinding). So
on loopback without API keys, ``Host`` must not be a name that anybody else can own. Names of this
machine, addresses, and names without a dot (e.g. the name of an nginx upstream) are allowed.
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

# Probes send no key; the status page asks its user for a key.
OPEN_PATHS = ("/health", "/ping", "/ready", "/")
ANY = "*"  # in ``serve.allowed_hosts`` and ``serve.allowed_origins``: allows all
PREFLIGHT_S = 600  # seconds for which a browser may cache a response to OPTIONS
EXPOSED = b"x-request-id, x-ignored-parameters, retry-after"  # headers that pages may read
MIN_KEY_CHARS = 16
MAX_KEYS_BYTES = 1 << 20

Headers = Mapping[bytes, bytes]


@dataclass(frozen=True)
class Access:
    """The rules of access.

    Attributes:
        digests: SHA-256 of each API key; if there are none, requests need no key.
        hosts: names with a dot that the Host header may contain; None allows all names.
        origins: origins of the other sites whose pages may use the API.
    """

    digests: tuple[bytes, ...] = ()
    hosts: frozenset[str] | None = None
    origins: frozenset[str] = frozenset()

    def authorize(self, method: str, path: str, headers: Headers) -> None:
        """Check that the request may be read.

        Raises:
            ForbiddenError: the request names another host, or comes from a page of another site.
            UnauthorizedError: the request needs a key, but has no valid key.
            NotJsonError: the body has another type than JSON, or is encoded.
        """
        host = headers.get(b"host", b"").decode("latin-1")
        if self.hosts is not None and not _may_be(_name(host), self.hosts):
            raise ForbiddenError(
                f"this service is not known as {host[:200]!r}; it may be added to "
                "serve.allowed_hosts"
            )
        if self.digests and path not in OPEN_PATHS:
            self._check_key(headers)
        if method == "POST":
            if self.cors_origin(headers) is None:
                _check_site(headers, host)
            _check_type(headers)

    def cors_origin(self, headers: Headers) -> bytes | None:
        """Return the request's origin if browsers may allow it; otherwise None."""
        origin = headers.get(b"origin")
        if origin is None or ANY in self.origins:
            return ANY.encode() if self.origins and origin is not None else None
        return origin if origin.decode("latin-1").lower() in self.origins else None

    def cors_headers(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """Return the CORS headers of the response to a request."""
        if not self.origins:
            return []
        found = [(b"vary", b"Origin")]
        if (origin := self.cors_origin(headers)) is not None:
            found += [
                (b"access-control-allow-origin", origin),
                (b"access-control-expose-headers", EXPOSED),
            ]
        return found

    def preflight(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """Return the headers of the response to OPTIONS; the caller adds ``cors_headers``.

        Raises:
            ForbiddenError: a browser asks on behalf of a page of another site.
        """
        methods = b"GET, HEAD, POST, OPTIONS"
        found = [(b"allow", methods)]
        if b"access-control-request-method" in headers:
            if self.cors_origin(headers) is None:
                _check_site(headers, headers.get(b"host", b"").decode("latin-1"))
            found += [
                (b"access-control-allow-methods", methods),
                (b"access-control-max-age", b"%d" % PREFLIGHT_S),
            ]
            if asked := headers.get(b"access-control-request-headers"):
                found.append((b"access-control-allow-headers", asked))
        return found

    def _check_key(self, headers: Headers) -> None:
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            key = headers.get(b"x-api-key", b"")
        digest = hashlib.sha256(key.strip()).digest()
        # Every key is compared, so that nobody can guess keys from the time of a response.
        found = [hmac.compare_digest(digest, known) for known in self.digests]
        if not any(found):
            raise UnauthorizedError(
                "the API key is missing or wrong; send it as Authorization: Bearer KEY, or as "
                "X-API-Key: KEY"
            )


def read_access(config: ServeConfig, *, checks_host: bool) -> Access:
    """Read the API keys that the configuration and the environment name.

    Args:
        checks_host: whether clients connect to the address ``serve.host``.

    Raises:
        ConfigError: the keys file cannot be read; or it contains no valid key; or the service would
            be open to anyone who reaches it over a network.
    """
    keys = _read_keys(Path(config.api_keys_file)) if config.api_keys_file else []
    if (key := api_key()) is not None:
        _check_length(key, API_KEY_VARIABLE)
        keys.append(key)
    digests = tuple(hashlib.sha256(key.encode()).digest() for key in keys)
    origins = frozenset(origin.lower().rstrip("/") for origin in config.allowed_origins)
    hosts = frozenset(name.lower() for name in config.allowed_hosts)
    is_limited = bool(hosts) and ANY not in hosts
    if not checks_host or config.uds is not None:
        return Access(digests, None, origins)
    if is_loopback(config.host):
        # Pages of other sites have no key, so ``Host`` needs no check if requests need a key.
        is_limited = is_limited or not (digests or hosts)
        return Access(digests, hosts if is_limited else None, origins)
    if not digests and not config.insecure:
        raise ConfigError(
            f"serve.host is {config.host}, which others can reach, and there is no API key: put "
            f"keys into a file and name it with serve.api_keys_file, or set {API_KEY_VARIABLE}, "
            "or let anyone in with serve.insecure=true"
        )
    return Access(digests, hosts if is_limited else None, origins)


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
    origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
    is_foreign = origin is not None and urlsplit(origin.decode("latin-1")).netloc != host
    # No page can forge the header Sec-Fetch-Site. If clients connect to a proxy, Host may differ
    # from the name that browsers know.
    if site == b"cross-site" or (is_foreign and site != b"same-origin"):
        raise ForbiddenError(
            "requests from pages of other sites are refused; serve.allowed_origins may name them"
        )


def _check_type(headers: Headers) -> None:
    encoding = headers.get(b"content-encoding", b"identity").strip().lower()
    if encoding not in (b"", b"identity"):
        raise NotJsonError(
            f"the body has Content-Encoding {encoding[:100].decode('latin-1')}; send it as it is"
        )
    given = headers.get(b"content-type", b"")
    kind = given.partition(b";")[0].strip().lower()
    if kind and kind != b"application/json" and not kind.endswith(b"+json"):
        raise NotJsonError(
            f"the body is {kind[:100].decode('latin-1')}; send Content-Type: application/json"
        )


def _may_be(name: str, hosts: frozenset[str]) -> bool:
    """Return whether the header ``Host`` may contain this host; see the module's docstring."""
    if "." not in name or name in hosts or name.endswith(".localhost"):
        return True
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _name(host: str) -> str:
    """Return the host of a Host header without the port; IPv6 addresses are in brackets there."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
