// Runs what the guide of the AI SDK shows: a text, a stream, an object, a tool. Arguments: URL, model.
import assert from 'node:assert/strict';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateObject, generateText, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const [baseURL, name] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: 'kvrouter', baseURL, apiKey: 'none', supportsStructuredOutputs: true });
const model = provider(name);
const options = { model, maxRetries: 0 };

assert((await generateText({ ...options, prompt: 'Hello' })).text);

let text = '';
for await (const piece of streamText({ ...options, prompt: 'Hello' }).textStream) text += piece;
assert(text);

const schema = z.object({ name: z.string(), inhabitants: z.number().int(), districts: z.array(z.string()) });
const city = await generateObject({ ...options, schema, prompt: 'Name a city.' });
schema.parse(city.object);

const cities = [];
const getWeather = tool({
  description: 'Tells the weather of a city.',
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => { cities.push(city); return 'Sunny'; },
});
const answer = await generateText({
  ...options, tools: { get_weather: getWeather }, stopWhen: stepCountIs(3), prompt: 'What is the weather in Paris?',
});
assert.equal(cities.length, 1);
assert(answer.text);
