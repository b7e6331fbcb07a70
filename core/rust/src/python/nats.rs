//! Messages of the NATS protocol, as Python calls it.

use pyo3::prelude::*;

use crate::nats::{self, Message};

/// Reads the messages at the beginning of an input; see `kvrouter.core.reference.nats`.
#[pyfunction]
pub fn read_nats_messages(data: &[u8]) -> Vec<(usize, Message<'_>)> {
    nats::whole_messages(data)
}
