/* An engine behind kvrouter in C: it echoes prompts, and keeps their blocks until its cache is full.
 *
 * Run it with the NATS and etcd of a running system (`kvrouter up` prints their addresses):
 *
 *     small_engine kvrouter/small-c 127.0.0.1:2379 nats://127.0.0.1:4222
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvrouter_publisher.h"

#define BLOCK 16        /* tokens per KV block */
#define CAPACITY 65536  /* KV blocks */

static kvr_worker *worker;
static volatile sig_atomic_t stopping;

/* Every failure has a message that says what to do. */
static void must(kvr_status status) {
    if (status == KVR_OK) return;
    fprintf(stderr, "%s\n", kvr_last_error());
    exit(1);
}

/* The cache: which blocks there are, by an id that says all that a block depends on. Any 64-bit ids will do; this
 * one hashes the whole prefix that a block ends. A real engine has such ids already. */
static uint64_t cache[CAPACITY];
static size_t cached_blocks;

static uint64_t block_id(uint64_t parent, const uint32_t *tokens) {
    uint64_t id = parent ^ 0x9e3779b97f4a7c15u;
    for (size_t at = 0; at < BLOCK; at++) id = (id ^ tokens[at]) * 0x100000001b3u;
    return id;
}

static bool is_cached(uint64_t id) {
    for (size_t at = 0; at < cached_blocks; at++)
        if (cache[at] == id) return true;
    return false;
}

/* "Computes" a prompt. Returns how many of its tokens were in the cache, and reports the blocks that are new. */
static uint32_t prefill(const kvr_message *request) {
    size_t blocks = request->token_count / BLOCK; /* only full blocks can be reused */
    uint64_t *ids = calloc(blocks + 1, sizeof *ids);
    size_t hits = 0;
    /* A client's salt keeps its blocks from those of others. */
    uint64_t id = kvr_content_hash(request->cache_salt, strlen(request->cache_salt));
    for (size_t at = 0; at < blocks; at++) ids[at] = id = block_id(id, request->token_ids + at * BLOCK);
    while (hits < blocks && is_cached(ids[hits])) hits++; /* and only from the start of the prompt on */

    if (hits < blocks && cached_blocks + blocks - hits > CAPACITY) {
        cached_blocks = hits = 0; /* full: a real engine evicts some blocks, and reports them with kvr_removed */
        must(kvr_cleared(worker, 0, KVR_TIER_ALL));
    }
    if (hits < blocks) {
        /* A chain of blocks, below the last one that was there. */
        kvr_stored_blocks stored = kvr_stored_blocks_init();
        stored.token_ids = request->token_ids + hits * BLOCK;
        stored.token_count = (blocks - hits) * BLOCK;
        stored.engine_hashes = ids + hits;
        stored.hash_count = blocks - hits;
        stored.parent = hits ? &ids[hits - 1] : NULL;
        stored.cache_salt = request->cache_salt;
        must(kvr_stored(worker, &stored));
        for (size_t at = hits; at < blocks; at++) cache[cached_blocks++] = ids[at];
    }
    free(ids);
    return (uint32_t)(hits * BLOCK);
}

/* Runs a request, or refuses what the engine cannot serve, so that the client learns why. A real engine runs many
 * at once, and passes the outputs of each step to kvr_emit in one call. */
static void generate(const kvr_message *request) {
    if (*request->lora_name) {
        must(kvr_refuse(worker, request->request_id, 3, "this engine has no LoRA adapters"));
        return;
    }
    kvr_output output = {.request_id = request->request_id};
    output.cached_tokens = prefill(request);
    output.has_cached_tokens = true; /* the first output says how much of the prompt was cached */
    for (size_t at = 0; at < request->token_count && at < request->max_tokens; at++) {
        output.token_ids = &request->token_ids[at];
        output.token_count = 1;
        must(kvr_emit(worker, &output, 1));
        output.has_cached_tokens = false;
    }
    output.token_count = 0;
    output.finish_reason = KVR_FINISH_LENGTH; /* the last output says why it ended */
    must(kvr_emit(worker, &output, 1));
}

static void stop(int signal_number) {
    (void)signal_number;
    stopping = 1;
}

int main(int argc, char **argv) {
    if (argc != 4) {
        fprintf(stderr, "usage: %s COMPONENT ETCD NATS\n", argv[0]);
        return 2;
    }
    signal(SIGINT, stop);
    signal(SIGTERM, stop);

    kvr_rank rank = {.dp_rank = 0, .total_blocks = CAPACITY};
    kvr_config config = kvr_config_init();
    config.component = argv[1];
    config.model = "small-c";
    config.block_size = BLOCK;
    config.ranks = &rank;
    config.rank_count = 1;
    config.etcd = argv[2];
    config.nats = argv[3];
    config.serves_requests = true;
    must(kvr_open(&config, 30000, &worker));

    kvr_info info;
    must(kvr_get_info(worker, &info));
    printf("worker %llu serves '%s' at %s\n", (unsigned long long)info.worker_id, config.model, info.endpoint);
    fflush(stdout);

    kvr_load load = {.cached_blocks = 0};
    while (!stopping) {
        kvr_message *message;
        kvr_status status = kvr_poll(worker, 200, &message);
        if (status == KVR_OK) {
            if (message->kind == KVR_MESSAGE_REQUEST) generate(message);
            kvr_message_free(message); /* an aborted request has ended already, as no other runs beside it */
        } else if (status != KVR_TIMEOUT) {
            must(status);
        }
        load.cached_blocks = cached_blocks;
        must(kvr_report_load(worker, &load));
    }
    kvr_close(worker); /* deregisters, and sends what was not sent yet */
    return 0;
}
