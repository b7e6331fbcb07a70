//! Messages and the service of the contract (`protos/kvrouter/v1`), generated when this crate is built.

#![allow(dead_code, clippy::all)] // generated, also for messages of other services

tonic::include_proto!("kvrouter.v1");
