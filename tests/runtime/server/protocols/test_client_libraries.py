"""Client libraries over the server: text, streams, tools, structured output, log-probabilities.

None is in the extra "test", whose pinned openai and llguidance are newer than some allow. To run
these, in two environments:

    pip install langchain-anthropic langchain-openai instructor
    pip install guidance outlines openai "lm-eval[api]"
"""

from typing import Literal

import pytest

pytest.importorskip("fastapi")

from pydantic import BaseModel
from serving import KEY

from atomc import demo

pytestmark = pytest.mark.xdist_group("server")
MODEL = "atomc-demo"
CITIES = ("Paris", "Rome")


class Weather(BaseModel):
    """The weather in a city"""

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2]


class OnlyWeather(Weather, extra="forbid"):
    """guidance's grammars keep open objects open."""


def chat_openai(api_server, **more):
    given = {"model": MODEL, "max_tokens": 40, "temperature": 0, "max_retries": 0} | more
    given["stream_usage"] = True
    langchain_openai = pytest.importorskip("langchain_openai")
    return langchain_openai.ChatOpenAI(base_url=f"{api_server.url}/v1", api_key=KEY, **given)


def chat_anthropic(api_server):
    langchain_anthropic = pytest.importorskip("langchain_anthropic")
    return langchain_anthropic.ChatAnthropic(
        base_url=api_server.url,
        api_key=KEY,
        model=MODEL,
        max_tokens=40,
        temperature=0,
        max_retries=0,
    )


@pytest.fixture(params=["chat completions", "responses", "messages"])
def chat(request, api_server):
    """LangChain's model over each of the chat APIs."""
    if request.param == "messages":
        return chat_anthropic(api_server)
    return chat_openai(api_server, use_responses_api=request.param == "responses")


def streamed(chat, given):
    """The sum of the chunks."""
    first, *others = chat.stream(given)
    for chunk in others:
        first += chunk
    return first


@pytest.mark.rotating
def test_langchain_gets_the_same_text_whole_and_streamed(chat):
    whole, parts = chat.invoke("Hello"), streamed(chat, "Hello")
    assert whole.text and whole.text == parts.text
    assert whole.usage_metadata["output_tokens"] == 40
    assert parts.usage_metadata["total_tokens"] == whole.usage_metadata["total_tokens"]


@pytest.mark.rotating
def test_langchain_gets_the_forced_call_whole_and_streamed(chat):
    bound = chat.bind_tools([Weather], tool_choice="Weather")
    for found in (bound.invoke("Hello"), streamed(bound, "Hello")):
        (call,) = found.tool_calls
        assert call["name"] == "Weather" and call["args"]["city"] in CITIES


def test_langchain_sends_the_result_of_a_call_back(chat):
    messages = pytest.importorskip("langchain_core.messages")
    asked = messages.HumanMessage("Hello")
    called = chat.bind_tools([Weather], tool_choice="Weather").invoke([asked])
    result = messages.ToolMessage("sunny", tool_call_id=called.tool_calls[0]["id"])
    assert chat.bind_tools([Weather]).invoke([asked, called, result]).text


@pytest.mark.rotating
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_parses_structured_output(chat, method):
    found = chat.with_structured_output(Weather, method=method).invoke("Hello")
    assert isinstance(found, Weather)


def test_langchain_continues_a_stored_response(api_server):
    messages = pytest.importorskip("langchain_core.messages")
    chat = chat_openai(api_server, use_responses_api=True, use_previous_response_id=True)
    first = chat.invoke([messages.HumanMessage("Hello")])
    again = [messages.HumanMessage("Hello"), first, messages.HumanMessage("And then?")]
    assert chat.invoke(again).usage_metadata["input_tokens"] > 40  # of the first answer


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_instructor_parses_structured_output(api_server, mode):
    instructor = pytest.importorskip("instructor")
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{api_server.url}/v1", api_key=KEY, max_retries=0)
    found = instructor.from_openai(client, mode=instructor.Mode[mode]).chat.completions.create(
        model=MODEL,
        response_model=Weather,
        messages=[{"role": "user", "content": "Hello"}],
        max_retries=0,
    )
    assert isinstance(found, Weather)


def test_instructor_parses_partial_objects_of_a_stream(api_server):
    instructor = pytest.importorskip("instructor")
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{api_server.url}/v1", api_key=KEY, max_retries=0)
    *_, last = instructor.from_openai(client).chat.completions.create_partial(
        model=MODEL,
        response_model=Weather,
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=60,
    )
    assert last.city in CITIES and last.days in (1, 2)


def test_instructor_parses_a_message_of_anthropics_api(api_server):
    instructor = pytest.importorskip("instructor")
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=api_server.url, api_key=KEY, max_retries=0)
    found = instructor.from_anthropic(client).messages.create(
        model=MODEL,
        max_tokens=60,
        response_model=Weather,
        messages=[{"role": "user", "content": "Hello"}],
        max_retries=0,
    )
    assert isinstance(found, Weather)


def guided(api_server):
    """guidance's model for vLLM's server, which sends grammars."""
    vllm = pytest.importorskip("guidance.models.experimental")
    return vllm.VLLMModel(MODEL, base_url=f"{api_server.url}/v1", api_key=KEY)


def test_guidance_captures_what_its_grammars_allow(api_server):
    model = guided(api_server)
    guidance = pytest.importorskip("guidance")
    with guidance.user():
        model += "Hello"
    with guidance.assistant():
        model += guidance.gen("number", regex=r"[0-9]{3}") + guidance.select(CITIES, name="city")
    assert len(model["number"]) == 3 and model["number"].isdigit()
    assert model["city"] in CITIES


def test_guidance_captures_json(api_server):
    model = guided(api_server)
    guidance = pytest.importorskip("guidance")
    with guidance.user():
        model += "Hello"
    with guidance.assistant():
        model += guidance.json("found", schema=OnlyWeather)
    assert OnlyWeather.model_validate_json(model["found"])


@pytest.fixture(params=["from_openai", "from_vllm"])
def outlined(request, api_server):
    """outlines's model for OpenAI's API, and for vLLM's server, which takes every output type."""
    outlines = pytest.importorskip("outlines")
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{api_server.url}/v1", api_key=KEY, max_retries=0)
    return getattr(outlines, request.param)(client, MODEL)


def test_outlines_gets_json(outlined):
    assert Weather.model_validate_json(outlined("Hello", Weather, max_tokens=60))


def test_outlines_gets_choices_expressions_and_grammars(api_server):
    outlines = pytest.importorskip("outlines")
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{api_server.url}/v1", api_key=KEY, max_retries=0)
    model = outlines.from_vllm(client, MODEL)
    assert model("Hello", Literal["Paris", "Rome"]) in CITIES
    number = model("Hello", outlines.types.regex("[0-9]{3}"))
    assert len(number) == 3 and number.isdigit()
    assert model("Hello", outlines.types.CFG('start: "Paris" | "Rome"')) in CITIES


def test_lm_eval_gets_log_likelihoods_and_texts(api_server, monkeypatch):
    """lm-eval's requests without a task, whose data would be downloaded. The text that the model
    writes by itself is likelier than another, and its greedy continuation.
    """
    completions = pytest.importorskip("lm_eval.models.openai_completions")
    Instance = pytest.importorskip("lm_eval.api.instance").Instance
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    model = completions.LocalCompletionsAPI(
        model=MODEL,
        base_url=f"{api_server.url}/v1/completions",
        tokenizer=str(demo.PATH),
        tokenizer_backend="huggingface",
    )

    def asked(kind, *arguments):
        requests = [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]
        return getattr(model, kind)(requests)

    prompt = "She looked at him and said"
    options = {"max_gen_toks": 8, "until": ["never"], "do_sample": False, "temperature": 0}
    [written] = asked("generate_until", (prompt, options))
    assert written
    own, other = asked("loglikelihood", (prompt, written), (prompt, " zebra zebra"))
    assert own[1] and not other[1] and other[0] < own[0] < 0
