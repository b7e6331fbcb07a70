//! The native core of kvrouter, as the Python module `kvrouter.core._native`.
//!
//! Without the feature `python` it is a library for other crates, of which only the public modules are used.

#![cfg_attr(not(feature = "python"), allow(dead_code))]

mod calls;
mod event_chunks;
pub mod fair_lock;
mod grpc;
pub mod hash;
pub mod index;
mod json_fields;
mod json_tokens;
mod load;
mod matches;
mod nats;
mod outputs;
mod passed_stream;
mod predicted;
pub mod publisher;
#[cfg(feature = "python")]
mod python;
mod storage;
mod token_events;
mod vocabulary;
mod wire;
