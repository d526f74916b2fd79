"""The configuration's keys of the HTTP service."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from dist_aclgraph.config.section import Section


class AutoscaleConfig(Section):
    """How many lockstep groups serve, depending on the waiting requests."""

    min_groups: int = Field(1, ge=1, le=4096, description="smallest number of serving groups")
    max_groups: int = Field(
        0, ge=0, le=4096, description="largest number of serving groups; 0 turns autoscaling off"
    )
    target_waiting: int = Field(
        8,
        ge=1,
        description="number of waiting requests per group above which another group is started",
    )
    up_s: float = Field(15.0, ge=0, description="how long more requests than that must wait")
    down_s: float = Field(
        300.0,
        ge=0,
        description="how long no request may wait, while half of the other groups would be "
        "enough, before a group is removed",
    )

    @model_validator(mode="after")
    def _check_order(self) -> AutoscaleConfig:
        if self.max_groups and self.max_groups < self.min_groups:
            raise ValueError(
                f"max_groups is {self.max_groups}; it must be at least min_groups "
                f"({self.min_groups}), or 0"
            )
        return self


class ServeConfig(Section):
    """The HTTP service."""

    host: str = Field("127.0.0.1", description="address to bind; loopback by default")
    port: int = Field(8000, ge=1, le=65535, description="port to bind")
    uds: str | None = Field(
        None,
        description="path of a Unix socket to listen at, instead of host and port; for the user "
        "and the group of the service",
    )
    max_body_bytes: int = Field(
        2 << 20,
        ge=1024,
        le=64 << 20,
        description="largest request body. Everything else waits while a body is parsed, about "
        "20 ms for 2 MiB, which hold the ids of 160,000 tokens or more",
    )
    body_s: float = Field(
        60.0,
        gt=0,
        description="limit of sending a body; 60 s allow 2 MiB at 35 kB/s",
    )
    max_bodies_mib: int = Field(
        1024,
        ge=1,
        description="MiB of request bodies that one ingress holds at once; further requests "
        "get a 503. A body counts from its first byte until its request is answered. It counts "
        "twice if recovery.keep_answers lets `dist-aclgraph serve` keep it for another process "
        "as well",
    )
    max_header_bytes: int = Field(
        32 << 10,
        ge=1024,
        le=1 << 20,
        description="largest request line and headers, and largest trailers of a body in "
        "chunks; browsers send less than 16 KiB",
    )
    header_s: float = Field(10.0, gt=0, description="limit of sending the headers of a request")
    stall_s: float = Field(
        60.0,
        gt=0,
        description="a client that reads nothing for so long, while an answer waits, is "
        "disconnected",
    )
    max_connections: int = Field(
        4096,
        ge=1,
        le=65536,
        description="connections at once; each takes a descriptor and at most some 100 KiB",
    )
    api_keys_file: str | None = Field(
        None,
        description="file with one API key per line; every request except /health, /ready and "
        "/ must have one of them. DIST_ACLGRAPH_API_KEY adds one",
    )
    insecure: bool = Field(
        False, description="serve beyond loopback without an API key, to everyone"
    )
    allowed_hosts: tuple[str, ...] = Field(
        (),
        description="further names in the Host header, or *; without keys on loopback, the names "
        "of this machine, addresses, and names without a dot are allowed",
    )
    allowed_origins: tuple[str, ...] = Field(
        (),
        description="origins whose pages may use the API in browsers, such as "
        "https://chat.example.com, or * for all (CORS)",
    )
    strict: bool = Field(
        False,
        description="refuse unknown request fields with a 400. Otherwise they are ignored, and "
        "named in the header X-Ignored-Parameters and once in the log",
    )
    generation_s: float | None = Field(
        None,
        gt=0,
        description="limit of an answer since its request was accepted; then it ends with a "
        "408, or with an error in its stream. null sets no limit",
    )
    drain_s: float = Field(10.0, ge=0, description="how long a stop waits for running requests")
    vllm_metrics: bool = Field(
        False,
        description="expose metrics under vLLM's names, too, for its boards, if they have the "
        "same meaning",
    )
    autoscale: AutoscaleConfig = AutoscaleConfig()
    replicas: int = Field(
        1,
        ge=1,
        le=256,
        description="independent processes that serve HTTP under Ray Serve; `dist-aclgraph "
        "serve` has one",
    )

    @field_validator("host")
    @classmethod
    def _without_brackets(cls, host: str) -> str:
        return host[1:-1] if host.startswith("[") and host.endswith("]") else host

    @model_validator(mode="after")
    def _check_bodies(self) -> ServeConfig:
        if self.max_bodies_mib << 20 < 2 * self.max_body_bytes:
            raise ValueError(
                f"max_bodies_mib is {self.max_bodies_mib}; one body may have max_body_bytes "
                f"({self.max_body_bytes}) and is held twice: raise max_bodies_mib to "
                f"{-(-2 * self.max_body_bytes >> 20)}, or lower max_body_bytes"
            )
        return self
