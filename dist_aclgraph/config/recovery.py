"""The configuration keys for recovery. They say what happens after a failure."""

from __future__ import annotations

from pydantic import Field

from dist_aclgraph.config.section import Section


class RecoveryConfig(Section):
    """How a lost lockstep group is replaced, while its requests wait or run in other groups."""

    restarts_per_hour: int = Field(
        6,
        ge=0,
        description="largest number of restarts within an hour. There are three separate counts: "
        "of lost lockstep groups, of lost controllers, and of lost owners of the "
        "deployment. Each loss of a group that has served for 60 s takes an earlier restart "
        "out of the count, so rare losses never use up the restarts. A process that serves "
        "HTTP counts with the owners if it dies before it serves; later, its restarts have "
        "no limit. With 0, nothing is restarted. There "
        "is a pause before a restart after a failed start, and after an early death of the "
        "HTTP process. The first pause is 1 s, and each further pause is twice as long. "
        "Failures above the limit have a cause that a restart does not fix. So if no group "
        "serves and no restart is left, the service ends",
    )
    keep_answers: bool = Field(
        True,
        description="true: answers outlive the process that serves HTTP. If this process dies, "
        "another process continues the answers on the same connections. For this "
        "purpose a supervisor keeps two descriptors of each connection, and each "
        "request and its answer are written to memory. false: `dist-aclgraph serve` "
        "is one process without a supervisor. The death of this process ends the "
        "service, and systemd or Kubernetes has to start the service again",
    )
    exact: bool = Field(
        False,
        description="if a request continues in another group, compute its existing output again, "
        "one token per step, in steps of the same shape as before. So the request "
        "continues with the same tokens, also in bfloat16 and float16. For this "
        "purpose all decode steps replay one graph for max_num_seqs requests, each "
        "prompt runs in separate steps, and requests share no prefixes",
    )
    resume_s: float = Field(
        20.0,
        ge=0,
        description="limit in seconds for the recovery of a group's devices after a device or a "
        "link has failed and no process has died. After this time the group is "
        "replaced. If processes have died, the surviving processes keep their weights "
        "and join a new group. With 0, a group is always replaced at once. This "
        "recovery was not tested on hardware; CANN calls the functions that it uses "
        "experimental",
    )
    spares: int = Field(
        0,
        ge=0,
        description="number of lockstep groups for which places are reserved. A group uses a "
        "reserved place when a node failure takes its own place. The cluster must "
        "have NPUs for the reserved places as well, and scaling does not use these "
        "places",
    )
    wait_s: float = Field(
        300.0,
        gt=0,
        description="how long a request waits while no group serves, in seconds; after this time "
        "it ends with 503 and Retry-After",
    )
