"""The configuration keys for the HTTP service."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from dist_aclgraph.config.ports import MAX_PORT
from dist_aclgraph.config.section import Section


class AutoscaleConfig(Section):
    """The rule that adds and removes lockstep groups, depending on the waiting requests."""

    min_groups: int = Field(1, ge=1, le=4096, description="smallest number of serving groups")
    max_groups: int = Field(
        0, ge=0, le=4096, description="largest number of serving groups; 0 turns autoscaling off"
    )
    target_waiting: int = Field(
        8,
        ge=1,
        description="another group is started if more than this number of requests per group wait",
    )
    up_s: float = Field(
        15.0,
        ge=0,
        description="number of seconds for which more than "
        "target_waiting requests per group must wait "
        "before another group is started",
    )
    down_s: float = Field(
        300.0,
        ge=0,
        description="a group is removed if two conditions were met for this number of seconds: no "
        "request waited, and half of the other groups would have been enough",
    )

    @model_validator(mode="after")
    def _check_order(self) -> AutoscaleConfig:
        if self.max_groups and self.max_groups < self.min_groups:
            raise ValueError(
                f"max_groups is {self.max_groups}; it must be at least min_groups "
                f"({self.min_groups}), or 0"
            )
        return self


ToolFormat = Literal[
    "auto",
    "none",
    "gpt_oss",
    "kimi_k2",
    "minimax_m2",
    "deepseek_v32",
    "deepseek_v3",
    "deepseek_v31",
    "hy_v3",
    "glm45",
    "glm4",
    "mistral",
    "phi4_mini_json",
    "granite",
    "cohere2",
    "apertus",
    "hunyuan",
    "olmo3",
    "seed_oss",
    "qwen3_coder",
    "hermes",
    "pythonic",
    "llama3_json",
]


class ServeConfig(Section):
    """The HTTP service."""

    host: str = Field(
        "127.0.0.1", description="address at which the service listens; the default is loopback"
    )
    port: int = Field(8000, ge=1, le=MAX_PORT, description="port at which the service listens")
    uds: str | None = Field(
        None,
        description="path of a Unix socket at which the service listens instead of host and port. "
        "Only the user and the group of the service can connect",
    )
    max_body_bytes: int = Field(
        2 << 20,
        ge=1024,
        le=64 << 20,
        description="largest request body in bytes. All other requests wait while a body is "
        "parsed; this takes about 20 ms for 2 MiB. 2 MiB are enough for the ids of "
        "160,000 tokens",
    )
    body_s: float = Field(
        60.0,
        gt=0,
        description="limit in seconds for sending a body. In 60 s, a client that sends 35 kB/s "
        "can send 2 MiB",
    )
    max_bodies_mib: int = Field(
        1024,
        ge=1,
        description="limit in MiB of all request bodies in one ingress; requests above the limit "
        "get a 503. A body counts from its first byte until its request is answered. "
        "Under `dist-aclgraph serve` with recovery.keep_answers, a body counts twice, "
        "because it is also kept for the next ingress. The journals of answers count, too; if more "
        "than half of the limit is used, further answers do not outlive their ingress",
    )
    max_header_bytes: int = Field(
        32 << 10,
        ge=1024,
        le=1 << 20,
        description="largest size in bytes of request line and headers together, and of the "
        "trailers of a chunked body; browsers send less than 16 KiB",
    )
    header_s: float = Field(
        10.0, gt=0, description="limit in seconds for sending the headers of a request"
    )
    keep_alive_s: float = Field(
        5.0,
        gt=0,
        description="a connection without a request is closed after this number of seconds. If a "
        "reverse proxy keeps connections to this server, set a longer time than the proxy's own "
        "limit; otherwise the proxy may send a request while the connection is closed",
    )
    stall_s: float = Field(
        60.0,
        gt=0,
        description="a client is disconnected if it reads nothing for this number of seconds "
        "while data waits for it",
    )
    max_connections: int = Field(
        4096,
        ge=1,
        le=65536,
        description="largest number of open connections; each connection needs a descriptor and "
        "at most about 100 KiB",
    )
    api_keys_file: str | None = Field(
        None,
        description="file with one API key per line. Every request must have one of these keys, "
        "except requests for /health, /ready and /. After the key, a line may have a name for "
        "logs and limits: name=NAME requests_per_minute=N running=N. A change of the file takes "
        "effect within a second. Other users must not be able to read or change the file. The "
        "environment variable DIST_ACLGRAPH_API_KEY adds one key",
    )
    insecure: bool = Field(
        False,
        description="serve everyone without an API key, also at addresses other than loopback",
    )
    allowed_hosts: tuple[str, ...] = Field(
        (),
        description="additional names that are accepted in the Host header, or * for any name. "
        "Without API keys on loopback, the names of this machine, addresses, and "
        "names without a dot are always accepted",
    )
    allowed_origins: tuple[str, ...] = Field(
        (),
        description="origins whose web pages may use the API in a browser (CORS), such as "
        "https://chat.example.com, or * for all origins",
    )
    strict: bool = Field(
        False,
        description="true: a request with unknown fields is refused with a 400. false: unknown "
        "fields are ignored; the response's header X-Ignored-Parameters names these "
        "fields, and the log names each field once",
    )
    tool_format: ToolFormat = Field(
        "auto",
        description="how the model writes calls of tools. auto: chosen by the checkpoint's chat "
        "template. none: calls stay text",
    )
    reasoning_format: Literal["auto", "none", "think"] = Field(
        "auto",
        description="markers of the model's reasoning. auto: chosen by the checkpoint's chat "
        "template. none: reasoning stays a part of the content. think: <think> and </think>",
    )
    generation_s: float | None = Field(
        None,
        gt=0,
        description="limit in seconds of an answer, counted from the acceptance of its request. "
        "An answer that exceeds the limit ends with a 408, or with an error in its "
        "stream. null means no limit",
    )
    drain_s: float = Field(
        10.0, ge=0, description="how long a stop waits for running requests, in seconds"
    )
    vllm_metrics: bool = Field(
        False,
        description="show metrics also under the names of vLLM's metrics with the same meaning, "
        "for vLLM's dashboards",
    )
    traces: str | None = Field(
        None,
        pattern=r"^https?://[^\s]+$",
        description="URL of an OpenTelemetry collector (OTLP over HTTP), such as "
        "http://127.0.0.1:4318/v1/traces, which gets one span per request, with a child for each "
        "phase. This needs the extra otel: pip install 'dist-aclgraph[otel]'. null: no traces",
    )
    autoscale: AutoscaleConfig = AutoscaleConfig()
    replicas: int = Field(
        1,
        ge=1,
        le=256,
        description="number of independent processes that serve HTTP. Under `dist-aclgraph serve`, "
        "process i listens at serve.port + i (with serve.uds, process 0 at the path, and process i "
        "at the path with the suffix .i), and limits such as max_connections apply to each process",
    )

    def of_replica(self, index: int) -> ServeConfig:
        """Return the configuration of one process of `dist-aclgraph serve`, with the address of
        this process.
        """
        if not index:
            return self
        uds = None if self.uds is None else f"{self.uds}.{index}"
        return self.model_copy(update={"port": self.port + index, "uds": uds})

    @field_validator("host")
    @classmethod
    def _without_brackets(cls, host: str) -> str:
        return host[1:-1] if host.startswith("[") and host.endswith("]") else host

    @model_validator(mode="after")
    def _check_ports(self) -> ServeConfig:
        if self.uds is None and (last := self.port + self.replicas - 1) > MAX_PORT:
            raise ValueError(
                f"port is {self.port} and replicas is {self.replicas}, so the last port would be "
                f"{last}, above {MAX_PORT}; choose a smaller port"
            )
        return self

    @model_validator(mode="after")
    def _check_bodies(self) -> ServeConfig:
        if self.max_bodies_mib << 20 < 2 * self.max_body_bytes:
            raise ValueError(
                f"max_bodies_mib is {self.max_bodies_mib}; one body may have max_body_bytes "
                f"({self.max_body_bytes}) and is held twice: raise max_bodies_mib to "
                f"{-(-2 * self.max_body_bytes >> 20)}, or lower max_body_bytes"
            )
        return self
