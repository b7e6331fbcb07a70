//! Access to the bytes of Python objects, without a copy if they are contiguous.

use std::borrow::Cow;

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyMemoryView, PyTuple};

use crate::hash::{Multimodal, scope_seed};

/// Bytes of a Python object, or a copy of them.
pub enum Bytes<'a, 'py> {
    Borrowed(&'a Bound<'py, PyBytes>),
    /// Of `bytes`, so that Python code cannot change it.
    Frozen(PyUntypedBuffer),
    Buffer(PyUntypedBuffer),
    Owned(Vec<u8>),
}

impl Bytes<'_, '_> {
    /// Returns the bytes. Python code must not change them meanwhile: callers keep the GIL, or the object is `bytes`.
    pub fn as_slice(&self) -> &[u8] {
        match self {
            Self::Borrowed(bytes) => bytes.as_bytes(),
            // SAFETY: the buffer is contiguous (checked at creation), lives as long as `self`, and is `len_bytes` long.
            Self::Frozen(buffer) | Self::Buffer(buffer) => unsafe {
                let length = buffer.len_bytes();
                if length == 0 { &[] } else { std::slice::from_raw_parts(buffer.buf_ptr().cast::<u8>(), length) }
            },
            Self::Owned(bytes) => bytes,
        }
    }

    /// Calls `f` with the bytes. Releases the GIL if `long`, and then passes a copy if Python code could change them.
    pub fn with<T: Send>(&self, py: Python<'_>, long: bool, f: impl FnOnce(&[u8]) -> T + Send) -> T {
        match (self, long) {
            (Self::Buffer(_), true) => {
                let copy = self.as_slice().to_vec();
                py.detach(|| f(&copy))
            }
            (_, true) => {
                let bytes = self.as_slice();
                py.detach(|| f(bytes))
            }
            (_, false) => f(self.as_slice()),
        }
    }
}

/// Returns the bytes of `bytes`, `bytearray`, or another contiguous buffer.
pub fn bytes<'a, 'py>(object: &'a Bound<'py, PyAny>) -> PyResult<Bytes<'a, 'py>> {
    if let Ok(exact) = object.cast::<PyBytes>() {
        return Ok(Bytes::Borrowed(exact));
    }
    let buffer = contiguous(object)?;
    let is_view = object.is_exact_instance_of::<PyMemoryView>();
    let frozen = is_view && object.getattr("obj")?.is_exact_instance_of::<PyBytes>();
    Ok(if frozen { Bytes::Frozen(buffer) } else { Bytes::Buffer(buffer) })
}

/// Returns bytes that Python code cannot change: those of a `bytes` object, otherwise a copy.
pub fn immutable<'a>(object: &'a Bound<'_, PyAny>) -> PyResult<Cow<'a, [u8]>> {
    match object.cast::<PyBytes>() {
        Ok(exact) => Ok(Cow::Borrowed(exact.as_bytes())),
        Err(_) => Ok(Cow::Owned(bytes(object)?.as_slice().to_vec())),
    }
}

fn contiguous(object: &Bound<'_, PyAny>) -> PyResult<PyUntypedBuffer> {
    let buffer = PyUntypedBuffer::get(object)?;
    if !buffer.is_c_contiguous() {
        return Err(PyValueError::new_err("the buffer is not contiguous"));
    }
    Ok(buffer)
}

/// Returns packed hashes as integers: a view if they are aligned and cannot change, otherwise a copy.
///
/// Raises TypeError if they are neither bytes nor unsigned 64-bit integers; ValueError if the buffer is not contiguous
/// or its length is not a multiple of 8.
pub fn words<'a>(object: &'a Bound<'_, PyAny>) -> PyResult<Cow<'a, [u64]>> {
    if let Ok(exact) = object.cast::<PyBytes>() {
        let packed = whole_words(exact.as_bytes())?;
        // SAFETY: any eight bytes are a valid u64.
        let (before, words, after) = unsafe { packed.align_to::<u64>() };
        let there = cfg!(target_endian = "little") && before.is_empty() && after.is_empty();
        return Ok(if there { Cow::Borrowed(words) } else { Cow::Owned(copied(packed)) });
    }
    let buffer = contiguous(object)?;
    match kind(&buffer) {
        Kind::Bytes | Kind::Unsigned(8) => Ok(Cow::Owned(copied(whole_words(Bytes::Buffer(buffer).as_slice())?))),
        _ => Err(PyTypeError::new_err("expected packed hashes as bytes or unsigned 64-bit integers")),
    }
}

/// Hashes of a list, of a buffer of unsigned 64-bit integers, or of another sequence.
pub struct Hashes(pub Vec<u64>);

impl<'py> FromPyObject<'_, 'py> for Hashes {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if !object.is_instance_of::<PyList>()
            && let Ok(packed) = words(&object)
        {
            return Ok(Self(packed.into_owned()));
        }
        Ok(Self(object.extract()?))
    }
}

fn whole_words(packed: &[u8]) -> PyResult<&[u8]> {
    if !packed.len().is_multiple_of(8) {
        return Err(PyValueError::new_err("expected packed hashes of 8 bytes each"));
    }
    Ok(packed)
}

fn copied(packed: &[u8]) -> Vec<u64> {
    packed.chunks_exact(8).map(|word| word.first_chunk().map_or(0, |word| u64::from_le_bytes(*word))).collect()
}

/// The element type of a buffer.
enum Kind {
    Bytes,
    /// Little-endian integers of this many bytes.
    Unsigned(usize),
    Signed(usize),
    Other,
}

fn kind(buffer: &PyUntypedBuffer) -> Kind {
    let format = buffer.format().to_bytes();
    let big_endian = matches!(format.first(), Some(b'>' | b'!')) || (cfg!(target_endian = "big") && format.len() == 1);
    match (format.last().copied().unwrap_or(b'B'), buffer.item_size()) {
        (b'B' | b'b' | b'c', 1) => Kind::Bytes,
        (b'I' | b'L' | b'Q' | b'N', size) if !big_endian => Kind::Unsigned(size),
        (b'i' | b'l' | b'q' | b'n', size) if !big_endian => Kind::Signed(size),
        _ => Kind::Other,
    }
}

/// Converts any form of `TokenBuffer` to token ids as little-endian u32.
pub fn tokens<'a, 'py>(object: &'a Bound<'py, PyAny>) -> PyResult<Bytes<'a, 'py>> {
    if object.is_instance_of::<PyList>() || object.is_instance_of::<PyTuple>() {
        return from_iterable(object, object.len().unwrap_or(0));
    }
    if let Ok(exact) = object.cast::<PyBytes>() {
        return whole_tokens(Bytes::Borrowed(exact));
    }
    let Ok(buffer) = PyUntypedBuffer::get(object) else {
        return from_iterable(object, object.len().unwrap_or(0));
    };
    if !buffer.is_c_contiguous() {
        return from_iterable(object, object.len().unwrap_or(0));
    }
    match kind(&buffer) {
        Kind::Bytes => whole_tokens(Bytes::Buffer(buffer)),
        Kind::Unsigned(4) => Ok(Bytes::Buffer(buffer)),
        Kind::Signed(4) => {
            let tokens = Bytes::Buffer(buffer);
            if tokens.as_slice().chunks_exact(4).any(|token| token.last().is_some_and(|high| high & 0x80 != 0)) {
                return Err(PyOverflowError::new_err("expected token ids of 0 or more"));
            }
            Ok(tokens)
        }
        _ => from_iterable(object, buffer.item_count()),
    }
}

fn whole_tokens<'a, 'py>(tokens: Bytes<'a, 'py>) -> PyResult<Bytes<'a, 'py>> {
    if !tokens.as_slice().len().is_multiple_of(4) {
        return Err(PyValueError::new_err("expected token ids of 4 bytes each"));
    }
    Ok(tokens)
}

fn from_iterable<'a, 'py>(object: &Bound<'py, PyAny>, length: usize) -> PyResult<Bytes<'a, 'py>> {
    let mut owned = Vec::with_capacity(length.saturating_mul(4));
    for item in object.try_iter()? {
        let token: u32 = item?.extract()?;
        owned.extend_from_slice(&token.to_le_bytes());
    }
    Ok(Bytes::Owned(owned))
}

/// Returns the seed of a `Scope`; that of the base model without one.
pub fn seed(scope: Option<&Bound<'_, PyAny>>) -> PyResult<u64> {
    let Some(scope) = scope else { return Ok(crate::hash::SEED) };
    let text = |name: &str| -> PyResult<String> { scope.getattr(name)?.extract() };
    Ok(scope_seed(&text("lora_name")?, &text("cache_salt")?, &text("tenant")?))
}

/// Converts pairs (block index, content hash).
pub fn multimodal(pairs: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<Multimodal>> {
    let Some(pairs) = pairs else { return Ok(Vec::new()) };
    pairs.try_iter()?.map(|pair| pair?.extract()).collect()
}

/// Packs numbers, each given as its bytes, into Python `bytes`.
pub fn pack<const N: usize>(
    py: Python<'_>,
    numbers: impl ExactSizeIterator<Item = [u8; N]>,
) -> PyResult<Bound<'_, PyBytes>> {
    PyBytes::new_with(py, numbers.len().saturating_mul(N), |to| {
        for (to, number) in to.chunks_exact_mut(N).zip(numbers) {
            to.copy_from_slice(&number);
        }
        Ok(())
    })
}

/// The last packed row of numbers. Equal rows are one Python object, so its users recognize a row that they know.
#[derive(Default)]
pub struct LastRow(Option<Py<PyBytes>>);

impl LastRow {
    /// Returns a row, packed.
    pub fn packed<'py>(&mut self, py: Python<'py>, row: &[f64]) -> PyResult<Bound<'py, PyBytes>> {
        let number = |number: &f64| number.to_ne_bytes();
        if let Some(last) = &self.0
            && last.as_bytes(py).as_chunks().0.iter().copied().eq(row.iter().map(number))
        {
            return Ok(last.bind(py).clone());
        }
        let packed = pack(py, row.iter().map(number))?;
        self.0 = Some(packed.clone().unbind());
        Ok(packed)
    }
}
