"""``tools/calls_of_templates.py`` finds chat templates whose calls cannot be read by the format
that the service chooses.
"""

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
UNQUOTED = "{{ '{\"name\": ' + c.function.name + '}' }}"
CODER = (
    "<function={{ c.function.name }}>\n{% for k, v in c.function.arguments | items %}"
    "<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}"
    "</function>"
)


@pytest.mark.parametrize(("call", "num_problems"), [(HERMES, 0), (CODER, 0), (UNQUOTED, 10)])
def test_calls_are_read_as_the_template_writes_them(tmp_path, capsys, call, num_problems):
    (tmp_path / "one.jinja").write_text(TURNS.replace("{{ CALL }}", call))

    code = main([str(tmp_path)])

    num_read = 2 * len(CALLS) - num_problems
    assert capsys.readouterr().out.endswith(
        f"1 templates: {num_read} turns are read, {num_problems} are not\n"
    )
    assert code == bool(num_problems)


def test_calls_that_are_read_wrongly_are_printed(tmp_path, capsys):
    call = '{{ \'{"name": "\' + c.function.name + \'", "arguments": {"city": }}\' }}'
    (tmp_path / "one.jinja").write_text(TURNS.replace("{{ CALL }}", call))

    assert main([str(tmp_path)]) == 1
    assert "is read as" in capsys.readouterr().out


def test_text_at_the_end_of_a_prompt_does_not_hide_the_turn(tmp_path, capsys):
    example = HERMES.replace("c.function.name", "'stop'").replace("c.function.arguments", "{}")
    template = (
        f"Write <tool_call>{example}</tool_call>.\n{{% for m in messages %}}"
        "{% if m.role == 'user' %}{{ m.content }}:{% else %}{{ m.content or '' }}"
        f"{{% for c in m.tool_calls %}}\n<tool_call>\n{HERMES}\n</tool_call>{{% endfor %}}"
        "<|im_end|>{% endif %}{% endfor %}{{ ' ' }}"
    )
    (tmp_path / "one.jinja").write_text(template)

    main([str(tmp_path)])

    assert f" {2 * len(CALLS)} turns are read, 0 are not" in capsys.readouterr().out
