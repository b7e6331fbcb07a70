// Calls a Frontend over gRPC: a stream, a cancellation, the manual life cycle, errors, and a reconnection.
// Usage: client.js TARGET MODEL. It prints one line for each step. For the last step restart the Frontend.

import {randomUUID} from 'node:crypto';
import path from 'node:path';
import {setTimeout as sleep} from 'node:timers/promises';
import {promisify} from 'node:util';

import grpc from '@grpc/grpc-js';
import protoLoader from '@grpc/proto-loader';
import {getProtoPath} from 'google-proto-files';

const PROTOS = path.join(import.meta.dirname, 'protos');
const PROMPT = Array.from({length: 256}, (_, index) => index + 1);
const TEXT = 'Once upon a time';
const ENDLESS = 50_000;
const CALL_MS = 30_000;
const RETRY_MS = 60_000;

// Without keepCase, fields in snake_case are dropped silently.
const {kvrouter} = grpc.loadPackageDefinition(
  protoLoader.loadSync('kvrouter/v1/frontend.proto', {includeDirs: [PROTOS], keepCase: true, longs: String}),
);

const details = protoLoader.loadSync(['google/rpc/status.proto', 'google/rpc/error_details.proto'], {
  includeDirs: [path.dirname(getProtoPath())],
  keepCase: true,
  longs: Number,
  defaults: true,
});

/** Returns the detail of a type from `grpc-status-details-bin`; undefined if the error has none. */
function detail(error, typeName) {
  const [packed] = error.metadata.get('grpc-status-details-bin');
  if (!packed) return undefined;
  const status = details['google.rpc.Status'].deserialize(packed);
  const found = status.details.find(({type_url}) => type_url.endsWith(`/${typeName}`));
  return found && details[typeName].deserialize(found.value);
}

/** Returns the milliseconds to wait before a retry; undefined if a retry cannot succeed. */
function retryMs(error) {
  const retry = detail(error, 'google.rpc.RetryInfo');
  if (retry) return retry.retry_delay.seconds * 1000 + retry.retry_delay.nanos / 1e6;
  // The library itself reports a lost connection, without details. The retry waits until it is connected again.
  return error.code === grpc.status.UNAVAILABLE ? 0 : undefined;
}

/** Returns the answer of a call, which is repeated while the server says that a retry may succeed. */
async function retrying(call) {
  const giveUp = Date.now() + RETRY_MS;
  for (;;) {
    try {
      return await call();
    } catch (error) {
      const pause = error.metadata && retryMs(error);
      if (pause === undefined || Date.now() + pause > giveUp) throw error;
      await sleep(pause);
    }
  }
}

/** Returns the error of a call that is expected to fail. */
async function failed(promise) {
  const error = await promise.then(
    () => undefined,
    reason => reason,
  );
  if (error?.metadata) return error;
  throw error ?? new Error('expected the call to fail, but it succeeded');
}

/** Resolves when a stream has ended, and rejects with its error if it failed. */
function ended(call) {
  return new Promise((resolve, reject) => call.once('end', resolve).once('error', reject));
}

function waiting() {
  return new grpc.Metadata({waitForReady: true});
}

function callOptions() {
  return {deadline: Date.now() + CALL_MS};
}

/** The steps, over one channel. */
class Client {
  constructor(stub, model) {
    this.stub = stub;
    this.model = model;
  }

  unary(method, request) {
    return promisify(this.stub[method].bind(this.stub))(request, waiting(), callOptions());
  }

  request(maxTokens) {
    return {model: this.model, token_ids: {ids: PROMPT}, stop_conditions: {max_tokens: maxTokens, ignore_eos: true}};
  }

  /** Runs a request to its end. Returns the worker, and the numbers of tokens and of characters. */
  async generate(request) {
    let worker;
    let tokens = 0;
    let characters = 0;
    for await (const {output, routing} of this.stub.Generate(request, waiting(), callOptions())) {
      if (routing) worker = routing.rank.worker_id;
      tokens += output?.token_ids?.length ?? 0;
      characters += output?.text?.length ?? 0;
    }
    return {worker, tokens, characters};
  }

  async stream() {
    const {worker, tokens} = await retrying(() => this.generate(this.request(16)));
    console.log(`stream: worker ${worker}, ${tokens} tokens`);
  }

  /** Sends a text instead of token ids, and gets the output as text too. */
  async text() {
    const {token_ids: _, ...request} = {...this.request(16), prompt_text: TEXT, return_text: true};
    const {tokens, characters} = await retrying(() => this.generate(request));
    console.log(`text: ${characters} characters, ${tokens} tokens`);
  }

  async cancel() {
    const call = this.stub.Generate(this.request(ENDLESS), waiting());
    let pieces = 0;
    call.on('data', () => {
      pieces += 1;
      if (pieces === 3) call.cancel();
    });
    const error = await failed(ended(call));
    console.log(`cancel: after ${Math.min(pieces, 3)} pieces, ${grpc.status[error.code]}`);
  }

  /** Books a worker as a client that dispatches by itself does. Shows meanwhile what a busy worker answers. */
  async manualLifeCycle() {
    const booking = {request_id: randomUUID()};
    const request = {model: this.model, token_ids: {ids: PROMPT}, max_output_tokens: 16};
    const {selection} = await retrying(() => this.unary('SelectWorker', {request, booking}));
    const {worker_id} = selection.rank;
    // Only the booked worker may serve this request, and only if that worker has no active block.
    const busy = {
      ...this.request(16),
      constraints: {worker_id},
      overrides: {active_decode_blocks_threshold: 0},
    };
    try {
      console.log(`book: worker ${worker_id} at ${selection.endpoint}`);
      // Here such a client sends its request to the worker. The first token has arrived:
      const {known} = await this.unary('MarkPrefillComplete', {booking});
      console.log(`prefill complete: known ${known}`);
      sayFailure('all busy', await failed(this.generate(busy)));
    } finally {
      const {known} = await this.unary('Free', {booking});
      console.log(`free: known ${known}`);
    }
    const {worker, tokens} = await retrying(() => this.generate(busy));
    console.log(`retry: worker ${worker}, ${tokens} tokens`);
  }

  async unknownModel() {
    const request = {...this.request(1), model: 'no-such-model'};
    sayFailure('unknown model', await failed(this.generate(request)));
  }

  /** Loses the Frontend during a stream, and sends the request again. */
  async reconnect() {
    const call = this.stub.Generate(this.request(ENDLESS), waiting());
    call.once('data', () => console.log('reconnect: restart the Frontend now'));
    const error = await failed(ended(call));
    if (retryMs(error) === undefined) throw error;
    const {worker, tokens} = await retrying(() => this.generate(this.request(16)));
    console.log(`reconnected: after ${grpc.status[error.code]}, worker ${worker}, ${tokens} tokens`);
  }
}

function sayFailure(step, error) {
  const info = detail(error, 'google.rpc.ErrorInfo');
  const pause = detail(error, 'google.rpc.RetryInfo') ? `retry in ${retryMs(error)} ms` : 'no retry';
  const values = info?.metadata.known_values ?? 'none';
  console.log(`${step}: ${grpc.status[error.code]}, ${info?.reason}, ${pause}, known values: ${values}`);
}

async function main(target, model) {
  const stub = new kvrouter.v1.FrontendService(target, grpc.credentials.createInsecure());
  const client = new Client(stub, model);
  try {
    await client.stream();
    await client.text();
    await client.cancel();
    await client.manualLifeCycle();
    await client.unknownModel();
    await client.reconnect();
  } finally {
    stub.close();
  }
}

if (process.argv.length !== 4) {
  console.error('usage: client.js TARGET MODEL, such as client.js 127.0.0.1:8001 mock-model');
  process.exit(2);
}
await main(process.argv[2], process.argv[3]);
