/* A worker that does what it reads on standard input, one command per line, and answers each with a line:
 * the status, then numbers, then the error. Arguments after the fixed ones are options of security, name=value. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvrouter_publisher.h"

#define BLOCK 8
#define MOST_HASHES (1 << 16)

static uint64_t hashes[MOST_HASHES];
static uint32_t tokens[MOST_HASHES * BLOCK];

static size_t read_hashes(void) {
    size_t count = strtoull(strtok(NULL, " "), NULL, 10);
    for (size_t at = 0; at < count; at++) hashes[at] = strtoull(strtok(NULL, " "), NULL, 10);
    return count;
}

static kvr_status stored(kvr_worker *worker) {
    const char *named = strtok(NULL, " ");
    uint64_t parent = strtoull(named, NULL, 10);
    size_t count = read_hashes();
    for (size_t at = 0; at < count * BLOCK; at++) tokens[at] = (uint32_t)strtoul(strtok(NULL, " "), NULL, 10);
    kvr_stored_blocks blocks = kvr_stored_blocks_init();
    blocks.engine_hashes = hashes;
    blocks.hash_count = count;
    blocks.token_ids = tokens;
    blocks.token_count = count * BLOCK;
    blocks.parent = strcmp(named, "-") == 0 ? NULL : &parent;
    return kvr_stored(worker, &blocks);
}

static kvr_status obey(kvr_worker *worker, char *line) {
    const char *command = strtok(line, " \n");
    if (strcmp(command, "stored") == 0) return stored(worker);
    if (strcmp(command, "removed") == 0) return kvr_removed(worker, 0, hashes, read_hashes(), KVR_TIER_DEVICE);
    if (strcmp(command, "cleared") == 0) return kvr_cleared(worker, 0, KVR_TIER_ALL);
    if (strcmp(command, "lost") == 0) return kvr_events_lost(worker, 0, true);
    if (strcmp(command, "flush") == 0) return kvr_flush(worker, 20000);
    if (strcmp(command, "stop") == 0) return kvr_stop(worker);
    if (strcmp(command, "load") == 0) {
        kvr_load load = {.running_requests = (uint32_t)strtoul(strtok(NULL, " "), NULL, 10), .active_blocks = 3};
        return kvr_report_load(worker, &load);
    }
    return kvr_check(worker);
}

static const char **text_option(kvr_config *config, const char *name) {
    struct {
        const char *name, **field;
    } known[] = {
        {"tls_cert_file", &config->tls_cert_file},
        {"tls_key_file", &config->tls_key_file},
        {"tls_ca_file", &config->tls_ca_file},
        {"tls_peer_domain", &config->tls_peer_domain},
        {"etcd_ca_file", &config->etcd_ca_file},
        {"etcd_user", &config->etcd_user},
        {"etcd_password_file", &config->etcd_password_file},
        {"nats_ca_file", &config->nats_ca_file},
        {"nats_user", &config->nats_user},
        {"nats_password_file", &config->nats_password_file},
        {"nats_token_file", &config->nats_token_file},
        {"nats_nkey_file", &config->nats_nkey_file},
        {"nats_credentials_file", &config->nats_credentials_file},
        {"nats_inbox_prefix", &config->nats_inbox_prefix},
    };
    for (size_t at = 0; at < sizeof known / sizeof *known; at++)
        if (strcmp(known[at].name, name) == 0) return known[at].field;
    return NULL;
}

static void note(void *context, kvr_log_level level, const char *event, const char *details) {
    (void)context;
    (void)level;
    fprintf(stderr, "%s %s\n", event, details);
}

int main(int argc, char **argv) {
    if (argc < 9) return 64;
    kvr_config config = kvr_config_init();
    config.component = argv[1];
    config.model = "m";
    config.block_size = BLOCK;
    config.worker_id = strtoull(argv[2], NULL, 10);
    config.etcd = argv[3];
    config.nats = argv[4];
    config.transport = (kvr_transport)atoi(argv[5]);
    config.buffer_events = strtoull(argv[6], NULL, 10);
    config.lease_ttl_seconds = (uint32_t)atoi(argv[7]);
    config.model = argv[8];
    config.heartbeat_ms = 300;
    config.flush_ms = 300;
    config.load_report_ms = 50;
    config.log = note;
    uint32_t timeout_ms = 60000;
    for (int at = 9; at < argc; at++) {
        char *value = strchr(argv[at], '=');
        if (value == NULL) return 64;
        *value++ = 0;
        if (strcmp(argv[at], "tls_client_auth") == 0) {
            config.tls_client_auth = atoi(value) != 0;
        } else if (strcmp(argv[at], "timeout_ms") == 0) {
            timeout_ms = (uint32_t)atoi(value);
        } else {
            const char **field = text_option(&config, argv[at]);
            if (field == NULL) return 64;
            *field = value;
        }
    }

    kvr_worker *worker = NULL;
    kvr_status status = kvr_open(&config, timeout_ms, &worker);
    printf("%d 0 0 0 0 0 %s\n", status, status == KVR_OK ? "" : kvr_last_error());
    fflush(stdout);
    if (status != KVR_OK) return 1;

    static char line[1 << 22];
    while (fgets(line, sizeof line, stdin)) {
        status = obey(worker, line);
        kvr_info info;
        kvr_rank_stats stats;
        if (kvr_get_info(worker, &info) != KVR_OK || kvr_get_rank_stats(worker, 0, &stats) != KVR_OK) return 2;
        const char *error = status == KVR_OK ? "" : kvr_last_error();
        if (strncmp(line, "refused", 7) == 0) {
            printf("%d %" PRIu64 " %" PRIu64 " 0 0 0\n", status, info.refused_connections, info.refused_calls);
        } else if (strncmp(line, "where", 5) == 0) {
            printf("%d 0 0 0 0 0 %s\n", status, info.endpoint);
        } else {
            printf("%d %" PRIu64 " %" PRIu64 " %d %" PRIu64 " %" PRIu64 " %s\n", status, info.incarnation,
                   stats.next_event_id, info.registered, stats.events_dropped, stats.retries, error);
        }
        fflush(stdout);
    }
    kvr_close(worker);
    return 0;
}
