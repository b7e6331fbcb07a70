"""Runs what the guides of a library show: chat, stream, structured output, tool. Arguments: library, URL, model."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from pydantic import BaseModel

QUESTION = "What is the weather in Paris?"


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


if __name__ == "__main__":
    library, *where = sys.argv[1:]
    {"instructor": instructor, "pydantic_ai": pydantic_ai}[library](*where)
