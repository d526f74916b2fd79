"""The arrays of indices for the convolution of linear attention are compared with a loop over
tokens.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.layers.state_metadata import direct_arrays, prompt_arrays

WIDTH = 4
LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=5)


def walk(lengths: list[int]) -> tuple[list[list[str]], list[list[str]]]:
    """Return the names of the convolution's inputs for each token, and of the last inputs of each
    request.
    """
    inputs, last, token = [], [], 0
    for request, length in enumerate(lengths):
        seen = [f"state {request} {i}" for i in range(WIDTH - 1)]
        for _ in range(length):
            seen.append(f"token {token}")
            token += 1
            inputs.append(seen[-WIDTH:])
        last.append(seen[-WIDTH + 1 :])
    return inputs, last


def row_names(lengths: list[int]) -> np.ndarray:
    """Return the name of each row of the array [all tokens | states]."""
    tokens = [f"token {i}" for i in range(sum(lengths))]
    states = [f"state {i} {j}" for i in range(len(lengths)) for j in range(WIDTH - 1)]
    return np.array(tokens + states)


@given(LENGTHS)
def test_windows_of_direct_requests(lengths: list[int]) -> None:
    bases = np.arange(len(lengths), dtype=np.int32) * 10

    arrays = direct_arrays(bases, np.array(lengths, np.int32), WIDTH)

    assert row_names(lengths)[arrays.windows].tolist() == walk(lengths)[0]
    wanted = [10 * i + t if i else 0 for i, length in enumerate(lengths) for t in range(length)]
    assert arrays.slots.tolist() == wanted  # the first request is padding
    assert all(array.dtype == np.int32 for array in arrays)


@given(LENGTHS)
def test_rows_of_prompts(lengths: list[int]) -> None:
    ones = np.ones(len(lengths), np.int32)

    arrays = prompt_arrays(ones, ones, np.array(lengths, np.int32), ones, WIDTH)

    inputs, last = walk(lengths)
    padded = row_names(lengths)[arrays.padded]
    assert padded[arrays.outputs[:, None] + np.arange(WIDTH)].tolist() == inputs
    assert padded[arrays.tails].reshape(len(lengths), -1).tolist() == last
    assert all(array.dtype == np.int32 for array in arrays)
