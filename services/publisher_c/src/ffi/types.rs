//! The structures of the header, in its order.

use std::ffi::{c_char, c_void};

/// Version of the header that the library was built with.
pub const HEADER_VERSION: u32 = 2;

pub type LogFunction = Option<unsafe extern "C" fn(*mut c_void, i32, *const c_char, *const c_char)>;

#[repr(C)]
pub struct Rank {
    pub dp_rank: u32,
    pub total_blocks: u64,
}

#[repr(C)]
pub struct Label {
    pub key: *const c_char,
    pub value: *const c_char,
}

#[repr(C)]
pub struct Config {
    pub header_version: u32,
    pub block_size: u32,
    pub component: *const c_char,
    pub model: *const c_char,
    pub worker_id: u64,
    pub ranks: *const Rank,
    pub rank_count: usize,
    pub etcd: *const c_char,
    pub nats: *const c_char,
    pub bind: *const c_char,
    pub advertise: *const c_char,
    pub transport: i32,
    pub copy_counting: i32,
    pub role: i32,
    pub labels: *const Label,
    pub label_count: usize,
    pub lora_names: *const *const c_char,
    pub lora_count: usize,
    pub max_batched_tokens: u32,
    pub max_sequences: u32,
    pub max_model_len: u32,
    pub serves_requests: u8,
    pub heartbeat_ms: u32,
    pub load_report_ms: u32,
    pub lease_ttl_seconds: u32,
    pub drain_ms: u32,
    pub flush_ms: u32,
    pub buffer_events: u64,
    pub buffer_bytes: u64,
    pub tls_cert_file: *const c_char,
    pub tls_key_file: *const c_char,
    pub tls_ca_file: *const c_char,
    pub tls_client_auth: u8,
    pub tls_peer_domain: *const c_char,
    pub etcd_ca_file: *const c_char,
    pub etcd_user: *const c_char,
    pub etcd_password_file: *const c_char,
    pub nats_ca_file: *const c_char,
    pub nats_user: *const c_char,
    pub nats_password_file: *const c_char,
    pub nats_token_file: *const c_char,
    pub nats_nkey_file: *const c_char,
    pub nats_credentials_file: *const c_char,
    pub nats_inbox_prefix: *const c_char,
    pub log: LogFunction,
    pub log_context: *mut c_void,
}

#[repr(C)]
pub struct Multimodal {
    pub block_index: u32,
    pub hash: u64,
}

#[repr(C)]
pub struct StoredBlocks {
    pub dp_rank: u32,
    pub tier: i32,
    pub token_ids: *const u32,
    pub token_count: usize,
    pub engine_hashes: *const u64,
    pub hash_count: usize,
    pub parent: *const u64,
    pub lora_name: *const c_char,
    pub cache_salt: *const c_char,
    pub tenant: *const c_char,
    pub multimodal: *const Multimodal,
    pub multimodal_count: usize,
    pub repeats: u8,
    pub block_size: u32,
}

#[repr(C)]
pub struct Load {
    pub dp_rank: u32,
    pub running_requests: u32,
    pub waiting_requests: u32,
    pub active_blocks: u64,
    pub total_blocks: u64,
    pub prefill_tokens: u64,
    pub cached_blocks: u64,
    pub prompt_tokens_total: u64,
    pub cached_tokens_total: u64,
}

#[repr(C)]
pub struct Message {
    pub kind: i32,
    pub request_id: *const c_char,
    pub dp_rank: u32,
    pub token_ids: *const u32,
    pub token_count: usize,
    pub max_tokens: u32,
    pub min_tokens: u32,
    pub stop_token_ids: *const u32,
    pub stop_token_count: usize,
    pub ignore_eos: u8,
    pub temperature: f64,
    pub top_p: f64,
    pub top_k: u32,
    pub has_seed: u8,
    pub seed: u64,
    pub priority: i32,
    pub lora_name: *const c_char,
    pub cache_salt: *const c_char,
    pub tenant: *const c_char,
    pub encoded: *const u8,
    pub encoded_size: usize,
}

#[repr(C)]
pub struct Output {
    pub request_id: *const c_char,
    pub token_ids: *const u32,
    pub token_count: usize,
    pub finish_reason: i32,
    pub has_cached_tokens: u8,
    pub cached_tokens: u32,
    pub logprobs: *const f32,
    pub logprob_count: usize,
    pub transfer_format: *const c_char,
    pub transfer_payload: *const u8,
    pub transfer_size: usize,
}

#[repr(C)]
pub struct Info {
    pub worker_id: u64,
    pub incarnation: u64,
    pub endpoint: *const c_char,
    pub registered: u8,
    pub requests: u64,
    pub refused_connections: u64,
    pub refused_calls: u64,
}

#[repr(C)]
pub struct RankStats {
    pub next_event_id: u64,
    pub digest: u64,
    pub blocks: u64,
    pub partial: u8,
    pub unknown_removals: u64,
    pub unplaced_blocks: u64,
    pub batches_sent: u64,
    pub heartbeats_sent: u64,
    pub bytes_sent: u64,
    pub retries: u64,
    pub events_dropped: u64,
    pub unsent_events: u64,
}
