"""Reads the recorded steps of a group's ranks, and finds out which rank stopped first, and where.

If a rank waits for its device, the device may wait for other ranks in a collective. So if some
ranks do not wait for their devices, the rank to blame is among them. ``wire/blame.py`` has the same
rule.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from dist_aclgraph.actors.worker.step_recorder import (
    BEGUN,
    COMMAND,
    ENDED,
    FAILED,
    IDLE,
    STAGES,
    WAITS,
    DevicePlace,
    RecordedStep,
    RecordedSteps,
)

ENGINE_GONE = "EngineDeadError"
MIN_STEPS = 16  # the waits of ranks are compared only after this number of steps
# The slowest rank waits least, because the other ranks wait for it. A rank is slow if its wait is
# less than this fraction of the wait of every other rank.
SLOW = 0.5


@dataclass(frozen=True)
class Explanation:
    """The reason why a group stopped.

    Attributes:
        blamed: the ranks that caused the stop; empty if the engine is the cause, or if the cause is
            unknown.
        sentence: what the blamed ranks did, and what the other ranks waited for.
    """

    blamed: tuple[int, ...]
    sentence: str


def explain_stop(recordings: Sequence[RecordedSteps]) -> Explanation:
    """Return why a group stopped. ``recordings`` contains one recording of each rank."""
    found = _explain(recordings)
    if all(doing_of(recording) == IDLE for recording in recordings):
        return found  # all steps have ended, so no device causes the stop
    return Explanation(found.blamed, found.sentence + _on_devices(recordings))


def _explain(recordings: Sequence[RecordedSteps]) -> Explanation:
    for rule in (_another_plan, _without_a_word, _failed, _behind, _not_waiting):
        if (found := rule(recordings)) is not None:
            return found
    if all(doing_of(recording) == IDLE for recording in recordings):
        return _slow(recordings) or Explanation((), _idle(recordings))
    return _stalled(recordings)


def _stalled(recordings: Sequence[RecordedSteps]) -> Explanation:
    """If all ranks wait for their devices, blame the ranks whose devices are behind the others."""
    waited = f"all ranks waited for their devices {_in_step(_last(recordings))}: "
    places = _by_place(recordings)
    if len(places) > 1 and all(recording.place for recording in recordings):
        _, first = places[0]
        return _blame(first, f"{waited}{_names(first)} stalled, and the others waited for it")
    hint = "" if places else "; logging.record_collectives=true would tell layer and collective"
    return Explanation(
        (),
        f"{waited}a link or a device stalled, or all ranks waited in a collective for one of "
        f"them{hint}",
    )


def _by_place(recordings: Sequence[RecordedSteps]) -> list[tuple[DevicePlace, list[RecordedSteps]]]:
    """Group the ranks by the step and the collective that their devices have reached. The group
    whose devices are furthest behind comes first.
    """
    ranks: defaultdict[DevicePlace, list[RecordedSteps]] = defaultdict(list)
    for recording in recordings:
        if recording.place is not None:
            ranks[recording.place].append(recording)
    return sorted(ranks.items(), key=lambda item: item[0])


def _on_devices(recordings: Sequence[RecordedSteps]) -> str:
    found = [f"{_names(ranks)} {place}" for place, ranks in _by_place(recordings)]
    return f"; the last collectives that devices began: {'; '.join(found)}" if found else ""


def _idle(recordings: Sequence[RecordedSteps]) -> str:
    last = _last(recordings)
    when = "before the first step" if last < 0 else f"after step {last}"
    if all(recording.state == ENDED for recording in recordings):
        return f"no rank stopped by itself: all ranks were told to stop {when}"
    return f"no rank was at work: the engine sent nothing {when}"


def doing_of(recording: RecordedSteps) -> str:
    """Return a rank's last state. If the rank was told to stop, return the state that the rank had
    before.
    """
    return recording.words if recording.state == ENDED else recording.state


def status_of(recording: RecordedSteps) -> str:
    """Return a text that says what the rank did last."""
    if recording.state == FAILED:
        return f"failed: {recording.words}"
    words = _words_of(doing_of(recording), recording)
    return f"{words}, until it was told to stop" if recording.state == ENDED else words


def step_of(recording: RecordedSteps) -> int:
    """Return the number of the last step that a rank has begun; -1 if it has begun none."""
    return recording.steps[-1].step if recording.steps else -1


def _words_of(state: str, recording: RecordedSteps) -> str:
    if state == WAITS:
        return "waits for its device"
    if state == IDLE:
        return "waits for a plan"
    if state == COMMAND:
        return (
            f"is stuck in {recording.words}" if recording.state == COMMAND else "was in a command"
        )
    if state == BEGUN:
        return "is stuck on its host, before the end of a step's first stage"
    return f"is stuck on its host, after the stage {state}"


def _last(recordings: Sequence[RecordedSteps]) -> int:
    return max(map(step_of, recordings))


def _in_step(step: int) -> str:
    return "before the first step" if step < 0 else f"in step {step}"


def _names(recordings: Sequence[RecordedSteps]) -> str:
    return f"rank {', '.join(str(recording.rank) for recording in recordings)}"


def _blame(found: Sequence[RecordedSteps], sentence: str) -> Explanation:
    return Explanation(tuple(recording.rank for recording in found), sentence)


def _another_plan(recordings: Sequence[RecordedSteps]) -> Explanation | None:
    """Find a step for which most ranks got the same plan and batch. Blame the other ranks.

    Batches are compared only among the ranks of one data-parallel rank.
    """
    of_rank = [
        {(step.epoch, step.step): step for step in recording.steps} for recording in recordings
    ]
    common = sorted(set.intersection(*map(set, of_rank)) if of_rank else set())
    for key in common:
        pairs = [(r, steps[key]) for r, steps in zip(recordings, of_rank, strict=True)]
        odd = _unlike_most([(r, step.digest) for r, step in pairs])
        for dp_rank in sorted({step.dp_rank for _, step in pairs}):
            odd += _unlike_most([(r, s.batch_digest) for r, s in pairs if s.dp_rank == dp_rank])
        if odd:
            names = _names(odd)
            return _blame(odd, f"{names} got another plan of step {key[1]} than the other ranks")
    return None


def _unlike_most(digests: Sequence[tuple[RecordedSteps, int]]) -> list[RecordedSteps]:
    """Return the recordings whose digest differs from the digest of most recordings."""
    ((most, _), *_) = Counter(digest for _, digest in digests).most_common()
    return [recording for recording, digest in digests if digest != most]


def _without_a_word(recordings: Sequence[RecordedSteps]) -> Explanation | None:
    """Blame ranks that recorded neither FAILED nor ENDED, if other ranks recorded one of these
    states.
    """
    silent = [r for r in recordings if r.state not in (ENDED, FAILED)]
    if not silent or len(silent) == len(recordings):
        return None
    found = _behind(silent) or _not_waiting(silent)
    blamed = [r for r in silent if found is None or r.rank in found.blamed]
    where = "; ".join(
        f"{_in_step(step_of(r))}, rank {r.rank} {_words_of(r.state, r)}" for r in blamed
    )
    return _blame(
        blamed,
        f"{_names(blamed)} ended or hangs without a word ({where}); the others waited for it",
    )


def _failed(recordings: Sequence[RecordedSteps]) -> Explanation | None:
    """Blame the rank that failed first."""
    failed = sorted((r for r in recordings if r.state == FAILED), key=lambda r: r.at_ns)
    if not failed:
        return None
    if all(r.words.startswith(ENGINE_GONE) for r in failed):
        return Explanation((), f"the engine ended without a word after step {_last(recordings)}")
    first = next(r for r in failed if not r.words.startswith(ENGINE_GONE))
    return _blame(
        [first], f"rank {first.rank} failed first, {_in_step(step_of(first))}: {first.words}"
    )


def _behind(recordings: Sequence[RecordedSteps]) -> Explanation | None:
    """Blame the ranks whose last step is earlier than the last step of other ranks."""
    last = _last(recordings)
    behind = [recording for recording in recordings if step_of(recording) < last]
    if not behind:
        return None
    where = "; ".join(f"rank {r.rank} {_words_of(doing_of(r), r)}" for r in behind)
    return _blame(behind, f"{_names(behind)} never began step {last}: {where}")


def _not_waiting(recordings: Sequence[RecordedSteps]) -> Explanation | None:
    """If some ranks wait for their devices, blame the ranks whose hosts are stuck."""
    odd = [r for r in recordings if doing_of(r) not in (WAITS, IDLE)]
    if not odd or (len(odd) == len(recordings) and len(odd) > 1):
        return None
    where = "; ".join(f"rank {r.rank} {_words_of(doing_of(r), r)}" for r in odd)
    others = "; the other ranks waited for it" if len(odd) < len(recordings) else ""
    return _blame(odd, f"{_in_step(_last(recordings))}, {where}{others}")


def _slow(recordings: Sequence[RecordedSteps]) -> Explanation | None:
    """If all ranks stopped gracefully, blame a rank for which the other ranks waited."""
    waits = [mean_wait_us(recording) for recording in recordings]
    known = [wait for wait in waits if wait is not None]
    if len(known) < len(recordings) or len(known) < 2:
        return None
    shortest = min(known)
    others = sorted(known)[1:]
    if shortest >= SLOW * others[0]:
        return None
    rank = recordings[known.index(shortest)].rank
    return Explanation(
        (rank,),
        f"no rank stopped; the others waited {others[0] / 1e3:.2f} ms per step or more for their "
        f"devices, and rank {rank} {shortest / 1e3:.2f} ms: rank {rank} is slow",
    )


def mean_wait_us(recording: RecordedSteps) -> float | None:
    """Return a rank's mean wait for the results of a step, in microseconds; None if there were too
    few steps.
    """
    waits = [wait for step in recording.steps if (wait := _wait_us(step)) is not None]
    return sum(waits) / len(waits) if len(waits) >= MIN_STEPS else None


def _wait_us(step: RecordedStep) -> int | None:
    if "read" not in step.laps_us:
        return None
    before = [step.laps_us[stage] for stage in STAGES[:-1] if stage in step.laps_us]
    return max(0, step.laps_us["read"] - max(before, default=0))
