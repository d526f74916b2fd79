"""Makes embeddings from a model's hidden states."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dist_aclgraph.sampling import SamplingParams

# Parameters of a request for a hidden state. The engine samples one token, which is not used.
EMBEDDING = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, returns_embedding=True)
SMALLEST_NORM = 1e-12  # avoids a division by zero, so that a state of zeros stays zero


def embeddings_of(
    states: Sequence[bytes], *, dimensions: int | None, normalizes: bool
) -> npt.NDArray[np.float32]:
    """Return the embeddings of hidden states, [n, dimensions].

    Args:
        states: the hidden states; each is float32 [hidden].
        dimensions: number of elements of an embedding, which are the first elements of a state.
            None means all elements.
        normalizes: whether each embedding is divided by its Euclidean norm, after ``dimensions``
            was applied.
    """
    found = np.frombuffer(b"".join(states), "<f4").reshape(len(states), -1)[:, :dimensions]
    if normalizes:
        norms = np.linalg.norm(found.astype(np.float64), axis=1, keepdims=True)
        found = found / np.maximum(norms, SMALLEST_NORM)
    return found.astype(np.float32)
