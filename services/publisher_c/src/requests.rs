//! The requests that run on the engine, and where the output of each one goes.

use std::collections::{HashMap, VecDeque};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use prost::Message as _;
use tokio::sync::{Notify, mpsc};
use tonic::{Code, Status};

use crate::contract::{
    ErrorInfo, ErrorReason, FinishReason, GenerateOutput, WorkerServiceGenerateRequest as Request,
    WorkerServiceGenerateResponse as Response,
};
use crate::refusal::{bad_request, refusal};

/// Memory of unread responses at which a call ends.
const MAX_UNREAD_BYTES: usize = 4 << 20;
/// Memory of a response besides its content.
const RESPONSE_BYTES: usize = 64;
/// Maximum number of running requests.
const MAX_REQUESTS: usize = 16_384;

/// What the engine polls for.
pub enum Message {
    /// A request, under an id that no other one has.
    Request(Box<Request>),
    /// The id of a polled request that ended early: its caller left, or it was aborted. Its further output is dropped.
    Abort(String),
}

/// What `poll` returns.
pub enum Polled {
    Message(Message),
    TimedOut,
    Stopped,
}

struct Run {
    request_id: String,
    attempt: u32,
    responses: mpsc::UnboundedSender<Result<Response, Status>>,
    unread: Arc<AtomicUsize>,
}

#[derive(Default)]
struct State {
    by_engine_id: HashMap<String, Run>,
    /// Request id → engine id.
    latest: HashMap<String, String>,
    queue: VecDeque<Message>,
    draining: bool,
    stopped: bool,
}

/// Runs requests on an engine that polls for them and emits their outputs. All methods may be called from any thread.
#[derive(Default)]
pub struct Requests {
    state: Mutex<State>,
    queued: Condvar,
    ended: Notify,
}

impl Requests {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of running requests.
    pub fn running(&self) -> usize {
        self.lock().by_engine_id.len()
    }

    /// Starts a request. A later attempt replaces an earlier one of the same request.
    pub fn start(self: &Arc<Self>, mut request: Request) -> Result<OutputStream, Status> {
        let mut state = self.lock();
        if state.draining || state.stopped {
            let info = ErrorInfo { advice: "Use another worker.".into(), retry_elsewhere: true, ..Default::default() };
            return Err(refusal(Code::Unavailable, ErrorReason::Draining, "the worker is stopping", info));
        }
        if state.by_engine_id.len() >= MAX_REQUESTS {
            let info = ErrorInfo { advice: "Use another worker.".into(), retry_elsewhere: true, ..Default::default() };
            let message = format!("{MAX_REQUESTS} requests run already");
            return Err(refusal(Code::ResourceExhausted, ErrorReason::AllBusy, &message, info));
        }
        let (request_id, attempt) = (request.request_id.clone(), request.attempt);
        if let Some(engine_id) = state.latest.get(&request_id).cloned() {
            let running = state.by_engine_id.get(&engine_id).map_or(0, |run| run.attempt);
            if running >= attempt {
                let info = ErrorInfo {
                    field: "request_id".into(),
                    advice: "Choose another id, or count the attempts of a request.".into(),
                    ..Default::default()
                };
                let message = format!("expected an attempt above {running}, which runs already, received {attempt}");
                return Err(refusal(Code::AlreadyExists, ErrorReason::RequestIdReused, &message, info));
            }
            state.end_aborted(&engine_id);
        }
        if attempt > 0 {
            request.request_id = format!("{request_id}.{attempt}");
        }
        let engine_id = request.request_id.clone();
        if state.by_engine_id.contains_key(&engine_id) {
            return Err(bad_request("request_id", "this id runs already", "Choose another id."));
        }
        let (responses, received) = mpsc::unbounded_channel();
        let unread = Arc::new(AtomicUsize::new(0));
        let run = Run { request_id: request_id.clone(), attempt, responses, unread: unread.clone() };
        state.by_engine_id.insert(engine_id.clone(), run);
        state.latest.insert(request_id, engine_id.clone());
        state.queue.push_back(Message::Request(Box::new(request)));
        drop(state);
        self.queued.notify_one();
        Ok(OutputStream { requests: self.clone(), engine_id, received, unread })
    }

    /// Passes outputs to their callers. Outputs of requests that have ended are dropped.
    pub fn emit(&self, outputs: impl IntoIterator<Item = (String, GenerateOutput)>) {
        let mut state = self.lock();
        for (engine_id, output) in outputs {
            let is_last = output.finish_reason() != FinishReason::Unspecified;
            let Some(run) = state.by_engine_id.get(&engine_id) else { continue };
            let response = Response { output: Some(output) };
            let size = response.encoded_len() + RESPONSE_BYTES;
            let unread = run.unread.fetch_add(size, Ordering::Relaxed) + size;
            if unread > MAX_UNREAD_BYTES && !is_last {
                let message =
                    format!("the caller has not read {unread} bytes of output; the limit is {MAX_UNREAD_BYTES}");
                let info =
                    ErrorInfo { advice: "Read the output as fast as it is produced.".into(), ..Default::default() };
                let error = refusal(Code::ResourceExhausted, ErrorReason::TooMuchUnread, &message, info);
                state.end(&engine_id, Some(Err(error)));
                state.tell_aborted(&engine_id);
            } else if is_last {
                state.end(&engine_id, Some(Ok(response)));
            } else {
                let _ = run.responses.send(Ok(response)); // its receiver's end removes the run
            }
        }
        drop(state);
        self.queued.notify_all();
        self.ended.notify_waiters();
    }

    /// Ends a request that the engine cannot serve. Returns whether it was running.
    pub fn refuse(&self, engine_id: &str, code: Code, message: &str) -> bool {
        let code = if code == Code::Ok { Code::InvalidArgument } else { code };
        let error = refusal(code, ErrorReason::BadRequest, message, ErrorInfo::default());
        let mut state = self.lock();
        let ended = state.end(engine_id, Some(Err(error)));
        state.take_queued(engine_id);
        drop(state);
        self.ended.notify_waiters();
        ended
    }

    /// Aborts requests, whose callers get that as their finish reason. Returns how many were running.
    pub fn abort(&self, request_ids: &[String]) -> usize {
        let mut state = self.lock();
        let engine_ids: Vec<_> = request_ids.iter().filter_map(|each| state.latest.get(each).cloned()).collect();
        for engine_id in &engine_ids {
            state.end_aborted(engine_id);
        }
        drop(state);
        self.queued.notify_all();
        self.ended.notify_waiters();
        engine_ids.len()
    }

    /// Waits for the next request or abort.
    pub fn poll(&self, timeout: Option<Duration>) -> Polled {
        let until = timeout.map(|timeout| Instant::now() + timeout);
        let mut state = self.lock();
        loop {
            if let Some(message) = state.queue.pop_front() {
                return Polled::Message(message);
            }
            if state.stopped {
                return Polled::Stopped;
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            state = match left {
                Some(Duration::ZERO) => return Polled::TimedOut,
                Some(left) => {
                    self.queued.wait_timeout(state, left).map_or_else(|error| error.into_inner().0, |woken| woken.0)
                }
                None => self.queued.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    /// Refuses new requests from now on.
    pub fn drain(&self) {
        self.lock().draining = true;
    }

    /// Waits until no request runs.
    pub async fn idle(&self) {
        loop {
            let ended = self.ended.notified();
            if self.running() == 0 {
                return;
            }
            ended.await;
        }
    }

    /// Aborts what still runs, and ends `poll` once it has returned that.
    pub fn stop(&self) {
        let mut state = self.lock();
        state.stopped = true;
        for engine_id in state.by_engine_id.keys().cloned().collect::<Vec<_>>() {
            state.end_aborted(&engine_id);
        }
        drop(state);
        self.queued.notify_all();
        self.ended.notify_waiters();
    }

    /// Ends a request whose caller left.
    fn cancelled(&self, engine_id: &str) {
        let mut state = self.lock();
        if state.end(engine_id, None) {
            state.tell_aborted(engine_id);
        }
        drop(state);
        self.queued.notify_all();
        self.ended.notify_waiters();
    }
}

impl State {
    /// Ends a run with a last response, if there is one. Returns whether it was running.
    fn end(&mut self, engine_id: &str, last: Option<Result<Response, Status>>) -> bool {
        let Some(run) = self.by_engine_id.remove(engine_id) else { return false };
        if self.latest.get(&run.request_id).is_some_and(|latest| latest == engine_id) {
            self.latest.remove(&run.request_id);
        }
        if let Some(last) = last {
            let _ = run.responses.send(last); // nobody reads it if the caller left
        }
        true
    }

    fn end_aborted(&mut self, engine_id: &str) {
        let mut output = GenerateOutput::default();
        output.set_finish_reason(FinishReason::Abort);
        if self.end(engine_id, Some(Ok(Response { output: Some(output) }))) {
            self.tell_aborted(engine_id);
        }
    }

    /// Drops an ended request with its prompt if the engine has not polled it; otherwise the engine polls an abort.
    fn tell_aborted(&mut self, engine_id: &str) {
        if !self.take_queued(engine_id) {
            self.queue.push_back(Message::Abort(engine_id.into()));
        }
    }

    /// Removes a request from the queue. Returns whether it was there.
    fn take_queued(&mut self, engine_id: &str) -> bool {
        let is_it = |message: &Message| matches!(message, Message::Request(each) if each.request_id == engine_id);
        let place = self.queue.iter().position(is_it);
        place.and_then(|at| self.queue.remove(at)).is_some()
    }
}

/// The responses of one Generate call. Dropping it ends the request.
pub struct OutputStream {
    requests: Arc<Requests>,
    engine_id: String,
    received: mpsc::UnboundedReceiver<Result<Response, Status>>,
    unread: Arc<AtomicUsize>,
}

impl tokio_stream::Stream for OutputStream {
    type Item = Result<Response, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let polled = self.received.poll_recv(context);
        if let Poll::Ready(Some(Ok(response))) = &polled {
            // Saturating: the last response of an aborted request is not counted.
            let size = response.encoded_len() + RESPONSE_BYTES;
            let _ = self
                .unread
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |unread| Some(unread.saturating_sub(size)));
        }
        polled
    }
}

impl Drop for OutputStream {
    fn drop(&mut self) {
        self.requests.cancelled(&self.engine_id);
    }
}
