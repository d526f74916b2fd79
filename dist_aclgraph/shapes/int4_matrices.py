"""Finds out which matrices of a decoder have four bits, and in how many layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from dist_aclgraph.shapes.int4_formats import Int4Formats, Int4Matrix
from dist_aclgraph.shapes.matrices import EXPERTS, Part, has_part, matrices_of
from dist_aclgraph.shapes.model_spec import ModelSpec


def find_int4_matrices(spec: ModelSpec, formats: Int4Formats) -> tuple[Int4Matrix, ...]:
    """Return the decoder's matrices whose weights have four bits each in at least one layer."""
    if not formats:
        return ()
    found: list[Int4Matrix] = []
    for part, matrices in matrices_of(spec, tp=1, ep=1).items():
        copies = spec.experts.num_experts if part == EXPERTS and spec.experts else 1
        for name in matrices:
            forms = Counter(filter(None, map(formats.of, _stored_names(spec, part, name))))
            found += [Int4Matrix(part, name, form, n / copies) for form, n in forms.items()]
    return tuple(found)


def _stored_names(spec: ModelSpec, part: Part, name: str) -> Iterator[str]:
    """Yield the names that a matrix has in the checkpoint: one name for each layer and expert."""
    names = [name]
    if part == EXPERTS:
        assert spec.experts is not None
        names = [name.replace("*", str(index)) for index in range(spec.experts.num_experts)]
    for index in filter(lambda index: has_part(spec, part, index), range(spec.num_layers)):
        yield from (spec.names.stored(f"model.layers.{index}.{each}.weight") for each in names)
