/* An engine that emits one token of each request and never ends one. Prints what it polls: "request ID", "abort ID". It
   begins to poll when it reads a line. */
#include <stdio.h>

#include "kvrouter_publisher.h"

int main(int argc, char **argv) {
    if (argc != 4) return 64;
    kvr_config config = kvr_config_init();
    config.component = argv[1];
    config.model = "m";
    config.block_size = 8;
    config.etcd = argv[2];
    config.nats = argv[3];
    config.serves_requests = true;
    kvr_worker *worker;
    if (kvr_open(&config, 60000, &worker) != KVR_OK) return 1;
    kvr_info info;
    if (kvr_get_info(worker, &info) != KVR_OK) return 2;
    printf("serving %s\n", info.endpoint);
    fflush(stdout);
    while (getchar() != '\n') continue;
    kvr_message *message;
    while (kvr_poll(worker, UINT32_MAX, &message) == KVR_OK) {
        if (message->kind == KVR_MESSAGE_REQUEST) {
            kvr_output output = {.request_id = message->request_id, .token_ids = message->token_ids, .token_count = 1};
            if (kvr_emit(worker, &output, 1) != KVR_OK) return 3;
        }
        printf("%s %s\n", message->kind == KVR_MESSAGE_REQUEST ? "request" : "abort", message->request_id);
        fflush(stdout);
        kvr_message_free(message);
    }
    return 4;
}
