"""The configuration's keys of recovery: what happens after a failure."""

from __future__ import annotations

from pydantic import Field

from dist_aclgraph.config.section import Section


class RecoveryConfig(Section):
    """How a lost lockstep group is replaced; its requests continue in other groups, or wait."""

    restarts_per_hour: int = Field(
        6,
        ge=0,
        description="how often within an hour it is tried to replace a lost lockstep group, and "
        "how often a lost controller, and how often the process that serves HTTP or the one that "
        "owns the deployment (these two are counted together); 0 replaces none. Starts that fail, "
        "and deaths of the process that serves HTTP soon after its start, are followed by pauses "
        "that double from 1 s. What dies more often has a cause that starting again does not mend: "
        "once none serves and none may be started, the service ends",
    )
    keep_answers: bool = Field(
        True,
        description="whether answers outlive the process that serves HTTP: when it dies, another "
        "one goes on with them, over the same connections. For that the first process of "
        "`dist-aclgraph serve` holds two descriptors of each connection, and each request and its "
        "answer are written to memory. With false, none of this is done: another process still "
        "serves half a second later, but all connections end with the process that died, and "
        "their clients have to ask again",
    )
    exact: bool = Field(
        False,
        description="compute output that a request has already, when it goes on in another group, "
        "token by token as it was computed before, so that it goes on with the same tokens in "
        "bfloat16 and float16, too. For that all steps that decode replay one graph, of "
        "max_num_seqs requests, each prompt runs in steps of its own, and no prefixes are shared",
    )
    resume_s: float = Field(
        20.0,
        ge=0,
        description="how long the devices of a group may take to come back where one of them, or a "
        "link, has failed and all processes live; then the group is replaced. Where processes have "
        "died, the others keep their weights and join another group. 0 replaces all of it at once. "
        "Never tried on hardware, where CANN calls the functions that it takes experimental",
    )
    spares: int = Field(
        0,
        ge=0,
        description="places of so many lockstep groups more are held free, for groups that lose "
        "theirs with a node: the cluster must have NPUs for them as well, and what is scaled does "
        "not take them",
    )
    wait_s: float = Field(
        300.0,
        gt=0,
        description="how long a request waits for a group while none serves, before it ends with "
        "503 and Retry-After",
    )
