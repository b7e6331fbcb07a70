//! Python class for event batches, which are parsed once, read by callers, and then applied to an index.

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::interface;
use crate::index::tree::ranks::Name;
use crate::wire::{Batch, Malformed};

/// Size of messages from which parsing releases the GIL, in bytes. It may then take longer than 20 µs.
const LONG: usize = 1 << 14;

/// Parses a message. Releases the GIL if the message is long.
pub fn parse<'a>(py: Python<'_>, data: &'a [u8]) -> Result<Batch<'a>, Malformed> {
    if data.len() > LONG { py.detach(|| Batch::parse(data)) } else { Batch::parse(data) }
}

/// A parsed and validated batch. Implements `kvrouter.core.interface.EventBatch`.
#[pyclass(frozen, module = "kvrouter.core._native")]
pub struct EventBatch {
    /// Borrows from `data`.
    batch: Batch<'static>,
    data: Py<PyBytes>,
}

impl EventBatch {
    pub fn batch(&self) -> &Batch<'_> {
        &self.batch
    }

    /// Length of the encoded batch, in bytes.
    pub fn bytes(&self, py: Python<'_>) -> usize {
        self.data.bind(py).as_bytes().len()
    }
}

#[pymethods]
impl EventBatch {
    #[new]
    #[pyo3(signature = (data, rank=None, block_size=None))]
    fn new(data: &Bound<'_, PyBytes>, rank: Option<Name>, block_size: Option<u32>) -> PyResult<Self> {
        let py = data.py();
        let refuse = |reason: &str, detail: String| -> PyResult<PyErr> {
            Ok(PyErr::from_value(interface(py, "RefusedBatch")?.call1((reason, detail))?))
        };
        let kept = data.clone().unbind();
        // SAFETY: `bytes` objects never change or move, and the batch keeps a reference to this one.
        let bytes: &'static [u8] = unsafe { &*std::ptr::from_ref(data.as_bytes()) };
        let batch = match parse(py, bytes) {
            Ok(batch) => batch,
            Err(Malformed(why)) => {
                return Err(refuse(
                    "unparsable",
                    format!("expected a KvEventBatch, received {} bytes: {why}", bytes.len()),
                )?);
            }
        };
        let named = (batch.worker_id, batch.dp_rank);
        if let Some(rank) = rank.filter(|rank| *rank != named) {
            return Err(refuse("rank", format!("expected a batch of rank {rank:?}, received one of rank {named:?}"))?);
        }
        if let Some(expected) = block_size.filter(|expected| *expected != batch.block_size) {
            let detail = format!("expected blocks of {expected} tokens, received blocks of {}", batch.block_size);
            return Err(refuse("block_size", detail)?);
        }
        Ok(Self { batch, data: kept })
    }

    #[getter]
    fn rank(&self) -> Name {
        (self.batch.worker_id, self.batch.dp_rank)
    }
    #[getter]
    fn incarnation(&self) -> u64 {
        self.batch.incarnation
    }
    #[getter]
    fn next_event_id(&self) -> u64 {
        self.batch.next_event_id
    }
    #[getter]
    fn reached(&self) -> u64 {
        self.batch.reached()
    }
    #[getter]
    fn events(&self) -> usize {
        self.batch.events.len()
    }
    #[getter]
    fn clears_all(&self) -> bool {
        self.batch.clears_all()
    }
    #[getter]
    fn published_unix_ns(&self) -> u64 {
        self.batch.published_unix_ns
    }
    #[getter]
    fn memory_bytes(&self, py: Python<'_>) -> usize {
        self.bytes(py) + self.batch.heap()
    }
}
