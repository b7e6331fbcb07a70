//! State for one caller at a time. No thread holds the GIL while it waits.

use std::sync::{Mutex, PoisonError, TryLockError};

use pyo3::prelude::*;

/// State behind a mutex.
pub struct Exclusive<S>(Mutex<S>);

impl<S: Send> Exclusive<S> {
    pub fn new(state: S) -> Self {
        Self(Mutex::new(state))
    }

    /// Calls `f` with the state. Releases the GIL if the mutex is not free or the call is `long`.
    pub fn with<T: Send>(&self, py: Python<'_>, long: bool, f: impl FnOnce(&mut S) -> T + Send) -> T {
        if !long {
            match self.0.try_lock() {
                Ok(mut state) => return f(&mut state),
                Err(TryLockError::Poisoned(poisoned)) => return f(&mut poisoned.into_inner()),
                Err(TryLockError::WouldBlock) => {}
            }
        }
        py.detach(|| f(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner)))
    }
}
