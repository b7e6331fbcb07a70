// Calls the OpenAI API with the official package. Usage: check.mjs BASE_URL MODEL. Prints one JSON object for each call.

import OpenAI from 'openai';

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({baseURL, apiKey: 'none', maxRetries: 0});
const messages = [{role: 'user', content: 'Hello there'}];
const chat = (fields) => ({model, messages, max_tokens: 8, ...fields});

async function collected(stream) {
  let text = '';
  let usage = null;
  let end = null;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? chunk.choices[0]?.text ?? '';
    end = chunk.choices[0]?.finish_reason ?? end;
    usage = chunk.usage ?? usage;
  }
  return {text: text.length > 0, end, tokens: usage?.completion_tokens ?? null};
}

const tool = {type: 'function', function: {name: 'f', parameters: {type: 'object', properties: {}}}};
const calls = {
  models: async () => ({ids: (await client.models.list()).data.map(({id}) => id)}),
  model: async () => ({id: (await client.models.retrieve(model)).id}),
  chat: async () => {
    const {data, response} = await client.chat.completions.create(chat()).withResponse();
    return {tokens: data.usage.completion_tokens, worker: response.headers.get('x-kvrouter-worker')};
  },
  sequences: async () => ({choices: (await client.chat.completions.create(chat({n: 3}))).choices.length}),
  tools: async () => ({end: (await client.chat.completions.create(chat({tools: [tool]}))).choices[0].finish_reason}),
  logprobs: async () => {
    const answer = await client.chat.completions.create(chat({logprobs: true, top_logprobs: 2}));
    return {top: answer.choices[0].logprobs.content[0].top_logprobs.length};
  },
  stream: async () =>
    collected(await client.chat.completions.create(chat({stream: true, stream_options: {include_usage: true}}))),
  completion: async () => collected(await client.completions.create({model, prompt: 'Once', max_tokens: 5, stream: true})),
  abort: async () => {
    const stream = await client.chat.completions.create(chat({stream: true, max_tokens: 4000}));
    for await (const _ of stream) break;
    return {aborted: stream.controller.signal.aborted};
  },
  sequencesError: async () => client.chat.completions.create(chat({n: 1000})),
  messagesError: async () => client.chat.completions.create(chat({messages: []})),
  streamError: async () => client.chat.completions.create(chat({stream: true, temperature: -1})),
  formatError: async () => client.chat.completions.create(chat({response_format: {type: 'json_object'}})),
  lengthError: async () => client.completions.create({model, prompt: 'word '.repeat(20000)}),
  modelError: async () => client.chat.completions.create(chat({model: 'nobody'})),
  unknownModelError: async () => client.models.retrieve('org/nobody'),
};

for (const [name, call] of Object.entries(calls)) {
  try {
    console.log(JSON.stringify({name, ...(await call())}));
  } catch (error) {
    const {status, param, type} = error;
    console.log(JSON.stringify({name, error: error.constructor.name, status, param, type}));
  }
}
