"""The configuration's keys of recovery: what happens after a failure."""

from __future__ import annotations

from pydantic import Field

from dist_aclgraph.config.section import Section


class RecoveryConfig(Section):
    """How a lost lockstep group is replaced; its requests continue in other groups, or wait."""

    restarts_per_hour: int = Field(
        6,
        ge=0,
        description="limit of attempts within an hour, separately for three things: replacing "
        "a lost lockstep group; replacing a lost controller; and replacing the process that "
        "serves HTTP or the owner of the deployment, counted together. 0 replaces none. After "
        "failed starts, and after deaths of the HTTP process soon after its start, pauses "
        "double from 1 s. More frequent failures have a cause that a restart does not fix: if "
        "no group serves and no restart is allowed, the service ends",
    )
    keep_answers: bool = Field(
        True,
        description="whether answers outlive the process that serves HTTP: when it dies, "
        "another one continues them on the same connections. For this, a supervisor holds two "
        "descriptors of each connection, and each request and its answer are written to memory. "
        "With false, `dist-aclgraph serve` is one process without a supervisor. Its death ends the "
        "service, and systemd or Kubernetes has to start it again",
    )
    exact: bool = Field(
        False,
        description="compute the existing output of a request that continues in another group "
        "token by token, as before, so that it continues with the same tokens in bfloat16 and "
        "float16, too. For this, all decode steps replay one graph, of max_num_seqs requests, "
        "each prompt runs in steps of its own, and no prefixes are shared",
    )
    resume_s: float = Field(
        20.0,
        ge=0,
        description="limit of the recovery of a group's devices after a device or a link has "
        "failed and all processes live; then the group is replaced. If processes have died, the "
        "others keep their weights and join another group. 0 always replaces the group at once. "
        "Not tried on hardware, where CANN calls the functions for this experimental",
    )
    spares: int = Field(
        0,
        ge=0,
        description="number of lockstep groups whose places are held free, for groups that "
        "lose theirs with a node. The cluster must have NPUs for them as well, and scaling does "
        "not use them",
    )
    wait_s: float = Field(
        300.0,
        gt=0,
        description="how long a request waits while no group serves, before it ends with 503 "
        "and Retry-After",
    )
