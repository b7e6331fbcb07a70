//! Many who read or one who writes, in turns: who reads never waits for more than one write.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError, RwLock, TryLockError};

use pyo3::prelude::*;

/// A call that takes longer gives the GIL up; one that takes less would wait longer to get it back, ns.
const LONG: usize = 20_000;

/// State that is read by many, and changed by one at a time.
pub struct Shared<S> {
    state: RwLock<S>,
    /// Writers, and those who read for long, hold it all the while: so no writer waits at the lock while somebody reads
    /// for long, and others who read pass by.
    gate: Mutex<()>,
    /// Who had to wait. They go before the next writer.
    waiting: AtomicUsize,
}

impl<S: Send + Sync> Shared<S> {
    pub fn new(state: S) -> Self {
        Self { state: RwLock::new(state), gate: Mutex::new(()), waiting: AtomicUsize::new(0) }
    }

    /// Calls `f` with the state; without the GIL if somebody else has it, or if by `work`, in ns, it will take long.
    pub fn read<T: Send>(&self, py: Python<'_>, work: impl FnOnce(&S) -> usize, f: impl FnOnce(&S) -> T + Send) -> T {
        let work = match self.state.try_read() {
            Ok(state) => {
                let work = work(&state);
                if work <= LONG {
                    return f(&state);
                }
                work
            }
            Err(_) => 0,
        };
        py.detach(|| if work > LONG { self.wait_to_read_long(f) } else { self.wait_to_read(f) })
    }

    /// The same for what changes the state.
    pub fn write<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&S) -> usize,
        f: impl FnOnce(&mut S) -> T + Send,
    ) -> T {
        if let Ok(_gate) = self.gate.try_lock()
            && self.waiting.load(Ordering::Acquire) == 0
            && let Ok(mut state) = self.state.try_write()
            && work(&state) <= LONG
        {
            return f(&mut state);
        }
        py.detach(|| self.wait_to_write(f))
    }

    fn wait_to_read<T>(&self, f: impl FnOnce(&S) -> T) -> T {
        let state = match self.state.try_read() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                self.waiting.fetch_add(1, Ordering::AcqRel);
                let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
                self.waiting.fetch_sub(1, Ordering::AcqRel);
                state
            }
        };
        f(&state)
    }

    fn wait_to_read_long<T>(&self, f: impl FnOnce(&S) -> T) -> T {
        let _gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
        f(&self.state.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn wait_to_write<T>(&self, f: impl FnOnce(&mut S) -> T) -> T {
        let _gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
        // Nobody writes: those who wait are about to wake.
        while self.waiting.load(Ordering::Acquire) > 0 {
            std::thread::yield_now();
        }
        f(&mut self.state.write().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn who_waited_to_read_goes_before_the_next_write() {
        let shared = Shared::new(Vec::new());
        std::thread::scope(|scope| {
            shared.wait_to_write(|order| {
                scope.spawn(|| shared.wait_to_read(|order| assert_eq!(*order, ["first"])));
                while shared.waiting.load(Ordering::Acquire) == 0 {
                    std::thread::yield_now();
                }
                order.push("first");
            });
            shared.wait_to_write(|order| order.push("second"));
        });
        assert_eq!(*shared.state.read().unwrap_or_else(PoisonError::into_inner), ["first", "second"]);
    }

    #[test]
    fn others_read_while_somebody_reads_for_long_and_a_writer_waits() {
        let shared = Shared::new(0);
        let (begun, begins) = mpsc::channel();
        let (end, ends) = mpsc::channel::<()>();
        std::thread::scope(|scope| {
            let (shared, end) = (&shared, end);
            scope.spawn(move || {
                shared.wait_to_read_long(|_| {
                    drop(begun);
                    let _ = ends.recv();
                });
            });
            let _ = begins.recv() as Result<(), _>;
            let (written, writes) = mpsc::channel();
            scope.spawn(move || {
                let _ = written.send(());
                shared.wait_to_write(|state| *state += 1);
            });
            let _ = writes.recv();
            for _ in 0..100 {
                assert!(shared.state.try_read().is_ok(), "a reader would have to wait");
                std::thread::yield_now();
            }
            drop(end);
        });
        assert_eq!(shared.wait_to_read(|state| *state), 1);
    }
}
