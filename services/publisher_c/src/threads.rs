//! The library's own threads, in a process that belongs to the engine.

use tokio::runtime::{Builder, Runtime};

/// Number of threads that run the tasks of a worker.
const THREADS: usize = 2;
/// Signals that a thread raises by its own fault.
const FAULTS: [libc::c_int; 6] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGABRT, libc::SIGTRAP];

/// Starts threads in which the signals of the process are blocked.
///
/// Otherwise a connection that breaks would end an engine that leaves SIGPIPE as it is, and handlers of the engine would
/// run in threads that it does not know.
pub fn start() -> std::io::Result<Runtime> {
    Builder::new_multi_thread()
        .worker_threads(THREADS)
        .thread_name("kvrouter")
        .on_thread_start(block_signals)
        .enable_all()
        .build()
}

fn block_signals() {
    // The set is initialized by sigfillset, and both calls fail for invalid arguments only.
    unsafe {
        let mut signals = std::mem::zeroed();
        libc::sigfillset(&mut signals);
        for fault in FAULTS {
            libc::sigdelset(&mut signals, fault);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &signals, std::ptr::null_mut());
    }
}
