//! A message of `kvr_poll`, with everything that its pointers refer to.

use std::ffi::CString;

use prost::Message as _;

use super::types;
use crate::contract::WorkerServiceGenerateRequest;
use crate::requests::Message;

const REQUEST: i32 = 1;
const ABORT: i32 = 2;

/// The header's structure comes first, so that a pointer to it is one to the whole.
#[repr(C)]
pub struct OwnedMessage {
    raw: types::Message,
    request: WorkerServiceGenerateRequest,
    encoded: Vec<u8>,
    texts: [CString; 4],
}

impl OwnedMessage {
    pub fn new(message: Message) -> Box<Self> {
        let (kind, request) = match message {
            Message::Request(request) => (REQUEST, *request),
            Message::Abort(request_id) => (ABORT, WorkerServiceGenerateRequest { request_id, ..Default::default() }),
        };
        let encoded = request.encode_to_vec();
        let scope = request.scope.clone().unwrap_or_default();
        let texts =
            [request.request_id.clone(), scope.lora_name, scope.cache_salt, scope.tenant].map(|text| c_string(&text));
        let [request_id, lora_name, cache_salt, tenant] = texts.each_ref().map(|text| text.as_ptr());
        let stop = request.stop_conditions.clone().unwrap_or_default();
        let sampling = request.sampling_options.clone().unwrap_or_default();
        let raw = types::Message {
            kind,
            request_id,
            dp_rank: request.dp_rank,
            token_ids: request.token_ids.as_ptr(),
            token_count: request.token_ids.len(),
            max_tokens: stop.max_tokens,
            min_tokens: stop.min_tokens,
            stop_token_ids: std::ptr::null(),
            stop_token_count: stop.stop_token_ids.len(),
            ignore_eos: stop.ignore_eos.into(),
            temperature: sampling.temperature.unwrap_or(f64::NAN),
            top_p: sampling.top_p.unwrap_or(f64::NAN),
            top_k: sampling.top_k.unwrap_or_default(),
            has_seed: sampling.seed.is_some().into(),
            seed: sampling.seed.unwrap_or_default(),
            priority: request.priority,
            lora_name,
            cache_salt,
            tenant,
            encoded: encoded.as_ptr(),
            encoded_size: encoded.len(),
        };
        let mut owned = Box::new(Self { raw, request, encoded, texts });
        if let Some(stop) = &owned.request.stop_conditions {
            owned.raw.stop_token_ids = stop.stop_token_ids.as_ptr();
        }
        owned
    }
}

/// Returns a string for C, which ends at its first zero byte.
fn c_string(text: &str) -> CString {
    let end = text.find('\0').unwrap_or(text.len());
    CString::new(text.get(..end).unwrap_or_default()).unwrap_or_default()
}
