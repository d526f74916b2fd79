"""``tools/compare_templates.py`` finds templates whose results differ from those of transformers,
and counts equal results.
"""

from __future__ import annotations

import json

import pytest

from tools.compare_templates import main

LINES = "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"


@pytest.mark.parametrize(
    ("source", "code"), [(LINES, 0), ("{{ strftime_now('%f') }}" + LINES, 1)], ids=["same", "other"]
)
def test_a_folder_and_a_checkpoint_are_compared(tmp_path, capsys, source, code):
    (tmp_path / "one.jinja").write_text(source)
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    described = {"chat_template": source, "bos_token": "<s>"}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(described))

    assert main([str(tmp_path), str(checkpoint)]) == code

    out = capsys.readouterr().out
    assert "2 templates: " in out
    assert (", 0 are different" in out) == (code == 0)
    assert ("one: user, prompt" in out) == (code == 1)
