//! The publisher for engines in C and C++: `include/kvrouter_publisher.h` documents it.
//!
//! The state of a rank is `kvrouter_core::publisher`; this crate connects it to etcd, NATS and gRPC.

mod backoff;
mod config;
mod contract;
mod error;
mod ffi;
mod leased_key;
mod loads;
mod log;
mod names;
mod rank;
mod refusal;
mod registration;
mod requests;
mod security;
mod sender;
mod server;
mod threads;
mod transport;
mod worker;
