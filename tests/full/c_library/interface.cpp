// The header from C++: what is refused, with which status and words, and a worker that publishes.
#include <atomic>
#include <cassert>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "kvrouter_publisher.h"

namespace {

struct Close {
    void operator()(kvr_worker *worker) const { kvr_close(worker); }
};
using Worker = std::unique_ptr<kvr_worker, Close>;

void refused(kvr_status status, kvr_status expected, const std::string &words) {
    const std::string error = kvr_last_error();
    if (status == expected && error.find(words) != std::string::npos) return;
    std::fprintf(stderr, "expected status %d with \"%s\", received %d with \"%s\"\n", expected, words.c_str(), status,
                 error.c_str());
    std::abort();
}

void count(void *context, kvr_log_level, const char *event, const char *details) {
    assert(event && details);
    ++*static_cast<std::atomic<int> *>(context);
}

}  // namespace

int main(int, char **argv) {
    kvr_worker *opened = nullptr;
    refused(kvr_open(nullptr, 1, &opened), KVR_INVALID_ARGUMENT, "config");
    kvr_config config = kvr_config_init();
    refused(kvr_open(&config, 1, nullptr), KVR_INVALID_ARGUMENT, "worker");
    refused(kvr_open(&config, 1, &opened), KVR_INVALID_ARGUMENT, "component");
    config.component = "no slash";
    refused(kvr_open(&config, 1, &opened), KVR_INVALID_ARGUMENT, "namespace/component");
    config.component = argv[1];
    refused(kvr_open(&config, 1, &opened), KVR_INVALID_ARGUMENT, "model is empty");
    config.model = "m";
    refused(kvr_open(&config, 1, &opened), KVR_INVALID_ARGUMENT, "block_size is 0");
    config.block_size = 4;
    config.model = "\xff";
    refused(kvr_open(&config, 1, &opened), KVR_INVALID_ARGUMENT, "model: expected UTF-8");
    config.model = "m";
    config.header_version = 99;
    refused(kvr_open(&config, 1, &opened), KVR_INVALID_ARGUMENT, "header_version: expected 2, received 99");
    config.header_version = KVR_HEADER_VERSION;
    config.bind = "0.0.0.0:0";
    refused(kvr_open(&config, 1, &opened), KVR_INVALID_ARGUMENT, "wildcard");
    config.bind = nullptr;
    config.nats = "nope";
    refused(kvr_open(&config, 1, &opened), KVR_INVALID_ARGUMENT, "nats: expected URLs such as nats://127.0.0.1:4222");
    config.nats = nullptr;
    config.etcd = "nope";
    refused(kvr_open(&config, 1, &opened), KVR_INVALID_ARGUMENT, "etcd: expected host:port");
    config.etcd = nullptr;
    std::atomic<int> logged{0};
    config.log = count;
    config.log_context = &logged;
    config.etcd = "127.0.0.1:1";
    refused(kvr_open(&config, 300, &opened), KVR_TIMEOUT, "could not be registered in time");
    assert(opened == nullptr);
    config.etcd = argv[2];
    config.nats = argv[3];
    const int status = kvr_open(&config, 60000, &opened);
    if (status != KVR_OK) {
        std::fprintf(stderr, "%s\n", kvr_last_error());
        return 1;
    }
    Worker worker(opened);
    assert(logged > 0);

    kvr_config other = config;
    other.block_size = 8;
    refused(kvr_open(&other, 60000, &opened), KVR_DESCRIPTOR_MISMATCH, "block_size: expected 4, this worker has 8");

    const std::vector<std::uint32_t> tokens = {1, 2, 3, 4, 5, 6, 7, 8};
    const std::vector<std::uint64_t> hashes = {11, 12};
    kvr_stored_blocks blocks = kvr_stored_blocks_init();
    blocks.token_ids = tokens.data();
    blocks.token_count = 7;
    blocks.engine_hashes = hashes.data();
    blocks.hash_count = hashes.size();
    refused(kvr_stored(worker.get(), &blocks), KVR_INVALID_EVENT, "2 full blocks of 4 tokens, received 7 tokens");
    blocks.token_count = tokens.size();
    const std::uint64_t parent = 99;
    blocks.parent = &parent;
    refused(kvr_stored(worker.get(), &blocks), KVR_UNKNOWN_PARENT, "0x0000000000000063 is not resident");
    blocks.parent = nullptr;
    blocks.token_ids = nullptr;
    refused(kvr_stored(worker.get(), &blocks), KVR_INVALID_ARGUMENT, "token_ids");
    blocks.token_ids = tokens.data();
    blocks.dp_rank = 5;
    refused(kvr_stored(worker.get(), &blocks), KVR_INVALID_ARGUMENT, "received 5");
    blocks.dp_rank = 0;
    assert(kvr_stored(worker.get(), &blocks) == KVR_OK);
    refused(kvr_cleared(worker.get(), 0, static_cast<kvr_tier>(9)), KVR_INVALID_EVENT, "received 9");
    std::uint64_t recorded = 0;
    assert(kvr_stored_in_tier(worker.get(), 0, hashes.data(), 2, KVR_TIER_HOST, &recorded) == KVR_OK && recorded == 2);
    assert(kvr_removed(worker.get(), 0, hashes.data(), 1, KVR_TIER_DEVICE) == KVR_OK);
    bool resident = true;
    assert(kvr_is_resident(worker.get(), 0, 11, KVR_TIER_DEVICE, &resident) == KVR_OK && !resident);

    // Each thread has its own last error.
    std::thread([] { assert(std::strlen(kvr_last_error()) == 0); }).join();
    assert(kvr_digest_hash("\0\0\0\0\0\0\0\0\0\0\0\0\0\0\1\2", 16) == 258 && kvr_digest_hash("abc", 3) == 0);

    kvr_message *message = nullptr;
    refused(kvr_poll(worker.get(), 1, &message), KVR_TIMEOUT, "no message");
    assert(kvr_flush(worker.get(), 60000) == KVR_OK);
    assert(kvr_stop(worker.get()) == KVR_OK && kvr_stop(worker.get()) == KVR_OK);
    refused(kvr_stored(worker.get(), &blocks), KVR_STOPPED, "stopped");
    refused(kvr_poll(worker.get(), UINT32_MAX, &message), KVR_STOPPED, "stop");
    std::printf("content %llu\n", static_cast<unsigned long long>(kvr_content_hash("image-1", 7)));
    return 0;
}
