"""Runs what the guides of a library show: chat, stream, structured output, tool. Arguments: library, URL, model."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from pydantic import BaseModel

QUESTION = "What is the weather in Paris?"


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class City(BaseModel):
    """A city."""

    name: str
    inhabitants: int
    districts: list[str]


def instructor(url: str, model: str) -> None:
    from instructor import Mode, from_openai
    from openai import OpenAI

    for mode in (Mode.TOOLS, Mode.JSON_SCHEMA):
        client = from_openai(OpenAI(base_url=url, api_key="none", max_retries=0), mode=mode)
        message: Any = {"role": "user", "content": "Name a city."}
        city = client.chat.completions.create(model=model, messages=[message], response_model=City, max_retries=0)
        assert isinstance(city, City)


def pydantic_ai(url: str, model: str) -> None:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    chat = OpenAIChatModel(model, provider=OpenAIProvider(base_url=url, api_key="none"))
    cities: list[str] = []

    def get_weather(city: str) -> str:
        """Tells the weather of a city."""
        cities.append(city)
        return "Sunny"

    async def run() -> None:
        assert (await Agent(chat).run("Hello")).output
        async with Agent(chat).run_stream("Hello") as stream:
            assert "".join([text async for text in stream.stream_text(delta=True)])
        for output in (City, NativeOutput(City)):
            assert isinstance((await Agent(chat, output_type=output).run("Name a city.")).output, City)
        assert (await Agent(chat, tools=[get_weather]).run(QUESTION)).output
        assert len(cities) == 1
        assert isinstance((await Agent(chat, output_type=City, tools=[get_weather]).run(QUESTION)).output, City)

    asyncio.run(run())


def litellm(url: str, model: str) -> None:
    from litellm import completion

    messages: list[Any] = [{"role": "user", "content": "Name a city."}]
    where: dict[str, Any] = {"model": f"openai/{model}", "api_base": url, "api_key": "none", "num_retries": 0}
    assert completion(messages=messages, **where).choices[0].message.content
    assert "".join(part.choices[0].delta.content or "" for part in completion(messages=messages, stream=True, **where))
    city = completion(messages=messages, response_format=City, **where).choices[0].message.content
    assert City.model_validate_json(city)
    question: list[Any] = [{"role": "user", "content": QUESTION}]
    answer = completion(messages=question, tools=[WEATHER], tool_choice="required", **where).choices[0].message
    assert {call.function.name for call in answer.tool_calls} == {"get_weather"}
    assert all(json.loads(call.function.arguments)["city"] for call in answer.tool_calls)
    results = [{"role": "tool", "tool_call_id": call.id, "content": "Sunny"} for call in answer.tool_calls]
    assert completion(messages=[*question, answer, *results], **where).choices[0].message.content


def langchain(url: str, model: str) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def get_weather(city: str) -> str:
        """Tells the weather of a city."""
        return f"Sunny in {city}"

    chat = ChatOpenAI(model=model, base_url=url, api_key="none", max_retries=0)
    assert chat.invoke("Hello").content
    assert "".join(str(part.content) for part in chat.stream("Hello"))
    for method in ("json_schema", "function_calling"):
        assert isinstance(chat.with_structured_output(City, method=method).invoke("Name a city."), City)
    messages: list[Any] = [HumanMessage(QUESTION)]
    answer: Any = chat.bind_tools([get_weather], tool_choice="any").invoke(messages)
    assert {call["name"] for call in answer.tool_calls} == {"get_weather"}
    results = [ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls]
    assert chat.invoke([*messages, answer, *results]).content


if __name__ == "__main__":
    library, *where = sys.argv[1:]
    {"instructor": instructor, "langchain": langchain, "litellm": litellm, "pydantic_ai": pydantic_ai}[library](*where)
