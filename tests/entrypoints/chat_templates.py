# SPDX-License-Identifier: Apache-2.0
"""Chat templates of our own, each built as the templates of a family of models are: how content is read, by whom."""

from __future__ import annotations

from typing import NamedTuple

_END = "{% if add_generation_prompt %}<assistant>{% endif %}"


class ChatTemplate(NamedTuple):
    """``forms``: role → what it takes of ``text`` and ``list``. ``arguments``: of tool calls, where there are any."""

    text: str
    forms: dict[str, str]
    arguments: str | None = None


BOTH, TEXT, LIST = "text list", "text", "list"


def _all(forms: str) -> dict[str, str]:
    return dict.fromkeys(("system", "user", "assistant", "tool"), forms)


TEMPLATES = {
    # ChatML and most text models: one expression.
    "joined": ChatTemplate(
        "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}" + _END, _all(TEXT)
    ),
    "trimmed": ChatTemplate(
        "{% set ns = namespace(said='') %}{% for m in messages %}{% set ns.said = m.content | trim %}"
        "<{{ m.role }}>{{ ns.said }}{% endfor %}" + _END,
        _all(TEXT),
    ),
    # Vision models: parts only, in a loop, through filters, or the first one.
    "loop": ChatTemplate(
        "{% for m in messages %}<{{ m['role'] }}>{% for part in m['content'] %}{% if part['type'] == 'image' %}[img]"
        "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}" + _END,
        _all(LIST),
    ),
    "filters": ChatTemplate(
        "{% for m in messages %}<{{ m.role }}>{% for p in m.content | selectattr('type', 'equalto', 'image') %}[img]"
        "{% endfor %}{% for p in m.content | selectattr('type', 'equalto', 'text') %}{% generation %}{{ p.text }}"
        "{% endgeneration %}{% endfor %}{% endfor %}" + _END,
        _all(LIST),
    ),
    "mapped": ChatTemplate(
        "{% for m in messages %}<{{ m.role }}>{{ m.content | selectattr('type', 'eq', 'text') | map(attribute='text') "
        "| join('') }}{% endfor %}" + _END,
        _all(LIST),
    ),
    "in a macro": ChatTemplate(
        "{% macro show(parts, image='[img]') %}{% for p in parts %}{{ p.get('text') if p.type == 'text' else image }}"
        "{% endfor %}{% endmacro %}{% for m in messages[:] %}<{{ m.role }}>{{ show(m.get('content')) }}{% endfor %}"
        + _END,
        _all(LIST),
    ),
    # Both, told apart by a test; directly, in a macro, and by exclusion.
    "test": ChatTemplate(
        "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{% if 'text' in p %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}" + _END,
        _all(BOTH),
    ),
    "test in a macro": ChatTemplate(
        "{%- macro shown(c) -%}{%- if c is string -%}{{- c -}}{%- elif c is iterable and c is not mapping -%}"
        "{%- for i in c -%}{%- if i is mapping and i.type == 'text' -%}{{- i.text -}}{%- elif i is string -%}{{- i -}}"
        "{%- endif -%}{%- endfor -%}{%- else -%}{{- c -}}{%- endif -%}{%- endmacro -%}"
        "{%- for m in messages -%}<{{ m.role }}>"
        "{%- set c = shown(m.content) -%}{{- c.split('</think>')[-1] -}}{%- endfor -%}" + _END,
        _all(BOTH),
    ),
    "test of a sequence": ChatTemplate(
        "{% for m in messages %}<{{ m.role }}>{% if m.content is sequence and m.content is not string %}"
        "{% for p in m.content %}{{ p['text'] }}{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}" + _END,
        _all(BOTH),
    ),
    # What is no string becomes nothing.
    "else nothing": ChatTemplate(
        "{% for m in messages %}{% if m.content is string %}{% set c = m.content %}{% else %}"
        "{% set c = '' %}{% endif %}"
        "<{{ m.role }}>{{ c }}{% endfor %}" + _END,
        _all(TEXT),
    ),
    # The system message apart, as text; all messages are searched for images, whatever they are.
    "system apart": ChatTemplate(
        "{% set ns = namespace(images=false) %}{% for m in messages %}{% for p in m.content %}"
        "{% if p['type'] == 'image' %}{% set ns.images = true %}{% endif %}{% endfor %}{% endfor %}"
        "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}"
        "{% set messages = messages[1:] %}<system>{{ system }}{% endif %}"
        "{% if in_user is defined and tools is not none %}{% set first = messages[0]['content'] | trim %}"
        "{% set messages = messages[1:] %}<user>{{ tools | length }} {{ first }}{% endif %}"
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'tool' %}"
        "{% if m.content is mapping or m.content is iterable %}{{ m.content | tojson }}{% endif %}"
        "{% elif m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "{{ p['text'] }}{% endfor %}{% endif %}{% endfor %}" + _END,
        {"system": TEXT, "user": BOTH, "assistant": BOTH, "tool": TEXT},
    ),
    # The assistant's text is joined to the end token, the others' may be parts; the role has another name.
    "by role": ChatTemplate(
        "{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}<{{ role }}>"
        "{% if m.role == 'assistant' %}{{ m['content'] + '' }}{% elif m['role'] in ['system', 'developer'] %}"
        "{{ m.content if m.content is string else m.content[0]['text'] }}{% elif m.role == 'tool' %}"
        "{% for r in m.content %}{{ r.output if r.output is defined else r }}{% endfor %}"
        "{% else %}{{ m['content'][0]['text'] }}{% endif %}{% endfor %}" + _END,
        {"system": BOTH, "user": LIST, "assistant": TEXT, "tool": TEXT},
    ),
}

_CALLS = (
    "{{% for m in messages %}}<{{{{ m.role }}}}>{{{{ m.content or '' }}}}{{% for call in m.tool_calls or [] %}}"
    "{}{{% endfor %}}{{% endfor %}}"
)

# How arguments are written: name → (template, whether as an object).
CALL_TEMPLATES = {
    "tojson": (_CALLS.format("{{ call.function.name }}({{ call.function.arguments | tojson }})"), True),
    "alias": (
        _CALLS.format(
            "{% set call = call.function %}{{ call.name }}({{ call['arguments'] | tojson(ensure_ascii=False) }})"
        ),
        True,
    ),
    "test": (
        _CALLS.format(
            "{{ call.function.name }}({% if call.function.arguments is string %}{{ call.function.arguments }}{% else %}"
            "{{ call.function.arguments | tojson }}{% endif %})"
        ),
        True,
    ),
    "items": (
        _CALLS.format(
            "{% set f = call.function %}{{ f.name }}({% set args = f.arguments or {} %}{% for k, v in args.items() %}"
            "{{ k }}={{ v }};{% endfor %})"
        ),
        True,
    ),
    "whole": (_CALLS.format("{{ call.function | tojson }}"), True),
    "joined": (_CALLS.format("{{ call['function']['name'] + '(' + call['function']['arguments'] + ')' }}"), False),
    "printed": (_CALLS.format("{{ call.function.name }}({{ call.function.arguments }})"), False),
}
