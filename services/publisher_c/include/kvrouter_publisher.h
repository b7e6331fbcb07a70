/* kvrouter_publisher.h: registers an engine with kvrouter, reports its KV cache and serves its requests.
 *
 * A worker is opened, reports what happens to its cache, and is closed. Reports are recorded at once and sent in the
 * background: no report waits for the network. All functions may be called from any thread at any time, except that
 * kvr_close must be the last call for its worker. A process that has an open worker must not fork without exec.
 *
 * Functions that can fail return a kvr_status. After a failure kvr_last_error() says in English what was expected, what
 * was received and what to do. Strings are UTF-8. Pointers that are passed in need to be valid only during the call.
 */
#ifndef KVROUTER_PUBLISHER_H
#define KVROUTER_PUBLISHER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Version of this header. A library refuses programs that were compiled against another one. */
#define KVR_HEADER_VERSION 2

/* Why a function failed. */
typedef enum kvr_status {
    KVR_OK = 0,
    /* A null pointer, or a value out of range; the message names it. */
    KVR_INVALID_ARGUMENT = 1,
    /* A report is inconsistent. Nothing of it was recorded. */
    KVR_INVALID_EVENT = 2,
    /* Blocks were stored below a parent that the rank does not have. Nothing of it was recorded. */
    KVR_UNKNOWN_PARENT = 3,
    /* The worker differs from the other workers of its component, so it was refused. */
    KVR_DESCRIPTOR_MISMATCH = 4,
    /* Another process registered the same worker. This one has ended: close it. */
    KVR_KEY_TAKEN = 5,
    /* The time is over. */
    KVR_TIMEOUT = 6,
    /* The worker was stopped. */
    KVR_STOPPED = 7,
    /* A defect of the library; the message says what is known. */
    KVR_INTERNAL = 8
} kvr_status;

/* Where a block is stored. */
typedef enum kvr_tier {
    /* Every tier; only for kvr_cleared. */
    KVR_TIER_ALL = 0,
    KVR_TIER_DEVICE = 1,
    KVR_TIER_HOST = 2,
    KVR_TIER_DISK = 3,
    KVR_TIER_SHARED = 4,
    /* No place: a reusable prefix of a hybrid model may end with the block. */
    KVR_TIER_CHECKPOINT = 5
} kvr_tier;

/* How the events reach the Indexers. */
typedef enum kvr_transport {
    /* The component's default, which its first worker sets; JetStream if that leaves it open too. */
    KVR_TRANSPORT_DEFAULT = 0,
    /* JetStream: stored, and replayed to an Indexer that was away. */
    KVR_TRANSPORT_DURABLE = 1,
    /* Core NATS: not stored. What an Indexer misses, it fetches from the worker. */
    KVR_TRANSPORT_CORE_NATS = 2
} kvr_transport;

/* How reports count several physical copies of one block. With the wrong value, blocks disappear from the index too
 * early or never. */
typedef enum kvr_copy_counting {
    /* Each physical copy is stored and removed by a report of its own. The last removal removes the block. */
    KVR_COPIES_COUNTED = 0,
    /* Reports describe a set of blocks. One removal removes the block, however often it was stored. */
    KVR_COPIES_SET = 2
} kvr_copy_counting;

/* What a worker does for a request. */
typedef enum kvr_role {
    KVR_ROLE_BOTH = 0,
    KVR_ROLE_PREFILL = 1,
    KVR_ROLE_DECODE = 2
} kvr_role;

/* Why a generation ended. */
typedef enum kvr_finish_reason {
    /* It has not ended. */
    KVR_UNFINISHED = 0,
    KVR_FINISH_STOP = 1,
    KVR_FINISH_LENGTH = 2,
    KVR_FINISH_ABORT = 3,
    KVR_FINISH_ERROR = 4,
    KVR_FINISH_TOOL_CALLS = 5,
    KVR_FINISH_CONTENT_FILTER = 6
} kvr_finish_reason;

/* Importance of a log event. */
typedef enum kvr_log_level { KVR_LOG_INFO = 1, KVR_LOG_WARNING = 2, KVR_LOG_ERROR = 3 } kvr_log_level;

/* Takes a log event: its name, such as "nats.disconnected", and its details. Called from threads of the library; it
 * must not call the library. */
typedef void (*kvr_log_function)(void *context, kvr_log_level level, const char *event, const char *details);

/* A data-parallel rank. */
typedef struct kvr_rank {
    uint32_t dp_rank;
    /* KV blocks in its device memory; 0 if unknown. */
    uint64_t total_blocks;
} kvr_rank;

/* A label that routing constraints can require. */
typedef struct kvr_label {
    const char *key;
    const char *value;
} kvr_label;

/* Configuration of a worker. Begin with kvr_config_init(); 0 and NULL are the defaults of all further fields. */
typedef struct kvr_config {
    uint32_t header_version;
    /* Tokens per block of the engine's KV cache; equal for all workers of the component. Required. */
    uint32_t block_size;
    /* Pool of interchangeable workers to join, as namespace/component. Required. */
    const char *component;
    /* Name of the model that clients send in their requests. Required. */
    const char *model;
    /* Identity in the component; 0 for a random one. A worker that restarts with its previous id replaces its previous
     * registration. */
    uint64_t worker_id;
    /* Data-parallel ranks; none for rank 0 alone. */
    const kvr_rank *ranks;
    size_t rank_count;
    /* host:port of etcd, several separated by commas; by default 127.0.0.1:2379. */
    const char *etcd;
    /* URL of NATS, several separated by commas; by default nats://127.0.0.1:4222. */
    const char *nats;
    /* host:port on which the worker listens; by default 127.0.0.1:0, where port 0 chooses a free one. */
    const char *bind;
    /* Address under which others reach the worker: host:port, or a host alone to use the port of bind. */
    const char *advertise;
    kvr_transport transport;
    kvr_copy_counting copy_counting;
    kvr_role role;
    const kvr_label *labels;
    size_t label_count;
    /* Names of the LoRA adapters that the worker serves. */
    const char *const *lora_names;
    size_t lora_count;
    /* Maximum number of prompt tokens computed in one step; 0 if unknown. */
    uint32_t max_batched_tokens;
    /* Maximum number of requests that run at once; 0 if unknown. */
    uint32_t max_sequences;
    /* Maximum number of prompt and output tokens together; 0 for no limit. Equal for all workers of the component. */
    uint32_t max_model_len;
    /* Whether the worker serves requests, which the engine takes with kvr_poll. Otherwise it publishes only. */
    bool serves_requests;
    /* Interval of heartbeats while there are no events, milliseconds; by default 5000. */
    uint32_t heartbeat_ms;
    /* Minimum interval between published load reports of a rank, milliseconds; by default 1000. */
    uint32_t load_report_ms;
    /* Time after which a worker that died is no longer a candidate, seconds, at least 2; by default 10. */
    uint32_t lease_ttl_seconds;
    /* Time for running requests to finish when the worker stops, milliseconds; by default 30000. Then they are
     * aborted. */
    uint32_t drain_ms;
    /* Time for unsent events to be sent when the worker stops, milliseconds; by default 5000. */
    uint32_t flush_ms;
    /* Events stored per rank, both unsent ones and sent ones for resyncs; by default 200000. */
    uint64_t buffer_events;
    /* Bytes of encoded events stored per rank, at least 512 KiB; by default 32 MiB. */
    uint64_t buffer_bytes;
    /* Security, as docs/guides/security.md describes it. Files are PEM; those with a secret must have mode 0600 or
     * 0640. All of them are read again when they change or at the next connection, so that they can be renewed. */
    /* The worker's certificate with the intermediate ones, and its unencrypted key. They turn TLS on for the port of
     * the worker, and are shown to etcd and NATS. */
    const char *tls_cert_file;
    const char *tls_key_file;
    /* Authorities of the certificates of others. */
    const char *tls_ca_file;
    /* Whether callers must present a certificate of these authorities. */
    bool tls_client_auth;
    /* If set, a caller's certificate must contain its role in this domain, such as frontend.kvrouter.internal: a role
     * of frontend, scheduler, indexer or admin. Needs tls_client_auth. */
    const char *tls_peer_domain;
    /* etcd with https:// before its endpoints, and with users. By default the authorities are those of tls_ca_file,
     * and if that is not set, the system's. */
    const char *etcd_ca_file;
    const char *etcd_user;
    const char *etcd_password_file;
    /* NATS with tls:// URLs, and at most one of: user and password, a token, the seed of an NKEY, credentials
     * (.creds). Authorities as for etcd. The prefix of reply subjects is what the account may subscribe to. */
    const char *nats_ca_file;
    const char *nats_user;
    const char *nats_password_file;
    const char *nats_token_file;
    const char *nats_nkey_file;
    const char *nats_credentials_file;
    const char *nats_inbox_prefix;
    /* Takes log events; by default warnings and errors go to standard error. */
    kvr_log_function log;
    void *log_context;
} kvr_config;

/* Returns a configuration with all defaults. */
static inline kvr_config kvr_config_init(void) {
    kvr_config config;
    memset(&config, 0, sizeof config);
    config.header_version = KVR_HEADER_VERSION;
    return config;
}

/* An open worker. */
typedef struct kvr_worker kvr_worker;

/* Returns the message of this thread's last failure; empty if it had none. Valid until this thread's next call. */
const char *kvr_last_error(void);

/* Registers a worker and begins a new incarnation of its cache. Waits for etcd, at most timeout_ms (0 for no limit),
 * but not for NATS. On success *worker is the worker. */
kvr_status kvr_open(const kvr_config *config, uint32_t timeout_ms, kvr_worker **worker);

/* Refuses new requests, lets running ones finish, deregisters, sends unsent events, and stops serving. The engine must
 * poll and emit meanwhile if it serves requests. Then every other function returns KVR_STOPPED. */
kvr_status kvr_stop(kvr_worker *worker);

/* Stops the worker, if that was not done, and frees it. NULL is ignored. No other call may run or follow. */
void kvr_close(kvr_worker *worker);

/* Returns KVR_OK while the worker runs, otherwise why it ended. */
kvr_status kvr_check(kvr_worker *worker);

/* -- The cache ----------------------------------------------------------------------------------------------------- */

/* Content that is hashed into a block together with its tokens, such as an image. */
typedef struct kvr_multimodal {
    /* Index of the block in this report that the content starts in. */
    uint32_t block_index;
    /* kvr_content_hash of the content's id. */
    uint64_t hash;
} kvr_multimodal;

/* Blocks that the engine stored, each the parent of the next. Begin with kvr_stored_blocks_init(). Only full blocks
 * may be reported. */
typedef struct kvr_stored_blocks {
    uint32_t dp_rank;
    kvr_tier tier;
    /* Tokens of these blocks only: hash_count times the block size. */
    const uint32_t *token_ids;
    size_t token_count;
    /* The engine's ids of the blocks. Of a digest, kvr_digest_hash(). */
    const uint64_t *engine_hashes;
    size_t hash_count;
    /* Engine hash of the block before the first; NULL at the start of a sequence. */
    const uint64_t *parent;
    /* What besides the tokens decides whether the blocks may be shared; NULL for none. If all three are NULL, the
     * blocks have the parent's. */
    const char *lora_name;
    const char *cache_salt;
    const char *tenant;
    const kvr_multimodal *multimodal;
    size_t multimodal_count;
    /* Whether the report repeats blocks that are resident already, such as the hits of a request, instead of storing
     * new copies. Blocks that are not resident are stored nevertheless. */
    bool repeats;
    /* Tokens per engine hash, if the engine stores larger blocks in this tier: a multiple of the component's block
     * size. 0 for the component's. */
    uint32_t block_size;
} kvr_stored_blocks;

/* Returns a report of no blocks in device memory of rank 0. */
static inline kvr_stored_blocks kvr_stored_blocks_init(void) {
    kvr_stored_blocks blocks;
    memset(&blocks, 0, sizeof blocks);
    blocks.tier = KVR_TIER_DEVICE;
    return blocks;
}

/* Reports stored blocks. */
kvr_status kvr_stored(kvr_worker *worker, const kvr_stored_blocks *blocks);

/* Reports that resident blocks are now in another tier too, for engines that do not repeat the tokens. *recorded,
 * unless NULL, becomes the number of these hashes that were recorded. */
kvr_status kvr_stored_in_tier(kvr_worker *worker, uint32_t dp_rank, const uint64_t *engine_hashes, size_t hash_count,
                            kvr_tier tier, uint64_t *recorded);

/* Reports that blocks left a tier: one copy of each with counted copies, otherwise the whole block. Blocks that are not
 * resident there are counted and change nothing. */
kvr_status kvr_removed(kvr_worker *worker, uint32_t dp_rank, const uint64_t *engine_hashes, size_t hash_count,
                       kvr_tier tier);

/* Reports that all blocks left a tier, or every tier for KVR_TIER_ALL, also when the rank's engine restarted. The
 * latter makes a rank complete again after a loss of events. */
kvr_status kvr_cleared(kvr_worker *worker, uint32_t dp_rank, kvr_tier tier);

/* Reports that events of the engine were lost, so that blocks may be missing. If removals may be among them, all
 * blocks are dropped. What is reported from now on is published. */
kvr_status kvr_events_lost(kvr_worker *worker, uint32_t dp_rank, bool removals);

/* Sets *resident to whether a block is resident in a tier, by what was reported. */
kvr_status kvr_is_resident(kvr_worker *worker, uint32_t dp_rank, uint64_t engine_hash, kvr_tier tier, bool *resident);

/* Waits until all events recorded so far are sent, at most timeout_ms (0 for no limit). */
kvr_status kvr_flush(kvr_worker *worker, uint32_t timeout_ms);

/* Returns the hash of an id of multimodal content: XXH3-64 with seed 1337. Clients and engines must use the same. */
uint64_t kvr_content_hash(const void *id, size_t size);

/* Returns the engine hash of a digest of at least 8 bytes: its last 8 bytes, big-endian. 0 for a shorter one. */
uint64_t kvr_digest_hash(const void *digest, size_t size);

/* -- The load ------------------------------------------------------------------------------------------------------ */

/* Load of one rank. */
typedef struct kvr_load {
    uint32_t dp_rank;
    /* Number of running requests. */
    uint32_t running_requests;
    /* Number of requests that wait in the engine. */
    uint32_t waiting_requests;
    /* KV blocks that running requests use; a block that several requests share counts once. */
    uint64_t active_blocks;
    /* KV blocks in device memory; 0 for those of the configuration. */
    uint64_t total_blocks;
    /* Prompt tokens of accepted requests that are not computed yet. */
    uint64_t prefill_tokens;
    /* Blocks in the prefix cache, in use or not. */
    uint64_t cached_blocks;
    /* Prompt tokens of finished prefills, and how many of them were found in the prefix cache. */
    uint64_t prompt_tokens_total;
    uint64_t cached_tokens_total;
} kvr_load;

/* Reports the load of a rank, such as after each step. The newest report is published; too frequent ones are
 * skipped. */
kvr_status kvr_report_load(kvr_worker *worker, const kvr_load *load);

/* -- Requests ------------------------------------------------------------------------------------------------------ */

typedef enum kvr_message_kind {
    /* A request to run. */
    KVR_MESSAGE_REQUEST = 1,
    /* A polled request ended early: its caller left, or it was aborted. What is still emitted for it is dropped.
       A request that ends before it is polled is never polled, and neither is an abort of it. */
    KVR_MESSAGE_ABORT = 2
} kvr_message_kind;

/* What the engine polls for. It belongs to the caller, who frees it with kvr_message_free. */
typedef struct kvr_message {
    kvr_message_kind kind;
    /* Identifies the request; no other one has it. */
    const char *request_id;
    /* The rank that must run the request. All fields from here on are for requests only. */
    uint32_t dp_rank;
    const uint32_t *token_ids;
    size_t token_count;
    /* Maximum number of tokens to generate, at least 1. */
    uint32_t max_tokens;
    /* Number of tokens to generate before a stop token ends the generation. */
    uint32_t min_tokens;
    const uint32_t *stop_token_ids;
    size_t stop_token_count;
    bool ignore_eos;
    /* Sampling; NaN or 0 for the engine's default. */
    double temperature;
    double top_p;
    uint32_t top_k;
    bool has_seed;
    uint64_t seed;
    /* A smaller value is served earlier. */
    int32_t priority;
    /* LoRA adapter, cache salt and tenant of its blocks; empty for none. */
    const char *lora_name;
    const char *cache_salt;
    const char *tenant;
    /* The whole request as an encoded kvrouter.v1.WorkerServiceGenerateRequest, for all other fields. */
    const uint8_t *encoded;
    size_t encoded_size;
} kvr_message;

/* Waits for the next message, at most timeout_ms (0 returns at once, UINT32_MAX waits without limit). KVR_TIMEOUT if
 * there is none; KVR_STOPPED once the worker was stopped and all messages were taken. */
kvr_status kvr_poll(kvr_worker *worker, uint32_t timeout_ms, kvr_message **message);

/* Frees a message. NULL is ignored. */
void kvr_message_free(kvr_message *message);

/* The output of one request in one step. */
typedef struct kvr_output {
    const char *request_id;
    /* Token ids generated since the previous output. */
    const uint32_t *token_ids;
    size_t token_count;
    /* Why the request has ended; set in its last output. */
    kvr_finish_reason finish_reason;
    /* Prompt tokens found in the prefix cache; set in the first output with tokens. */
    bool has_cached_tokens;
    uint32_t cached_tokens;
    /* Log probabilities of the tokens, if requested. */
    const float *logprobs;
    size_t logprob_count;
    /* Parameters for the decode worker; set in the last output of a prefill. NULL for none. */
    const char *transfer_format;
    const void *transfer_payload;
    size_t transfer_size;
} kvr_output;

/* Passes the outputs of one step to their callers; never waits. Outputs of requests that have ended are dropped. */
kvr_status kvr_emit(kvr_worker *worker, const kvr_output *outputs, size_t output_count);

/* Ends a request that the engine cannot serve, with a gRPC status code (3: invalid argument) and a message. */
kvr_status kvr_refuse(kvr_worker *worker, const char *request_id, int32_t grpc_code, const char *message);

/* Announces whether the worker takes requests, such as when its engine is away. Events are published anyway. */
kvr_status kvr_set_accepting(kvr_worker *worker, bool accepting);

/* -- Statistics ---------------------------------------------------------------------------------------------------- */

/* What a worker is. */
typedef struct kvr_info {
    uint64_t worker_id;
    /* Incarnation of its cache. */
    uint64_t incarnation;
    /* Address under which others reach it; valid until the worker is closed. */
    const char *endpoint;
    /* Whether the registration is in etcd, as far as is known. */
    bool registered;
    /* Running requests. */
    uint64_t requests;
    /* Connections that were refused because they were not encrypted or showed no valid certificate. */
    uint64_t refused_connections;
    /* Calls that were refused because of the role in the caller's certificate. */
    uint64_t refused_calls;
} kvr_info;

kvr_status kvr_get_info(kvr_worker *worker, kvr_info *info);

/* Numbers of one rank since the worker was opened. */
typedef struct kvr_rank_stats {
    /* Number of events recorded; also the id of the next. */
    uint64_t next_event_id;
    /* Digest of the rank's state. */
    uint64_t digest;
    /* Resident blocks. */
    uint64_t blocks;
    /* Whether blocks may be missing, because events of the engine were lost. */
    bool partial;
    /* Removed blocks that were not resident. */
    uint64_t unknown_removals;
    /* Blocks reported with kvr_stored_in_tier that could not be placed. */
    uint64_t unplaced_blocks;
    uint64_t batches_sent;
    uint64_t heartbeats_sent;
    uint64_t bytes_sent;
    /* Failed attempts to send a batch. */
    uint64_t retries;
    /* Events that were never sent because the buffer was full or the server refused them; consumers fetch the state. */
    uint64_t events_dropped;
    uint64_t unsent_events;
} kvr_rank_stats;

kvr_status kvr_get_rank_stats(kvr_worker *worker, uint32_t dp_rank, kvr_rank_stats *stats);

#ifdef __cplusplus
}
#endif

#endif
