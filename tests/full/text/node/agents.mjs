// Calls Anthropic's Messages and OpenAI's Responses with the official packages. Usage: agents.mjs ADDRESS MODEL.
// Prints one JSON object for each call.

import Anthropic from '@anthropic-ai/sdk';
import OpenAI from 'openai';

const [baseURL, model] = process.argv.slice(2);
const claude = new Anthropic({baseURL, apiKey: 'none', maxRetries: 0});
const openai = new OpenAI({baseURL: `${baseURL}/v1`, apiKey: 'none', maxRetries: 0});
const schema = {type: 'object', properties: {path: {type: 'string'}}};
const message = (fields) => ({
  model,
  max_tokens: 8,
  system: [{type: 'text', text: 'Help.', cache_control: {type: 'ephemeral'}}],
  tools: [{name: 'read', description: 'Reads.', input_schema: schema}],
  messages: [{role: 'user', content: 'Hello there'}],
  ...fields,
});
const response = (fields) => ({
  model,
  max_output_tokens: 8,
  instructions: 'Help.',
  tools: [{type: 'function', name: 'read', parameters: schema, strict: false}],
  input: [{role: 'user', content: 'Hello there'}],
  store: false,
  ...fields,
});

const calls = {
  message: async () => {
    const {content, stop_reason, usage} = await claude.messages.create(message());
    return {blocks: content.map(({type}) => type), end: stop_reason, tokens: usage.output_tokens};
  },
  messageStream: async () => {
    const {content, stop_reason, usage} = await claude.messages.stream(message()).finalMessage();
    return {blocks: content.map(({type}) => type), end: stop_reason, tokens: usage.output_tokens};
  },
  count: async () => {
    const {max_tokens, ...counted} = message();
    return {counted: (await claude.messages.countTokens(counted)).input_tokens > 10};
  },
  messageError: async () => claude.messages.create(message({messages: []})),
  messageModelError: async () => claude.messages.create(message({model: 'nobody'})),
  response: async () => {
    const {output, status, usage} = await openai.responses.create(response());
    return {items: output.map(({type}) => type), end: status, tokens: usage.output_tokens};
  },
  responseStream: async () => {
    let last = null;
    let text = '';
    for await (const event of await openai.responses.create(response({stream: true}))) {
      text += event.type === 'response.output_text.delta' ? event.delta : '';
      last = event;
    }
    return {text: text.length > 0, end: last.type, tokens: last.response.usage.output_tokens};
  },
  storeError: async () => openai.responses.create(response({store: true})),
};

for (const [name, call] of Object.entries(calls)) {
  try {
    console.log(JSON.stringify({name, ...(await call())}));
  } catch (error) {
    const {status, param, type} = error;
    console.log(JSON.stringify({name, error: error.constructor.name, status, param, type}));
  }
}
