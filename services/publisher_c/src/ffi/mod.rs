//! The functions of the header.

mod config;
mod message;
mod pointers;
mod types;

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use kvrouter_core::publisher::Scope;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::contract::{FinishReason, GenerateOutput, LoadReport, TransferParams};
use crate::error::{Error, Status};
use crate::rank::StoredBlocks;
use crate::requests::Polled;
use crate::worker::Worker;
use config::above_zero;
use message::OwnedMessage;
use pointers::{list, required, required_text, text};

/// A `kvr_worker`.
pub struct Handle {
    worker: Worker,
    endpoint: CString,
}

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// Runs a function of the header: keeps its error for `kvr_last_error`, and a panic from the engine.
fn run(body: impl FnOnce() -> Result<(), Error>) -> i32 {
    let result = catch_unwind(AssertUnwindSafe(body));
    let error = match result {
        Ok(Ok(())) => return Status::Ok as i32,
        Ok(Err(error)) => error,
        Err(_) => Error::new(Status::Internal, "the library failed; standard error has the cause"),
    };
    let message = CString::new(error.message.replace('\0', " ")).unwrap_or_default();
    LAST_ERROR.with_borrow_mut(|last| *last = message);
    error.status as i32
}

/// Returns an open worker that has not ended.
unsafe fn running<'a>(worker: *const Handle) -> Result<&'a Worker, Error> {
    let worker = &unsafe { required(worker, "worker") }?.worker;
    worker.check()?;
    Ok(worker)
}

fn limit(timeout_ms: u32) -> Option<Duration> {
    (timeout_ms != 0).then(|| Duration::from_millis(timeout_ms.into()))
}

fn write_to<T>(target: *mut T, value: T, name: &str) -> Result<(), Error> {
    if target.is_null() {
        return Err(Error::new(Status::InvalidArgument, format!("{name}: expected a pointer, received NULL")));
    }
    unsafe { target.write(value) };
    Ok(())
}

#[unsafe(no_mangle)]
pub extern "C" fn kvr_last_error() -> *const c_char {
    LAST_ERROR.with_borrow(|last| last.as_ptr())
}

/// # Safety
/// The pointers are null or valid, as the header says; so for all functions below.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvr_open(config: *const types::Config, timeout_ms: u32, worker: *mut *mut Handle) -> i32 {
    run(|| {
        let given = unsafe { required(config, "config") }?;
        write_to(worker, std::ptr::null_mut(), "worker")?;
        let (config, log) = unsafe { (config::read(given)?, config::read_log(given)) };
        let opened = Worker::open(config, limit(timeout_ms), log)?;
        let endpoint = CString::new(opened.endpoint.clone()).unwrap_or_default();
        write_to(worker, Box::into_raw(Box::new(Handle { worker: opened, endpoint })), "worker")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvr_stop(worker: *mut Handle) -> i32 {
    run(|| {
        unsafe { required(worker, "worker") }?.worker.stop();
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvr_close(worker: *mut Handle) {
    run(|| {
        if !worker.is_null() {
            unsafe { Box::from_raw(worker) }.worker.close();
        }
        Ok(())
    });
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvr_check(worker: *mut Handle) -> i32 {
    run(|| unsafe { running(worker) }.map(drop))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvr_stored(worker: *mut Handle, blocks: *const types::StoredBlocks) -> i32 {
    run(|| {
        let worker = unsafe { running(worker) }?;
        let given = unsafe { required(blocks, "blocks") }?;
        let scope = unsafe {
            let parts = [(given.lora_name, "lora_name"), (given.cache_salt, "cache_salt"), (given.tenant, "tenant")];
            let mut texts = [None; 3];
            for (to, (pointer, name)) in texts.iter_mut().zip(parts) {
                *to = text(pointer, name)?;
            }
            texts
        };
        let is_scoped = scope.iter().any(Option::is_some);
        let [lora_name, cache_salt, tenant] = scope.map(|part| part.unwrap_or_default().to_owned());
        let content = unsafe { list(given.multimodal, given.multimodal_count, "multimodal") }?;
        let stored = StoredBlocks {
            token_ids: unsafe { list(given.token_ids, given.token_count, "token_ids") }?,
            engine_hashes: unsafe { list(given.engine_hashes, given.hash_count, "engine_hashes") }?,
            parent: unsafe { given.parent.as_ref() }.copied(),
            tier: given.tier,
            scope: is_scoped.then_some(Scope { lora_name, cache_salt, tenant }),
            multimodal: content.iter().map(|each| (each.block_index, each.hash)).collect(),
            repeats: given.repeats != 0,
            block_size: given.block_size,
        };
        worker.rank(given.dp_rank)?.stored(&stored)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvr_stored_in_tier(
    worker: *mut Handle,
    dp_rank: u32,
    engine_hashes: *const u64,
    hash_count: usize,
    tier: i32,
    recorded: *mut u64,
) -> i32 {
    run(|| {
        let hashes = unsafe { list(engine_hashes, hash_count, "engine_hashes") }?;
        let stored = unsafe { running(worker) }?.rank(dp_rank)?.stored_in_tier(hashes, tier)?;
        if recorded.is_null() { Ok(()) } else { write_to(recorded, stored, "recorded") }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvr_removed(
    worker: *mut Handle,
    dp_rank: u32,
    engine_hashes: *const u64,
    hash_count: usize,
    tier: i32,
) -> i32 {
    run(|| {
        let hashes = unsafe { list(engine_hashes, hash_count, "engine_hashes") }?;
        unsafe { running(worker) }?.rank(dp_rank)?.removed(hashes, tier)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvr_cleared(worker: *mut Handle, dp_rank: u32, tier: i32) -> i32 {
    run(|| {
        let worker = unsafe { running(worker) }?;
        if worker.rank(dp_rank)?.cleared(tier)? {
            worker.announce_partial();
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvr_events_lost(worker: *mut Handle, dp_rank: u32, removals: bool) -> i32 {
    run(|| {
        let worker = unsafe { running(worker) }?;
        if worker.rank(dp_rank)?.events_lost(removals)? {
            worker.announce_partial();
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvr_is_resident(
    worker: *mut Handle,
    dp_rank: u32,
    engine_hash: u64,
    tier: i32,
    resident: *mut bool,
) -> i32 {
    run(|| {
        let is_resident = unsafe { running(worker) }?.rank(dp_rank)?.is_resident(engine_hash, tier)?;
        write_to(resident, is_resident, "resident")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvr_flush(worker: *mut Handle, timeout_ms: u32) -> i32 {
    run(|| unsafe { running(worker) }?.flush(limit(timeout_ms)))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvr_content_hash(id: *const c_void, size: usize) -> u64 {
    let bytes = unsafe { list(id.cast::<u8>(), size, "id") };
    bytes.map_or(0, |bytes| xxh3_64_with_seed(bytes, kvrouter_core::hash::SEED))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvr_digest_hash(digest: *const c_void, size: usize) -> u64 {
    let bytes = unsafe { list(digest.cast::<u8>(), size, "digest") };
    bytes.ok().and_then(<[u8]>::last_chunk).map_or(0, |last| u64::from_be_bytes(*last))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvr_report_load(worker: *mut Handle, load: *const types::Load) -> i32 {
    run(|| {
        let given = unsafe { required(load, "load") }?;
        let report = LoadReport {
            active_blocks: given.active_blocks,
            total_blocks: above_zero(given.total_blocks),
            prefill_tokens: given.prefill_tokens,
            running_requests: given.running_requests,
            waiting_requests: given.waiting_requests,
            cached_blocks: given.cached_blocks,
            prompt_tokens_total: given.prompt_tokens_total,
            cached_tokens_total: given.cached_tokens_total,
            ..Default::default()
        };
        unsafe { running(worker) }?.report_load(given.dp_rank, report)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvr_poll(worker: *mut Handle, timeout_ms: u32, message: *mut *mut types::Message) -> i32 {
    run(|| {
        write_to(message, std::ptr::null_mut(), "message")?;
        let worker = &unsafe { required(worker, "worker") }?.worker;
        let timeout = (timeout_ms != u32::MAX).then(|| Duration::from_millis(timeout_ms.into()));
        match worker.requests.poll(timeout) {
            Polled::Message(polled) => write_to(message, Box::into_raw(OwnedMessage::new(polled)).cast(), "message"),
            Polled::TimedOut => Err(Error::new(Status::Timeout, "no message arrived in time")),
            Polled::Stopped => {
                worker.check()?;
                Err(Error::new(Status::Stopped, "the worker is stopping"))
            }
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvr_message_free(message: *mut types::Message) {
    run(|| {
        if !message.is_null() {
            drop(unsafe { Box::from_raw(message.cast::<OwnedMessage>()) });
        }
        Ok(())
    });
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvr_emit(worker: *mut Handle, outputs: *const types::Output, output_count: usize) -> i32 {
    run(|| {
        // Requests that are aborted while the worker stops are still emitted for.
        let worker = &unsafe { required(worker, "worker") }?.worker;
        let given = unsafe { list(outputs, output_count, "outputs") }?;
        let read = given.iter().map(|output| unsafe { read_output(output) }).collect::<Result<Vec<_>, Error>>()?;
        worker.requests.emit(read);
        Ok(())
    })
}

unsafe fn read_output(given: &types::Output) -> Result<(String, GenerateOutput), Error> {
    let request_id = unsafe { required_text(given.request_id, "request_id") }?;
    let finish_reason = FinishReason::try_from(given.finish_reason).map_err(|_| {
        let message = format!("finish_reason: expected a value of the header, received {}", given.finish_reason);
        Error::new(Status::InvalidArgument, message)
    })?;
    let format = unsafe { text(given.transfer_format, "transfer_format") }?;
    let payload = unsafe { list(given.transfer_payload, given.transfer_size, "transfer_payload") }?;
    let output = GenerateOutput {
        token_ids: unsafe { list(given.token_ids, given.token_count, "token_ids") }?.to_vec(),
        cached_tokens: (given.has_cached_tokens != 0).then_some(given.cached_tokens),
        finish_reason: finish_reason.into(),
        logprobs: unsafe { list(given.logprobs, given.logprob_count, "logprobs") }?.to_vec(),
        transfer_params: format.map(|format| TransferParams { format: format.into(), payload: payload.to_vec() }),
        ..Default::default()
    };
    Ok((request_id.into(), output))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvr_refuse(
    worker: *mut Handle,
    request_id: *const c_char,
    grpc_code: i32,
    message: *const c_char,
) -> i32 {
    run(|| {
        let worker = &unsafe { required(worker, "worker") }?.worker;
        let request_id = unsafe { required_text(request_id, "request_id") }?;
        let message = unsafe { text(message, "message") }?.unwrap_or_default();
        worker.requests.refuse(request_id, tonic::Code::from_i32(grpc_code), message);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvr_set_accepting(worker: *mut Handle, accepting: bool) -> i32 {
    run(|| {
        unsafe { running(worker) }?.set_accepting(accepting);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvr_get_info(worker: *mut Handle, info: *mut types::Info) -> i32 {
    run(|| {
        let handle = unsafe { required(worker.cast_const(), "worker") }?;
        let worker = &handle.worker;
        let endpoint: &CStr = &handle.endpoint;
        let value = types::Info {
            worker_id: worker.config.worker_id,
            incarnation: worker.incarnation,
            endpoint: endpoint.as_ptr(),
            registered: worker.registered().into(),
            requests: worker.requests.running() as u64,
            refused_connections: worker.refused_connections.total(),
            refused_calls: worker.refused_calls.total(),
        };
        write_to(info, value, "info")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvr_get_rank_stats(worker: *mut Handle, dp_rank: u32, stats: *mut types::RankStats) -> i32 {
    run(|| {
        let found = unsafe { required(worker.cast_const(), "worker") }?.worker.rank(dp_rank)?.stats();
        let value = types::RankStats {
            next_event_id: found.next_event_id,
            digest: found.digest,
            blocks: found.blocks,
            partial: found.partial.into(),
            unknown_removals: found.unknown_removals,
            unplaced_blocks: found.unplaced_blocks,
            batches_sent: found.batches_sent,
            heartbeats_sent: found.heartbeats_sent,
            bytes_sent: found.bytes_sent,
            retries: found.retries,
            events_dropped: found.events_dropped,
            unsent_events: found.unsent_events,
        };
        write_to(stats, value, "stats")
    })
}
