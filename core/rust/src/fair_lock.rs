//! Many who read or one who writes, in turns: who reads never waits for more than one write.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};

/// State that is read by many, and changed by one at a time.
pub struct Turns<S> {
    state: RwLock<S>,
    /// Writers, and those who read for long, hold it all the while: so no writer waits at the lock while somebody reads
    /// for long, and others who read pass by.
    gate: Mutex<()>,
    /// Who had to wait. They go before the next writer.
    waiting: AtomicUsize,
}

/// The state, to be changed, for as long as this is there.
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

impl<S> Turns<S> {
    pub fn new(state: S) -> Self {
        Self { state: RwLock::new(state), gate: Mutex::new(()), waiting: AtomicUsize::new(0) }
    }

    /// The state, to be read, if that needs no wait.
    pub fn try_read(&self) -> Option<RwLockReadGuard<'_, S>> {
        match self.state.try_read() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// The state, to be changed, if that needs no wait and nobody else waits.
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

    /// Calls `f` with the state.
    pub fn read<T>(&self, f: impl FnOnce(&S) -> T) -> T {
        let state = self.try_read().unwrap_or_else(|| {
            self.waiting.fetch_add(1, Ordering::AcqRel);
            let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
            self.waiting.fetch_sub(1, Ordering::AcqRel);
            state
        });
        f(&state)
    }

    /// Calls `f` with the state, for long: writers wait meanwhile, and others who read do not.
    pub fn read_long<T>(&self, f: impl FnOnce(&S) -> T) -> T {
        let _gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
        f(&self.state.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Calls `f` with the state, to change it.
    pub fn write<T>(&self, f: impl FnOnce(&mut S) -> T) -> T {
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
        let turns = Turns::new(Vec::new());
        std::thread::scope(|scope| {
            turns.write(|order| {
                scope.spawn(|| turns.read(|order| assert_eq!(*order, ["first"])));
                while turns.waiting.load(Ordering::Acquire) == 0 {
                    std::thread::yield_now();
                }
                order.push("first");
            });
            turns.write(|order| order.push("second"));
        });
        assert_eq!(turns.read(Vec::clone), ["first", "second"]);
    }

    #[test]
    fn others_read_while_somebody_reads_for_long_and_a_writer_waits() {
        let turns = Turns::new(0);
        let (begun, begins) = mpsc::channel::<()>();
        let (end, ends) = mpsc::channel::<()>();
        std::thread::scope(|scope| {
            let (turns, end) = (&turns, end);
            scope.spawn(move || {
                turns.read_long(|_| {
                    drop(begun);
                    let _ = ends.recv();
                });
            });
            let _ = begins.recv();
            let (written, writes) = mpsc::channel();
            scope.spawn(move || {
                let _ = written.send(());
                turns.write(|state| *state += 1);
            });
            let _ = writes.recv();
            for _ in 0..100 {
                assert!(turns.try_read().is_some(), "a reader would have to wait");
                assert!(turns.try_write().is_none(), "a writer would not have to wait");
                std::thread::yield_now();
            }
            drop(end);
        });
        assert_eq!(turns.read(|state| *state), 1);
    }
}
