"""All questions. Harmless questions are asked first; the last questions may stop the device or the
machine.
"""

from __future__ import annotations

from dist_aclgraph.errors import ConfigError
from dist_aclgraph.probe.question import Level, Probe
from dist_aclgraph.probe.questions import (
    aborts,
    attention_rules,
    collectives,
    facts,
    graphs,
    int4,
    latent_prologue,
    limits,
    memory,
    model_calls,
    operators,
    rules,
    shortcuts,
    sparse_and_linear,
    strided,
)

PROBES: tuple[Probe, ...] = (
    *facts.PROBES,
    *operators.PROBES,
    *model_calls.PROBES,
    *sparse_and_linear.PROBES,
    *int4.PROBES,
    *latent_prologue.PROBES,
    *memory.PROBES,
    *attention_rules.PROBES,
    *rules.PROBES,
    *limits.PROBES,
    *shortcuts.PROBES,
    *strided.PROBES,
    *graphs.PROBES,
    *collectives.PROBES,
    *aborts.PROBES,
)


def probes_of(level: Level) -> list[Probe]:
    """Return the questions of a level, in their order."""
    return [probe for probe in PROBES if level == "full" or probe.level == "quick"]


def probe_named(name: str) -> Probe:
    """Return the question of this name.

    Raises:
        ConfigError: there is no such question.
    """
    found = next((probe for probe in PROBES if probe.name == name), None)
    if found is None:
        raise ConfigError(f"there is no question {name}")
    return found
