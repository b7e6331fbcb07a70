//! Answers of Indexers, as Python calls their reader.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::buffers::pack;
use crate::matches;

/// `kvrouter.core.interface.Matches`.
type Matches<'py> = (Bound<'py, PyBytes>, Bound<'py, PyBytes>, Option<Bound<'py, PyBytes>>, u32, Bound<'py, PyBytes>);

/// Reads an answer; see `kvrouter.core.reference.matches`.
#[pyfunction]
pub fn read_matches<'py>(py: Python<'py>, answer: &[u8], most_blocks: u32) -> PyResult<Matches<'py>> {
    let read = matches::read(answer).map_err(|malformed| PyValueError::new_err(malformed.0))?;
    let limited = |blocks: &u32| i64::from((*blocks).min(most_blocks)).to_ne_bytes();
    let [device, host, disk, shared] = &read.blocks;
    let lower = if shared.is_empty() || shared == device {
        None
    } else if host.len() == shared.len() && disk.len() == shared.len() {
        // A vector, because a chain of iterators does not know its length.
        let rows: Vec<_> = [host, disk, shared].into_iter().flatten().map(limited).collect();
        Some(pack(py, rows.into_iter())?)
    } else {
        return Err(PyValueError::new_err("expected columns of one length for the lower tiers"));
    };
    Ok((
        PyBytes::new(py, &read.ranks),
        pack(py, device.iter().map(limited))?,
        lower,
        read.pooled.min(most_blocks),
        pack(py, read.event_ids.iter().map(|id| id.to_ne_bytes()))?,
    ))
}
