"""Decides which requests are allowed. The decision depends on three values in the headers: the API
key, the host, and the site of the web page that sends the request.

A page of another site can make a browser send requests to this service. The browser sends no
preflight before a request that an HTML form could also send. A form cannot send JSON, so a POST
must be JSON. A POST from a page of another site is refused, unless ``serve.allowed_origins``
contains the site's origin. The CORS headers tell browsers which origin is allowed.

The owner of a domain can let the domain's name point to this machine (DNS rebinding). So if the
service listens on loopback and has no API keys, ``Host`` must not be a name that another person may
own. ``Host`` may be a name of this machine, an address, or a name without a dot (e.g. the name of
an nginx upstream).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from dist_aclgraph.config import ServeConfig
from dist_aclgraph.environment import API_KEY_VARIABLE, api_key
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.serve.http.api_keys import ApiKey, ApiKeys, check_length
from dist_aclgraph.serve.openai.errors import ForbiddenError, NotJsonError, UnauthorizedError

# Paths that need no key: probes send no key, and the status page asks its user for a key.
OPEN_PATHS = ("/health", "/ping", "/ready", "/")
ANY = "*"  # this entry of serve.allowed_hosts or allowed_origins allows all hosts or all origins
PREFLIGHT_S = 600  # seconds for which a browser may cache a response to OPTIONS
EXPOSED = b"x-request-id, x-ignored-parameters, retry-after"  # headers that pages may read

Headers = Mapping[bytes, bytes]


@dataclass(frozen=True)
class Access:
    """The rules of access.

    Attributes:
        keys: the API keys; None if requests need no key.
        hosts: names with a dot that the Host header may contain, in addition to the names that are
            always allowed. None allows all names.
        origins: origins of the other sites whose pages may use the API.
    """

    keys: ApiKeys | None = None
    hosts: frozenset[str] | None = None
    origins: frozenset[str] = frozenset()

    def authorize(self, method: str, path: str, headers: Headers) -> ApiKey | None:
        """Check that the request may be read.

        Returns:
            The request's key; None if the request needs no key.

        Raises:
            ForbiddenError: the request names a host, or comes from a site, that is not allowed.
            UnauthorizedError: the request needs a key, but has no valid key.
            NotJsonError: the body is not JSON, or is compressed.
        """
        host = headers.get(b"host", b"").decode("latin-1")
        if self.hosts is not None and not _may_be(_name(host), self.hosts):
            raise ForbiddenError(
                f"this service is not known as {host[:200]!r}; it may be added to "
                "serve.allowed_hosts"
            )
        key = None
        if self.keys is not None and path not in OPEN_PATHS:
            key = _check_key(self.keys, headers)
        if method == "POST":
            if self.cors_origin(headers) is None:
                _check_site(headers, host)
            _check_type(headers)
        return key

    def cors_origin(self, headers: Headers) -> bytes | None:
        """Return the origin that the response names as allowed; None if the pages of the request's
        origin may not use the API.
        """
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

    def preflight(self, headers: Headers, methods: bytes) -> list[tuple[bytes, bytes]]:
        """Return the headers of the response to OPTIONS; the caller adds ``cors_headers``.

        Args:
            methods: the methods that the request's path supports, as in the header Allow.

        Raises:
            ForbiddenError: the browser sends OPTIONS on behalf of a page whose site is not allowed.
        """
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


def read_access(config: ServeConfig, *, checks_host: bool) -> Access:
    """Read the API keys from the keys file and from the environment.

    Args:
        checks_host: whether clients connect to the address ``serve.host``.

    Raises:
        ConfigError: the keys file cannot be used, or the service has no keys and would be reachable
            over a network.
    """
    path = Path(config.api_keys_file).absolute() if config.api_keys_file else None
    fixed: tuple[ApiKey, ...] = ()
    if (key := api_key()) is not None:
        check_length(key, API_KEY_VARIABLE)
        fixed = (ApiKey.of(key, API_KEY_VARIABLE),)
    keys = ApiKeys(path, fixed) if path is not None or fixed else None
    origins = frozenset(origin.lower().rstrip("/") for origin in config.allowed_origins)
    hosts = frozenset(name.lower() for name in config.allowed_hosts)
    is_limited = bool(hosts) and ANY not in hosts
    if not checks_host or config.uds is not None:
        return Access(keys, None, origins)
    if is_loopback(config.host):
        # If requests need a key, ``Host`` needs no check, because pages of other sites have no key.
        is_limited = is_limited or not (keys or hosts)
        return Access(keys, hosts if is_limited else None, origins)
    access = Access(keys, hosts if is_limited else None, origins)
    check_exposure(access, config, "serve.host", config.host)
    return access


def check_exposure(access: Access, config: ServeConfig, name: str, host: str) -> None:
    """Raise an error if a service without keys listens at an address that a network can reach.

    Args:
        name: the setting that has the value ``host``.

    Raises:
        ConfigError: the message says how to protect the service.
    """
    if not (is_loopback(host) or access.keys or config.insecure):
        raise ConfigError(
            f"{name} is {host}, which others can reach, and there is no API key: put keys into a "
            f"file and name it with serve.api_keys_file, or set {API_KEY_VARIABLE}, or let anyone "
            "in with serve.insecure=true"
        )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_key(keys: ApiKeys, headers: Headers) -> ApiKey:
    scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"bearer":
        given = headers.get(b"x-api-key", b"")
    if (key := keys.find(given)) is None:
        raise UnauthorizedError(
            "the API key is missing or wrong; send it as Authorization: Bearer KEY, or as "
            "X-API-Key: KEY"
        )
    return key


def _check_site(headers: Headers, host: str) -> None:
    origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
    is_foreign = origin is not None and urlsplit(origin.decode("latin-1")).netloc != host
    # A browser may send the header Sec-Fetch-Site, which no page can forge. If its value is
    # cross-site or same-origin, this value decides. Otherwise the headers Origin and Host are
    # compared. This comparison can fail if a proxy changes Host.
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
    """Return the host of a Host header, without the port and without the brackets of IPv6."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
