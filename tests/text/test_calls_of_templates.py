"""``tools/calls_of_templates.py`` finds templates whose calls the chosen format cannot read."""

from __future__ import annotations

import pytest

from tools.calls_of_templates import CALLS, main

TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n{{ CALL }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
HERMES = "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}"
CODER = (
    "<function={{ c.function.name }}>\n{% for k, v in c.function.arguments | items %}"
    "<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}"
    "</function>"
)


@pytest.mark.parametrize(
    ("call", "num_problems"), [(HERMES, 0), (CODER, 0), ("{{ c.function | string }}", 10)]
)
def test_calls_are_read_as_the_template_writes_them(tmp_path, capsys, call, num_problems):
    (tmp_path / "one.jinja").write_text(TURNS.replace("{{ CALL }}", call))

    code = main([str(tmp_path)])

    num_read = 2 * len(CALLS) - num_problems
    assert capsys.readouterr().out.endswith(
        f"1 templates: {num_read} turns are read, {num_problems} are not\n"
    )
    assert code == bool(num_problems)
