//! Encrypted connections, and who may use them.

pub mod access;
pub mod callers;
pub mod certificates;
pub mod listener;
pub mod nats_login;
pub mod secret_files;
