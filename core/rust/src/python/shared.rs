//! State shared between Python threads. Decides when a call releases the GIL.

use pyo3::prelude::*;

use crate::fair_lock::FairLock;

/// Calls that take longer release the GIL, in ns. For a shorter call, taking the GIL back would cost more.
const LONG: usize = 20_000;

/// State with many readers or one writer. No thread holds the GIL while it waits.
pub struct Shared<S>(FairLock<S>);

impl<S: Send + Sync> Shared<S> {
    pub fn new(state: S) -> Self {
        Self(FairLock::new(state))
    }

    /// Calls `f` with read access. Releases the GIL if the lock is not free or `work` estimates a long call, in ns.
    pub fn read<T: Send>(&self, py: Python<'_>, work: impl FnOnce(&S) -> usize, f: impl FnOnce(&S) -> T + Send) -> T {
        match self.0.try_read() {
            Some(state) if work(&state) <= LONG => f(&state),
            Some(state) => {
                drop(state);
                py.detach(|| self.0.read(f))
            }
            None => py.detach(|| self.0.read(f)),
        }
    }

    /// Does what `read` does, but returns None instead of waiting for a writer.
    pub fn try_read<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&S) -> usize,
        f: impl FnOnce(&S) -> T + Send,
    ) -> Option<T> {
        let state = self.0.try_read()?;
        if work(&state) <= LONG {
            return Some(f(&state));
        }
        drop(state);
        py.detach(|| self.0.try_read().map(|state| f(&state)))
    }

    /// Does what `read` does, for calls that may take very long: writers wait meanwhile, other readers do not.
    pub fn read_long<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&S) -> usize,
        f: impl FnOnce(&S) -> T + Send,
    ) -> T {
        if let Some(state) = self.0.try_read()
            && work(&state) <= LONG
        {
            return f(&state);
        }
        py.detach(|| self.0.read_long(f))
    }

    /// Calls `f` with write access. Releases the GIL in the same cases as `read`.
    pub fn write<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&S) -> usize,
        f: impl FnOnce(&mut S) -> T + Send,
    ) -> T {
        if let Some(mut state) = self.0.try_write()
            && work(&state) <= LONG
        {
            return f(&mut state);
        }
        py.detach(|| self.0.write(f))
    }

    /// Returns the estimate of a write; None if it would wait. Another thread can still take the lock before the write.
    pub fn estimate_if_free(&self, work: impl FnOnce(&S) -> usize) -> Option<usize> {
        self.0.try_write().map(|state| work(&state))
    }

    /// Calls `f` with write access, then `g` with read access; see `FairLock::write_then_read`.
    pub fn write_then_read<T: Send, U: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&S) -> usize,
        f: impl FnOnce(&mut S) -> T + Send,
        g: impl FnOnce(&S, T) -> U + Send,
    ) -> U {
        if let Some(mut state) = self.0.try_write()
            && work(&state) <= LONG
        {
            let result = f(&mut state);
            return g(&state, result);
        }
        py.detach(|| self.0.write_then_read(f, g))
    }
}
