//! Reads what a caller passes by pointer.

use std::ffi::{CStr, c_char};

use crate::error::{Error, Status};

/// Returns what a pointer refers to.
///
/// # Safety
/// The pointer is null or valid during the call.
pub unsafe fn required<'a, T>(pointer: *const T, name: &str) -> Result<&'a T, Error> {
    unsafe { pointer.as_ref() }
        .ok_or_else(|| Error::new(Status::InvalidArgument, format!("{name}: expected a pointer, received NULL")))
}

/// Returns a list; a null pointer is an empty one.
///
/// # Safety
/// The pointer is null or refers to `count` elements.
pub unsafe fn list<'a, T>(pointer: *const T, count: usize, name: &str) -> Result<&'a [T], Error> {
    match (pointer.is_null(), count) {
        (_, 0) => Ok(&[]),
        (true, _) => {
            let message = format!("{name}: expected a pointer to {count} elements, received NULL");
            Err(Error::new(Status::InvalidArgument, message))
        }
        (false, _) => Ok(unsafe { std::slice::from_raw_parts(pointer, count) }),
    }
}

/// Returns a string; None for a null pointer.
///
/// # Safety
/// The pointer is null or refers to a string that ends with a zero byte.
pub unsafe fn text<'a>(pointer: *const c_char, name: &str) -> Result<Option<&'a str>, Error> {
    if pointer.is_null() {
        return Ok(None);
    }
    let text = unsafe { CStr::from_ptr(pointer) }.to_str();
    text.map(Some).map_err(|_| Error::new(Status::InvalidArgument, format!("{name}: expected UTF-8")))
}

/// Returns a string that must be there.
///
/// # Safety
/// As for `text`.
pub unsafe fn required_text<'a>(pointer: *const c_char, name: &str) -> Result<&'a str, Error> {
    unsafe { text(pointer, name) }?
        .ok_or_else(|| Error::new(Status::InvalidArgument, format!("{name}: expected a string, received NULL")))
}
