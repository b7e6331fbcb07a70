//! State that Python threads share, and when they give up the GIL for it.

use pyo3::prelude::*;

use crate::fair_lock::Turns;

/// A call that takes longer gives the GIL up; one that takes less would wait longer to get it back, ns.
const LONG: usize = 20_000;

/// State that is read by many, and changed by one at a time. Nobody waits for it with the GIL held.
pub struct Shared<S>(Turns<S>);

impl<S: Send + Sync> Shared<S> {
    pub fn new(state: S) -> Self {
        Self(Turns::new(state))
    }

    /// Calls `f` with the state; without the GIL if somebody else has the state, or if `work` says that it takes long, ns.
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

    /// The same for what changes the state.
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
