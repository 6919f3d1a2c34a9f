"""Chat templates: what published ones use, and a sandbox that says why it stops."""

from __future__ import annotations

import datetime

import pytest

from jaxpp.data import Tokenizer, chat

HI = [{"role": "user", "content": "h\u00e9 <b> 'x'"}]


def test_blocks_leave_no_lines_behind() -> None:
    body = "  {% if true %}\n[{{ message['role'] }}]{{ message.content }}\n  {% endif %}\n"
    template = "{% for message in messages %}\n" + body + "{% endfor %}\n"
    assert chat.render(template, HI) == "[user]h\u00e9 <b> 'x'\n"


def test_what_published_templates_use() -> None:
    template = (
        "{%- for message in messages %}{%- if loop.index0 == 1 %}{% break %}{% endif %}"
        "{{ bos_token }}{{ message | tojson }}{{ message | tojson(indent=1) }}{%- endfor %}"
        "{% generation %}{{ eos_token }}{% endgeneration %}{{ strftime_now('%Y') }}"
        "{% if add_generation_prompt %}>{% endif %}{{ tools is none }}{% if thinking is defined %}!{% endif %}"
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
    )
    text = chat.render(template, HI * 2, bos_token="<s>", eos_token="</s>")
    one = '{"role": "user", "content": "h\u00e9 <b> \'x\'"}'
    two = '{\n "role": "user",\n "content": "h\u00e9 <b> \'x\'"\n}'
    assert text == f"<s>{one}{two}</s>{datetime.datetime.now():%Y}>True2"
    assert (
        chat.render(
            "{{ add_generation_prompt }}{{ tools[0].name }}", HI, add_generation_prompt=False, tools=[{"name": "f"}]
        )
        == "Falsef"
    )


@pytest.mark.parametrize(
    ("template", "line", "reason"),
    [
        ("a\n{{ messages.__class__ }}", 2, "'__class__' of a list lies outside the sandbox"),
        ("{{ raise_exception.__globals__ }}", 1, "'__globals__' of a function lies outside the sandbox"),
        ("{{ '{0.__class__}'.format(1) }}", 1, "'__class__' of a int lies outside"),
        ("\n\n{{ messages.append(1) }}", 3, "'append' of a list lies outside"),
        ("{% macro f(m) %}\n{{ m.a.b }}\n{% endmacro %}\n{{ f(messages[0]) }}", 2, "has no attribute 'a'"),
        ("\n{{ nothing.at.all }}", 2, "'nothing' is undefined"),
        ("\n{% if messages[0].role == 'user' %}\n{{ raise_exception('no\nuser') }}\n{% endif %}", 3, "no user"),
        ("a\n{% for m in messages %}\n", 2, "Unexpected end of template"),
        ("{% include 'x' %}", 1, "no loader"),
        ("{{ 1 / 0 }}", 1, "division by zero"),
        ("{{ messages + 1 }}", 1, "can only concatenate list"),
        ("{% for i in range(10000000) %}{% endfor %}", 1, "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", 1, "recursion"),
    ],
)
def test_a_template_that_fails_says_where(template: str, line: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as error:
        chat.render(template, HI)
    assert str(error.value).startswith(f"chat template, line {line}: ") and "\n" not in str(error.value)


def test_output_is_bounded() -> None:
    template = "{% for i in range(99999) %}{% for j in range(99999) %}" + "x" * 100 + "{% endfor %}{% endfor %}"
    with pytest.raises(ValueError, match="more than 10,000,000 characters"):
        chat.render(template, HI)


def with_begin(template: str | None) -> Tokenizer:
    from jaxpp.data import vocabulary
    from jaxpp.data.tokenizer import END_OF_TEXT

    backend = vocabulary.parse(Tokenizer.bytes().to_json())
    backend.add_special_tokens(["<s>", "<turn>"])
    vocabulary.begin_with(backend, 257)
    return Tokenizer(backend, ends=[258, backend.token_to_id(END_OF_TEXT)], chat_template=template)


def test_begin_of_text_stands_once() -> None:
    tokenizer = with_begin("{{ bos_token }}{% for m in messages %}{{ m.content }}<turn>{% endfor %}{{ eos_token }}")
    assert tokenizer.add_bos and tokenizer.encode("a", begin=True).tolist() == [257, 97]
    assert tokenizer.chat([{"role": "user", "content": "ab"}]).tolist() == [257, 97, 98, 258, 258]
    assert with_begin("{{ messages[0].content }}").chat(HI[:1]).tolist() == list(HI[0]["content"].encode())
    assert with_begin("{{ n }}").chat(HI, n=1).tolist() == [ord("1")]
    with pytest.raises(ValueError, match="has no chat template"):
        with_begin(None).chat(HI)
