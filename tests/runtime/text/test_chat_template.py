"""Chat templates: the same text as in transformers, and clear errors for templates or messages that
cannot be rendered.
"""

import contextlib
import json

import pytest

pytest.importorskip("jinja2")

from atomc.demo import PATH
from atomc.runtime.text.chat_template import ChatTemplate, load_chat_template

# Templates modeled on published ones, with the features of each family.
LLAMA = """\
{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = strftime_now("%d %b %Y") %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- "Answer with {\\"name\\": ..., \\"parameters\\": ...}.\\n" }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception("Only single tool-calls at once!") }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- elif message.role in ("tool", "ipython") %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}{{- "<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\n<tool_call>\\n{\\"name\\": <function-name>}\\n</tool_call><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = message.reasoning_content if message.reasoning_content is string else '' %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if loop.index0 > ns.last_query_index %}
            {{- '<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}{{- tool_call.arguments }}
                {%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
CHATML = """\
{% for message in messages %}
{% if message['role'] == 'assistant' %}
<|im_start|>assistant
{% generation %}{{ message['content'] }}<|im_end|>
{% endgeneration %}
{% else %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""
GEMMA = """\
{{ bos_token }}
{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if loop.index > 99 %}{% break %}{% endif %}
    {% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"""
GPT_OSS = """\
{%- macro render_type(spec) -%}
    {%- if spec.type == "array" -%}{{- render_type(spec['items']) + "[]" -}}
    {%- elif spec.enum is defined -%}{{- '"' + spec.enum | join('" | "') + '"' -}}
    {%- else -%}{{- {"string": "string", "integer": "number"}.get(spec.type, "any") -}}{%- endif -%}
{%- endmacro -%}
{{- "<|start|>system<|message|>Reasoning: " + (reasoning_effort or "medium") }}
{{- "\\n\\n# Valid channels: analysis, commentary, final.<|end|>" }}
{%- if messages[0].role in ("developer", "system") %}
    {%- set developer_message = messages[0].content %}{%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set developer_message = "" %}{%- set loop_messages = messages %}
{%- endif %}
{%- if developer_message or tools %}
    {{- "<|start|>developer<|message|># Instructions\\n\\n" + developer_message }}
    {%- for tool in tools or [] %}
        {%- set function = tool.function %}
        {{- "\\n// " + function.description + "\\ntype " + function.name + " = (_: {\\n" }}
        {%- for name, spec in function.parameters.properties.items() %}
            {{- name }}{%- if name not in (function.parameters.required or []) %}{{- "?" }}{%- endif %}
            {{- ": " + render_type(spec) + ",\\n" }}
        {%- endfor %}
        {{- "}) => any;" }}
    {%- endfor %}
    {{- "<|end|>" }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in loop_messages %}
    {%- if message.role == 'assistant' %}
        {%- if message.thinking is defined %}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- set tool_call = message.tool_calls[0].function %}
            {{- "<|start|>assistant to=functions." + tool_call.name + "<|channel|>commentary json<|message|>" }}
            {{- tool_call.arguments | tojson }}{{- "<|call|>" }}
            {%- set last.name = tool_call.name %}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
        {%- endif %}
    {%- elif message.role == 'tool' %}
        {%- if last.name is none %}{{- raise_exception("A tool answered without a call!") }}{%- endif %}
        {{- "<|start|>functions." + last.name + " to=assistant<|channel|>commentary<|message|>" }}
        {{- message.content | tojson }}{{- "<|end|>" }}
    {%- else %}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"""
# As in DeepSeek-V3: the arguments are concatenated as text.
DEEPSEEK = """\
{{ bos_token }}{% for message in messages %}{% if message['tool_calls'] %}{% for tool in message['tool_calls'] %}\
{{ '<call>' + tool['function']['name'] + '\\n```json\\n' + tool['function']['arguments'] + '\\n```' }}{% endfor %}\
{% else %}{{ message['role'] + ': ' + message['content'] }}{% endif %}{% endfor %}"""
TEMPLATES = {"llama": LLAMA, "qwen": QWEN, "chatml": CHATML, "gemma": GEMMA, "gpt-oss": GPT_OSS}

USER = {"role": "user", "content": " How warm is it in Malm\u00f6 & <Lund>? "}
SYSTEM = {"role": "system", "content": "Answer briefly."}
ASSISTANT = {"role": "assistant", "content": "Which month?"}
THOUGHT = {"role": "assistant", "content": "20", "reasoning_content": "\nMay is mild.\n"}
ARGUMENTS = {"city": "Malm\u00f6", "days": [1, 2], "exact": True}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "weather", "arguments": json.dumps(ARGUMENTS)},
        }
    ],
}
ANSWER = {"role": "tool", "tool_call_id": "call_1", "content": '{"celsius": 20}'}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'The weather\'s "state".',
            "parameters": {
                "type": "object",
                "required": ["city"],
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "array", "items": {"type": "integer"}},
                    "unit": {"type": "string", "enum": ["C", "F"]},
                },
            },
        },
    }
]
CONVERSATIONS = {
    "one": ([USER], None, {}),
    "more": ([USER, ASSISTANT, USER], None, {}),
    "system": ([SYSTEM, USER], None, {}),
    "prompt-off": ([USER, ASSISTANT], None, {"add_generation_prompt": False}),
    "no-thinking": ([USER], None, {"enable_thinking": False, "reasoning_effort": "high"}),
    "thought": ([USER, THOUGHT, USER], None, {}),
    "tools": ([SYSTEM, USER], TOOLS, {}),
    "called": ([USER, CALL, ANSWER], TOOLS, {}),
    "called-without-tools": ([USER, CALL, ANSWER, USER], None, {}),
}
SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>"}


@pytest.fixture(scope="module")
def theirs():
    """The text that transformers renders, or None if the template raises."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(PATH / "tokenizer.json"), **SPECIAL
    )
    # Since some version, templates get messages without null, and reasoning under both of its keys.
    sample = {"role": "assistant", "content": None, "reasoning_content": "x"}
    probe = "{{ messages[0].content is defined }} {{ messages[0].thinking }}"
    adapts = tokenizer.apply_chat_template([sample], chat_template=probe, tokenize=False)

    def rendered(template, messages, tools, kwargs):
        if adapts != "False x":
            messages = list(map(adapted, messages))
        try:
            return tokenizer.apply_chat_template(
                messages,
                tools,
                chat_template=template,
                tokenize=False,
                **{"add_generation_prompt": True} | kwargs,
            )
        except Exception:
            return None

    return rendered


def adapted(message):
    """The message as a newer transformers gives it to templates."""
    message = {key: value for key, value in message.items() if value is not None}
    if "reasoning_content" in message:
        message["thinking"] = message["reasoning_content"]
    return message


def with_objects(message):
    """The message with arguments as objects, which transformers requires."""
    if "tool_calls" not in message:
        return message
    (call,) = message["tool_calls"]
    return message | {
        "tool_calls": [call | {"function": call["function"] | {"arguments": ARGUMENTS}}]
    }


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("family", TEMPLATES)
def test_a_template_renders_as_in_transformers(theirs, family, conversation):
    messages, tools, kwargs = CONVERSATIONS[conversation]
    objects = [with_objects(message) for message in messages]
    expected = theirs(TEMPLATES[family], objects, tools, kwargs)
    if expected is None and messages[0] == SYSTEM:  # it is a part of the user's message then
        first = {"role": "user", "content": f"{SYSTEM['content']}\n\n{messages[1]['content']}"}
        expected = theirs(TEMPLATES[family], [first, *objects[2:]], tools, kwargs)
    template = ChatTemplate(TEMPLATES[family], SPECIAL)
    if expected is None:
        with pytest.raises(
            ValueError, match=r"the chat template (rejected|failed on) the messages"
        ):
            template.render(messages, tools, **kwargs)
    else:
        assert template.render(messages, tools, **kwargs) == expected


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_final_message_is_continued_as_in_transformers(theirs, family):
    # The text also stands in what the template writes, and ends with white space.
    messages = [USER, {"role": "assistant", "content": "user "}]
    kwargs = {"add_generation_prompt": False, "continue_final_message": True}
    found = ChatTemplate(TEMPLATES[family], SPECIAL).render(
        messages, add_generation_prompt=True, continue_final_message=True
    )
    assert found == theirs(TEMPLATES[family], messages, None, kwargs)
    assert found.endswith(("user", "user "))


def test_a_message_that_cannot_be_continued_is_refused():
    def continued(message, template=CHATML):
        ChatTemplate(template, keeps_parts=True).render([message], continue_final_message=True)

    with pytest.raises(ValueError, match="does not end with text"):
        continued(CALL | {"content": None})
    with pytest.raises(ValueError, match="does not end with text"):
        continued({"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image"}]})
    with pytest.raises(ValueError, match="does not keep the text"):
        continued(USER, "{{ messages[0].role }}")


def test_most_of_these_conversations_are_rendered_and_not_refused(theirs):
    texts = [
        theirs(template, [with_objects(message) for message in messages], tools, kwargs)
        for template in TEMPLATES.values()
        for messages, tools, kwargs in CONVERSATIONS.values()
    ]
    assert sum(text is None for text in texts) <= 9


def test_arguments_are_a_text_for_a_template_that_joins_them():
    text = json.dumps(ARGUMENTS)
    assert (
        ChatTemplate(DEEPSEEK, SPECIAL)
        .render([USER, CALL])
        .endswith(f"<call>weather\n```json\n{text}\n```")
    )


def test_arguments_that_are_not_json_stay_as_the_model_wrote_them():
    call = {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "weather", "arguments": '{"city": '}}],
    }
    assert '"arguments": {"city": }\n</tool_call>' in ChatTemplate(QWEN).render([USER, call])


def test_a_template_raising_is_an_error_with_its_words():
    with pytest.raises(ValueError, match="rejected the messages: Conversation roles must"):
        ChatTemplate(GEMMA).render([USER, USER])


# As Qwen3.5's: one system message, at the beginning.
STRICT = """\
{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}{{- raise_exception('not first') }}{%- endif %}
{%- if message.role == 'tool' %}{{- '[tool:' + message.content + ']' }}
{%- elif message.role not in ('system', 'user', 'assistant') %}{{- raise_exception('role') }}
{%- else %}{{- '[' + message.role + ':' + message.content + ']' }}{%- endif %}
{%- endfor %}"""
ALTERNATING = GEMMA[GEMMA.index("{% for") :]


def said(*pairs):
    return [{"role": role, "content": text} for role, text in pairs]


U, A, S, D, T = (
    ("user", "u"),
    ("assistant", "a"),
    ("system", "s"),
    ("developer", "d"),
    ("tool", "t"),
)


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ((S, U), "[system:s][user:u]"),
        ((S, D, U), "[system:s\n\nd][user:u]"),
        ((S, D, S, U, D), "[system:s\n\nd\n\ns][user:u\n\nd]"),
        ((S, U, A, U, S), "[system:s][user:u][assistant:a][user:u\n\ns]"),
        ((U, A, S, U), "[user:u][assistant:a][user:s\n\nu]"),
        ((U, A, S, D, U, U), "[user:u][assistant:a][user:s\n\nd\n\nu][user:u]"),
        ((U, A, T, S), "[user:u][assistant:a][tool:t][user:s]"),
        ((U, U, S), "[user:u][user:u\n\ns]"),
    ],
)
def test_system_messages_that_a_template_refuses_are_joined_or_said_by_the_user(messages, text):
    assert ChatTemplate(STRICT).render(said(*messages)) == text


def test_a_template_that_takes_no_system_message_gets_it_in_the_users():
    render = ChatTemplate(ALTERNATING).render
    turns = said(S, U, A, D, U)
    merged = said(("user", "s\n\nu"), A, ("user", "d\n\nu"))
    assert render(turns) == render(merged)
    assert render(said(S)) == render(said(("user", "s")))
    with pytest.raises(ValueError, match="Conversation roles must alternate"):
        render(said(S, U, U))


def test_a_template_that_takes_every_system_message_gets_all_of_them_as_they_are():
    template = ChatTemplate("{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}")
    assert template.render(said(S, D, U, S)) == "[system:s][system:d][user:u][system:s]"


def test_the_parts_of_a_joined_message_stay_parts():
    image = {"type": "image"}
    messages = [*said(U, A, S), {"role": "user", "content": [image]}]
    source = STRICT.replace(
        "message.content + ']' }}{%- endif", "(message.content | string) }}{%- endif"
    )
    assert (
        ChatTemplate(source, keeps_parts=True)
        .render(messages)
        .endswith("[user:[{'type': 'text', 'text': 's'}, {'type': 'image'}]")
    )


def test_a_template_that_fails_is_an_error_with_the_reason():
    with pytest.raises(ValueError, match="failed on the messages: TypeError: "):
        ChatTemplate("{{ 1 + 'a' }}").render([USER])


def test_text_parts_become_one_text():
    parts = {
        "role": "user",
        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
    }
    assert ChatTemplate(CHATML).render([parts]) == ChatTemplate(CHATML).render(
        [{"role": "user", "content": "a\nb"}]
    )


def test_developer_is_system_for_a_template_that_does_not_know_it():
    developer = SYSTEM | {"role": "developer"}
    assert "<|im_start|>system\nAnswer briefly." in ChatTemplate(QWEN).render([developer, USER])
    assert "# Instructions\n\nAnswer briefly." in ChatTemplate(GPT_OSS).render([developer, USER])


@pytest.mark.parametrize(
    "messages, kwargs, wrong",
    [
        ([], {}, "messages is empty"),
        (["hello"], {}, "a message is 'hello', expected an object with a role"),
        ([{"content": "x"}], {}, "expected an object with a role"),
        (
            [{"role": "user", "content": 3}],
            {},
            "the content of a message is a number, expected a string or a list of parts",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            {},
            "a content part of type 'image_url' is not supported",
        ),
        ([USER], {"bos_token": "x"}, "chat_template_kwargs cannot set 'bos_token'"),
        ([USER], {"messages": []}, "chat_template_kwargs cannot set 'messages'"),
        ([USER], {"tools": []}, "chat_template_kwargs cannot set 'tools'"),
        ([USER], {"value": object()}, "a object cannot be passed to a chat template"),
    ],
)
def test_wrong_messages_are_refused(messages, kwargs, wrong):
    with pytest.raises(ValueError, match=wrong):
        ChatTemplate(CHATML).render(messages, **kwargs)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ namespace().__init__.__globals__ }}",
        "{{ dict.__class__ }}",
        "{{ dict.__call__.__globals__['json'] }}",
        "{{ raise_exception.__globals__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{% set n = namespace(_x=1) %}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
        "{% for i in range(100000000) %}{% endfor %}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(template):
    seen = ""
    with contextlib.suppress(ValueError):
        seen = ChatTemplate(template).render([USER])
    assert seen == ""
    assert ChatTemplate("{{ messages | length }}").render([USER]) == "1"


def test_a_namespace_may_have_a_name_called_self():
    assert ChatTemplate("{% set n = namespace(self=1) %}{{ n.self }}").render([USER]) == "1"


def test_an_invalid_template_is_reported_with_its_line():
    with pytest.raises(
        ValueError, match="the chat template 'default' is not valid Jinja: line 2: "
    ):
        ChatTemplate("a\n{% if %}")


# Sources of templates


def folder_with(path, config=None, **files):
    (path / "tokenizer_config.json").write_text(json.dumps(config or {}))
    for name, text in files.items():
        file = path / name.replace("__", "/").replace("_jinja", ".jinja")
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return path


def test_the_text_in_tokenizer_config_is_found_with_special_tokens_of_both_spellings(tmp_path):
    config = {
        "chat_template": "{{ bos_token + eos_token }}",
        "bos_token": "<s>",
        "eos_token": {"content": "</s>"},
    }
    assert load_chat_template(folder_with(tmp_path, config)).render([USER]) == "<s></s>"


def test_a_template_file_takes_precedence_over_tokenizer_config(tmp_path):
    folder = folder_with(tmp_path, {"chat_template": "config"}, chat_template_jinja="file")
    assert load_chat_template(folder).render([USER]) == "file"


def test_the_users_template_file_takes_precedence(tmp_path):
    folder = folder_with(
        tmp_path, {"chat_template": "config", "bos_token": "<s>"}, mine_jinja="mine {{ bos_token }}"
    )
    assert load_chat_template(folder, tmp_path / "mine.jinja").render([USER]) == "mine <s>"


@pytest.mark.parametrize("where", ["config", "files"])
def test_the_template_for_tools_is_taken_with_tools_only(tmp_path, where):
    if where == "config":
        named = [
            {"name": "default", "template": "plain"},
            {"name": "tool_use", "template": "tools"},
        ]
        template = load_chat_template(folder_with(tmp_path, {"chat_template": named}))
    else:
        more = {"additional_chat_templates__tool_use_jinja": "tools"}
        template = load_chat_template(folder_with(tmp_path, chat_template_jinja="plain", **more))
    assert [template.render([USER]), template.render([USER], TOOLS)] == ["plain", "tools"]


def test_a_folder_without_a_template_has_none(tmp_path):
    assert load_chat_template(tmp_path) is None


def test_a_missing_template_file_is_reported(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"--chat-template .*gone\.jinja: no such file"):
        load_chat_template(tmp_path, tmp_path / "gone.jinja")


def test_a_template_of_the_wrong_type_is_reported(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: chat_template is a number"):
        load_chat_template(folder_with(tmp_path, {"chat_template": 3}))


def test_named_templates_without_a_default_are_reported(tmp_path):
    named = [{"name": "rag", "template": "x"}]
    with pytest.raises(
        ValueError, match=r"chat templates are \['rag'\], expected one named 'default'"
    ):
        load_chat_template(folder_with(tmp_path, {"chat_template": named})).render([USER])


def test_the_demo_can_be_talked_to():
    text = load_chat_template(PATH).render(
        [SYSTEM, USER | {"content": "She said"}, {"role": "assistant", "content": None}]
    )
    assert text == "Answer briefly.\n\nShe said\n\n\n\n"


def test_the_bos_that_a_template_writes_is_the_only_one():
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(PATH / "tokenizer.json"))
    end = "<|endoftext|>"
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{end} $A", special_tokens=[(end, 0)]
    )
    text = ChatTemplate(GEMMA, {"bos_token": end}).render([USER])
    assert tokenizer.encode(text).ids[:2] == [0, 0]
    assert tokenizer.encode(text, add_special_tokens=False).ids[0] == 0
    assert tokenizer.encode(text, add_special_tokens=False).ids.count(0) == 1
