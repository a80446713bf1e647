# SPDX-License-Identifier: Apache-2.0
"""Conversations in every form that clients send, through templates of every build: no text is lost or garbled."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import pytest
from chat_templates import CALL_TEMPLATES, TEMPLATES
from engine_fakes import byte_tokenizer

from vllm.entrypoints.chat_utils import render_chat, split_conversations
from vllm.renderers.template_reader import content_form, takes_argument_objects

TOKENIZER = byte_tokenizer()
CONFIG = SimpleNamespace(tokenizer="folder")
ROLES = ("system", "user", "assistant", "tool")
CITY = {"city": "Zürich", "days": 2}


def render(messages, template: str, **kwargs) -> str:
    before = copy.deepcopy(messages)
    text = render_chat(messages, TOKENIZER, CONFIG, chat_template=template, add_generation_prompt=False, **kwargs)[
        "prompt"
    ]
    assert messages == before, "the caller's messages are left alone"
    return text


def as_is(messages, template: str, **kwargs) -> str:
    """What transformers makes of it."""
    return TOKENIZER.apply_chat_template(messages, chat_template=template, tokenize=False, **kwargs)


def parts(*texts: str) -> list[dict]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", TEMPLATES)
def test_what_templates_take(name: str, role: str):
    template, forms, _ = TEMPLATES[name]
    for given in ("text", "list"):
        wanted = given if given in forms[role] else forms[role]
        assert content_form(template, role, given, tools=False) == wanted, given


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_text_is_lost_or_garbled(name: str):
    """Strings and parts under every template, role by role: as transformers renders the form the template takes."""
    template, forms, _ = TEMPLATES[name]
    for role in ROLES:
        for content in ("it's\n{so}", parts("it's\n{so}"), parts("it's", "{so}")):
            messages = [{"role": role, "content": content}]
            text = render(messages, template)
            texts = [content] if isinstance(content, str) else [part["text"] for part in content]
            if role == "tool" and "tojson" in template:
                texts = [json.dumps(text)[1:-1] for text in texts]
            if name == "by role" and "list" in forms[role] and len(texts) > 1:
                texts = texts[:1]  # a template that reads the first part only
            assert all(one in text for one in texts), f"{role} {content!r} became {text!r}"
            assert "'type'" not in text
            assert '"type"' not in text
            given = "text" if isinstance(content, str) else "list"
            if given in forms[role]:
                assert text == as_is(messages, template)
            elif given == "text":
                assert text == as_is([{"role": role, "content": parts(content)}], template)
            else:
                assert text == as_is([{"role": role, "content": "\n".join(p["text"] for p in content)}], template)


def test_the_form_is_found_for_each_message():
    template = TEMPLATES["by role"].text
    said = [
        {"role": "system", "content": parts("s")},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": parts("a", "b")},
        {"role": "tool", "content": parts("t")},
    ]
    assert render(said, template) == "<system>s<user>u<model>a\nb<tool>t"


def test_the_form_depends_on_the_tools():
    """With tools the first user message is read as text, without them parts stay parts."""
    template, said = TEMPLATES["system apart"].text, [{"role": "user", "content": parts("a", "b")}]
    assert render(said, template) == "<user>ab" == as_is(said, template)
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert render(said, template, tools=tools, chat_template_kwargs={"in_user": 1}) == "<user>1 a\nb"


def test_explicit_formats():
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": parts("b", "c")}]
    assert render(said, TEMPLATES["test"].text, chat_template_content_format="string") == "<user>a<assistant>b\nc"
    assert render(said, TEMPLATES["loop"].text, chat_template_content_format="openai") == "<user>a<assistant>bc"
    for wrong in ("banana", "", None, "Auto"):
        with pytest.raises(ValueError, match=r"chat_template_content_format=.*'auto', 'string', 'openai'"):
            render(said, TEMPLATES["test"].text, chat_template_content_format=wrong)


def test_kinds_of_text_parts_and_their_other_keys():
    content = [
        "a",
        {"type": "input_text", "text": "b"},
        {"type": "output_text", "text": "c", "annotations": []},
        {"type": "refusal", "refusal": "d"},
        {"text": "e", "lang": "de", "image_url": None},
    ]
    template = "{% for p in messages[0].content %}{{ p.type }}:{{ p.text }}{{ p.lang }} {% endfor %}"
    assert render([{"role": "user", "content": content}], template) == "text:a text:b text:c text:d text:ede "


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}, "text": "seen"}], NotImplementedError, "type 'image_url'"),
        ([{"type": "text", "text": "seen", "image_url": {"url": "x"}}], NotImplementedError, "the key 'image_url'"),
        ([{"text": "seen", "image": object()}], NotImplementedError, "the key 'image'"),
        ([{"type": "input_audio", "input_audio": {}}], NotImplementedError, "type 'input_audio'"),
        ([{"type": "text"}], ValueError, "without text"),
        ([{"type": "text", "text": 5}], ValueError, "without text"),
        ([5], ValueError, "content part 5"),
        ({"type": "text", "text": "hi"}, ValueError, "content of type dict; give a string or a list"),
        (5, ValueError, "content of type int"),
    ],
)
@pytest.mark.parametrize("content_format", ["auto", "string", "openai"])
def test_content_that_is_refused_by_name(content, error, message, content_format):
    said = [{"role": "system", "content": "s"}, {"role": "user", "content": content}]
    with pytest.raises(error, match=rf"messages\[1\] \(user\).*{message}"):
        render_chat(
            said, TOKENIZER, CONFIG, chat_template=TEMPLATES["test"].text, chat_template_content_format=content_format
        )


# --- tool calls -------------------------------------------------------------------------------------------------------


def history(arguments, content=None) -> list[dict]:
    call = {"id": "call_123456", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [{"role": "assistant", "content": content, "tool_calls": [call]}]


@pytest.mark.parametrize("name", CALL_TEMPLATES)
@pytest.mark.parametrize("tools", [False, True])
def test_arguments_are_written_once(name: str, tools: bool):
    """JSON text and objects give what transformers makes of the form that the template is made for."""
    template, as_object = CALL_TEMPLATES[name]
    assert takes_argument_objects(template, "assistant", tools) == as_object
    text = json.dumps(CITY, ensure_ascii=False)
    expected = as_is(history(CITY if as_object else text), template)
    assert "weather" in expected
    for given in (CITY, text, json.dumps(CITY, separators=(",", ":")) if as_object else text):
        assert render(history(given), template) == expected
    assert '\\"' not in expected


@pytest.mark.parametrize("name", CALL_TEMPLATES)
@pytest.mark.parametrize("nothing", ["", " ", "null", None, {}])
def test_no_arguments(name: str, nothing):
    template, as_object = CALL_TEMPLATES[name]
    if not as_object and isinstance(nothing, str):
        pytest.skip("JSON text stays as it was sent")
    assert render(history(nothing), template) == as_is(history({} if as_object else "{}"), template)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [('{"city": ', "no JSON: '{\"city\": '"), ("[1]", r"no JSON object: \[1\]"), ('"a"', "no JSON object: 'a'")],
)
def test_bad_arguments_are_named(arguments, message):
    said = [{"role": "user", "content": "?"}, *history(arguments)]
    with pytest.raises(ValueError, match=rf"messages\[1\], tool call 0 \('weather'\) has arguments .*{message}"):
        render(said, CALL_TEMPLATES["tojson"][0])
    with pytest.raises(ValueError, match="has the tool call 'f'"):
        render([{"role": "assistant", "tool_calls": ["f"]}], CALL_TEMPLATES["tojson"][0])


def test_the_older_function_call():
    template = "{{ messages[0].function_call.arguments | tojson }}"
    assert (
        render([{"role": "assistant", "function_call": {"name": "f", "arguments": '{"a": 1}'}}], template) == '{"a": 1}'
    )


def test_calls_without_content_do_not_break_templates_that_join_it():
    template = "{% for m in messages %}{{ m.content + '|' }}{{ m.tool_calls | length }}{% endfor %}"
    assert render(history("{}"), template) == "|1"
    template = "{% for m in messages %}{{ 'none' if m.content is not defined else m.content }}{% endfor %}"
    assert render(history("{}"), template) == as_is(history({}), template)


class Message:
    """As the objects of OpenAI's client."""

    def __init__(self, **fields) -> None:
        self.fields = fields

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Message) and self.fields == other.fields

    __hash__ = None

    def model_dump(self, exclude_none: bool = False) -> dict:
        return {key: value for key, value in self.fields.items() if value is not None or not exclude_none}


def test_messages_of_a_client_library():
    (call,) = history('{"a": 1}')[0]["tool_calls"]
    template = CALL_TEMPLATES["tojson"][0]
    for said in (
        [Message(role="assistant", content=None, refusal=None, tool_calls=[call])],
        [{"role": "assistant", "tool_calls": [Message(**call)]}],
    ):
        assert split_conversations(said) == [said]
        assert render(said, template) == '<assistant>weather({"a": 1})'


def test_forms_of_conversations():
    one = {"role": "user", "content": "a"}
    for given, count in (
        ([one], 1),
        ((one,), 1),
        ([[one], [one, one]], 2),
        (iter([one]), 1),
        (([one] for _ in "ab"), 2),
    ):
        assert len(split_conversations(given)) == count
    for wrong in ("a", {"role": "user"}, 5):
        with pytest.raises(TypeError, match="messages is a"):
            split_conversations(wrong)


def test_a_surrogate_in_a_conversation_is_named():
    with pytest.raises(ValueError, match=r"the conversation holds the surrogate '.ud83d' at character 7"):
        render([{"role": "user", "content": "a\ud83d"}], TEMPLATES["joined"].text)


def test_template_that_cannot_be_parsed():
    with pytest.raises(ValueError, match="cannot render this conversation: TemplateSyntaxError"):
        render([{"role": "user", "content": "a"}], "{% for %}")
