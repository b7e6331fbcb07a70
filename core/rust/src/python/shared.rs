//! State shared between Python threads, and when a call releases the GIL.

use pyo3::prelude::*;

use crate::fair_lock::FairLock;

/// Calls that take longer release the GIL, ns. A shorter call would spend more time on getting it back.
const LONG: usize = 20_000;

/// State with many readers or one writer. No thread waits for it with the GIL.
pub struct Shared<S>(FairLock<S>);

impl<S: Send + Sync> Shared<S> {
    pub fn new(state: S) -> Self {
        Self(FairLock::new(state))
    }

    /// Calls `f` with read access, without the GIL if the lock is not free or `work` estimates a long call, ns.
    pub fn read<T: Send>(&self, py: Python<'_>, work: impl FnOnce(&S) -> usize, f: impl FnOnce(&S) -> T + Send) -> T {
        let mut long = false;
        if let Some(state) = self.0.try_read() {
            long = work(&state) > LONG;
            if !long {
                return f(&state);
            }
        }
        py.detach(|| if long { self.0.read_long(f) } else { self.0.read(f) })
    }

    /// Calls `f` with write access, as `read`.
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
}
