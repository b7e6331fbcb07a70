//! A fair read-write lock: a reader waits for at most one write.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};

/// A lock for many readers or one writer.
pub struct FairLock<S> {
    state: RwLock<S>,
    /// Taken by writers and by long reads for their whole duration. A writer thus never queues at `state` behind a long
    /// read, where it would block other readers.
    gate: Mutex<()>,
    /// Readers that had to wait. They go before the next writer.
    waiting: AtomicUsize,
}

/// Write access until it is dropped.
pub struct Writing<'a, S> {
    state: RwLockWriteGuard<'a, S>,
    _gate: MutexGuard<'a, ()>,
}

impl<S> Deref for Writing<'_, S> {
    type Target = S;

    fn deref(&self) -> &S {
        &self.state
    }
}

impl<S> DerefMut for Writing<'_, S> {
    fn deref_mut(&mut self) -> &mut S {
        &mut self.state
    }
}

impl<S> FairLock<S> {
    pub fn new(state: S) -> Self {
        Self { state: RwLock::new(state), gate: Mutex::new(()), waiting: AtomicUsize::new(0) }
    }

    /// Returns read access if it is free at once.
    pub fn try_read(&self) -> Option<RwLockReadGuard<'_, S>> {
        match self.state.try_read() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Returns write access if it is free at once and no reader waits.
    pub fn try_write(&self) -> Option<Writing<'_, S>> {
        let gate = match self.gate.try_lock() {
            Ok(gate) => gate,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        if self.waiting.load(Ordering::Acquire) > 0 {
            return None;
        }
        match self.state.try_write() {
            Ok(state) => Some(Writing { state, _gate: gate }),
            Err(TryLockError::Poisoned(poisoned)) => Some(Writing { state: poisoned.into_inner(), _gate: gate }),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Calls `f` with read access.
    pub fn read<T>(&self, f: impl FnOnce(&S) -> T) -> T {
        let state = self.try_read().unwrap_or_else(|| {
            self.waiting.fetch_add(1, Ordering::AcqRel);
            let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
            self.waiting.fetch_sub(1, Ordering::AcqRel);
            state
        });
        f(&state)
    }

    /// Calls `f` with read access for a long time: writers wait, other readers do not.
    pub fn read_long<T>(&self, f: impl FnOnce(&S) -> T) -> T {
        let _gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
        f(&self.state.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Calls `f` with write access.
    pub fn write<T>(&self, f: impl FnOnce(&mut S) -> T) -> T {
        let _gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
        // No writer is active, so the waiting readers are about to wake.
        while self.waiting.load(Ordering::Acquire) > 0 {
            std::thread::yield_now();
        }
        f(&mut self.state.write().unwrap_or_else(PoisonError::into_inner))
    }

    /// Calls `f` with write access, then `g` with read access and the result of `f`. No writer comes between them, and
    /// `g` may take long, as in `read_long`.
    pub fn write_then_read<T, U>(&self, f: impl FnOnce(&mut S) -> T, g: impl FnOnce(&S, T) -> U) -> U {
        let _gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
        while self.waiting.load(Ordering::Acquire) > 0 {
            std::thread::yield_now();
        }
        let result = f(&mut self.state.write().unwrap_or_else(PoisonError::into_inner));
        g(&self.state.read().unwrap_or_else(PoisonError::into_inner), result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn a_waiting_reader_goes_before_the_next_write() {
        let lock = FairLock::new(Vec::new());
        std::thread::scope(|scope| {
            lock.write(|order| {
                scope.spawn(|| lock.read(|order| assert_eq!(*order, ["first"])));
                while lock.waiting.load(Ordering::Acquire) == 0 {
                    std::thread::yield_now();
                }
                order.push("first");
            });
            lock.write(|order| order.push("second"));
        });
        assert_eq!(lock.read(Vec::clone), ["first", "second"]);
    }

    #[test]
    fn other_readers_pass_while_a_long_read_runs_and_a_writer_waits() {
        let lock = FairLock::new(0);
        let (begun, begins) = mpsc::channel::<()>();
        let (end, ends) = mpsc::channel::<()>();
        std::thread::scope(|scope| {
            let (lock, end) = (&lock, end);
            scope.spawn(move || {
                lock.read_long(|_| {
                    drop(begun);
                    let _ = ends.recv();
                });
            });
            let _ = begins.recv();
            let (written, writes) = mpsc::channel();
            scope.spawn(move || {
                let _ = written.send(());
                lock.write(|state| *state += 1);
            });
            let _ = writes.recv();
            for _ in 0..100 {
                assert!(lock.try_read().is_some(), "a reader would have to wait");
                assert!(lock.try_write().is_none(), "a writer would not have to wait");
                std::thread::yield_now();
            }
            drop(end);
        });
        assert_eq!(lock.read(|state| *state), 1);
    }

    #[test]
    fn readers_pass_while_a_writer_reads_what_it_wrote() {
        let lock = FairLock::new(0);
        let seen = lock.write_then_read(
            |state| *state += 1,
            |state, ()| {
                assert!(lock.try_write().is_none(), "another writer would come between");
                (*state, lock.try_read().map(|state| *state))
            },
        );
        assert_eq!(seen, (1, Some(1)));
    }
}
