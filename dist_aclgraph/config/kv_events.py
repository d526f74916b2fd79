"""The configuration keys for events, which report changes of the prefix cache to routers."""

from __future__ import annotations

import ipaddress
from typing import Literal

from pydantic import Field, field_validator, model_validator

from dist_aclgraph.config.ports import PORTS_PATTERN, check_ports, read_ports
from dist_aclgraph.config.section import Section


class KVEventsConfig(Section):
    """Messages about stored and evicted blocks, in vLLM's format."""

    publish: bool = Field(
        False,
        description="publish which blocks each prefix cache stores and evicts, for routers of "
        "llm-d and Dynamo (docs/operate/kv-events.md). The messages contain the tokens of prompts "
        "and answers; blocks of requests with a cache_salt are never published",
    )
    host: str = Field(
        "127.0.0.1",
        description="address at which engines listen for subscribers; 0.0.0.0 and :: mean all "
        "addresses of the host. Connections are neither encrypted nor checked, so an address other "
        "than loopback also needs insecure",
    )
    insecure: bool = Field(
        False,
        description="permit a host other than loopback; then every program that can connect to "
        "host can read the tokens of prompts and answers",
    )
    ports: str = Field(
        "5557-5620",
        pattern=PORTS_PATTERN,
        description="ports of the publishers. On each host, every data parallel rank takes the "
        "first free port",
    )
    replay_ports: str | None = Field(
        "5657-5720",
        pattern=PORTS_PATTERN,
        description="ports at which subscribers request lost messages. A publisher that has the "
        "n-th port of ports replays its messages at the n-th port of replay_ports. null: messages "
        "are not replayed",
    )
    topic: str = Field(
        "",
        max_length=1024,
        description="first frame of each message. llm-d reads the names of the pod and the model "
        "from it: kv@POD@MODEL",
    )
    buffer_steps: int = Field(
        10_000,
        ge=1,
        le=1_000_000,
        description="maximum number of messages that each publisher keeps for replays. A step "
        "sends at most one message. The kept messages have at most 256 MiB together",
    )
    encoding: Literal["array", "map"] = Field(
        "array",
        description="form of an event. array: the form of vLLM up to 0.23, which also older "
        "routers of llm-d and Dynamo read. map: the form of vLLM from 0.24, with field names",
    )

    _check_ports = field_validator("ports", "replay_ports")(check_ports)

    @field_validator("host")
    @classmethod
    def _check_host(cls, host: str) -> str:
        host = host.removeprefix("[").removesuffix("]")
        try:
            return str(ipaddress.ip_address(host))
        except ValueError:
            raise ValueError(
                f"host is {host!r}; it must be an address such as 127.0.0.1, or 0.0.0.0 for all "
                "addresses of the host"
            ) from None

    @model_validator(mode="after")
    def _check_access(self) -> KVEventsConfig:
        address = ipaddress.ip_address(self.host)
        if self.publish and not (address.is_loopback or self.insecure):
            where = "all addresses of the host" if address.is_unspecified else self.host
            raise ValueError(
                f"with host {self.host}, every program that can connect to {where} could read the "
                "tokens of prompts and answers; allow this with insecure=true, or use a loopback "
                "address"
            )
        return self

    @model_validator(mode="after")
    def _check_ranges(self) -> KVEventsConfig:
        ports, replays = self.port_range, self.replay_range
        if replays is None:
            return self
        if len(ports) != len(replays):
            raise ValueError(
                f"ports has {len(ports)} ports and replay_ports has {len(replays)}; each publisher "
                "takes one port of each range, so give both ranges the same number of ports"
            )
        if max(ports[0], replays[0]) <= min(ports[-1], replays[-1]):
            raise ValueError(
                f"ports ({self.ports}) and replay_ports ({self.replay_ports}) have ports in "
                "common; move one of the ranges"
            )
        return self

    @property
    def port_range(self) -> range:
        found = read_ports(self.ports)
        assert found is not None
        return found

    @property
    def replay_range(self) -> range | None:
        return read_ports(self.replay_ports)
