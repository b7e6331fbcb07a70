/* Several threads report, ask and serve at the same time; then the worker is closed. Prints what it counted. */
#include <assert.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvrouter_publisher.h"

#define BLOCK 4
#define THREADS 4
#define ROUNDS 200

static kvr_worker *worker;

static void must(kvr_status status) {
    if (status == KVR_OK) return;
    fprintf(stderr, "status %d: %s\n", status, kvr_last_error());
    abort();
}

/* Stores a chain of two blocks and removes one of them, in blocks that no other thread has. */
static void *report(void *number) {
    uint64_t base = (uint64_t)(uintptr_t)number << 32;
    for (uint64_t round = 1; round <= ROUNDS; round++) {
        uint64_t hashes[2] = {base + 2 * round, base + 2 * round + 1};
        uint32_t tokens[2 * BLOCK];
        for (int at = 0; at < 2 * BLOCK; at++) tokens[at] = (uint32_t)(base >> 20) + (uint32_t)round + (uint32_t)at;
        kvr_stored_blocks blocks = kvr_stored_blocks_init();
        blocks.dp_rank = (uint32_t)(round % 2);
        blocks.engine_hashes = hashes;
        blocks.hash_count = 2;
        blocks.token_ids = tokens;
        blocks.token_count = 2 * BLOCK;
        blocks.cache_salt = round % 3 ? NULL : "salt";
        must(kvr_stored(worker, &blocks));
        must(kvr_removed(worker, blocks.dp_rank, &hashes[1], 1, KVR_TIER_DEVICE));
        kvr_load load = {.dp_rank = blocks.dp_rank, .cached_blocks = round};
        must(kvr_report_load(worker, &load));
        bool resident = false;
        must(kvr_is_resident(worker, blocks.dp_rank, hashes[0], KVR_TIER_DEVICE, &resident));
        assert(resident);
        if (kvr_removed(worker, 7, hashes, 1, KVR_TIER_DEVICE) != KVR_INVALID_ARGUMENT) abort();
        assert(strstr(kvr_last_error(), "[0, 1], received 7"));
    }
    return NULL;
}

/* Echoes requests until the worker stops. */
static void *serve(void *unused) {
    (void)unused;
    kvr_message *message = NULL;
    kvr_status status;
    while ((status = kvr_poll(worker, UINT32_MAX, &message)) == KVR_OK) {
        if (message->kind == KVR_MESSAGE_REQUEST) {
            kvr_output output = {.request_id = message->request_id,
                                 .token_ids = message->token_ids,
                                 .token_count = message->token_count,
                                 .finish_reason = KVR_FINISH_STOP};
            must(kvr_emit(worker, &output, 1));
        }
        kvr_message_free(message);
    }
    assert(status == KVR_STOPPED);
    return NULL;
}

int main(int argc, char **argv) {
    if (argc != 4) return 64;
    kvr_rank ranks[] = {{0, 100}, {1, 100}};
    kvr_label labels[] = {{"zone", "a"}};
    const char *adapters[] = {"one", "two"};
    kvr_config config = kvr_config_init();
    config.component = argv[1];
    config.model = "m";
    config.block_size = BLOCK;
    config.etcd = argv[2];
    config.nats = argv[3];
    config.ranks = ranks;
    config.rank_count = 2;
    config.labels = labels;
    config.label_count = 1;
    config.lora_names = adapters;
    config.lora_count = 2;
    config.serves_requests = true;
    must(kvr_open(&config, 60000, &worker));

    pthread_t reporting[THREADS], serving[2];
    for (uintptr_t at = 0; at < 2; at++) pthread_create(&serving[at], NULL, serve, NULL);
    for (uintptr_t at = 0; at < THREADS; at++) pthread_create(&reporting[at], NULL, report, (void *)(at + 1));
    for (int at = 0; at < THREADS; at++) pthread_join(reporting[at], NULL);
    must(kvr_flush(worker, 60000));
    for (uint32_t rank = 0; rank < 2; rank++) {
        kvr_rank_stats stats;
        must(kvr_get_rank_stats(worker, rank, &stats));
        printf("rank %" PRIu32 " blocks %" PRIu64 " events %" PRIu64 " unsent %" PRIu64 "\n", rank, stats.blocks,
               stats.next_event_id, stats.unsent_events);
    }
    must(kvr_stop(worker));
    for (int at = 0; at < 2; at++) pthread_join(serving[at], NULL);
    assert(kvr_check(worker) == KVR_STOPPED);
    kvr_close(worker);
    return 0;
}
