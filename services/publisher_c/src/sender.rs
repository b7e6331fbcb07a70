//! Sends the events of one rank in batches, and heartbeats while there are none.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kvrouter_core::publisher::TakenBatch;

use crate::backoff::Backoff;
use crate::log::Log;
use crate::rank::Rank;
use crate::transport::{SendError, Transport};

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// The first attempts may fail while the connection is being made, which is not worth a warning.
const TRIES_BEFORE_WARNING: u32 = 4;

/// Sends one rank's batches one at a time until it is cancelled.
pub struct BatchSender {
    pub rank: Arc<Rank>,
    pub subject: String,
    pub transport: Transport,
    pub heartbeat: Duration,
    pub log: Arc<Log>,
}

impl BatchSender {
    /// Sends a heartbeat first, and after each interval without events.
    pub async fn run(self) {
        // The stream drops a message whose id it has seen, whoever sent that one: other workers must not guess the ids.
        let secret = loop {
            match getrandom::u64() {
                Ok(number) => break number,
                Err(_) => tokio::time::sleep(LONGEST_PAUSE).await,
            }
        };
        let mut heartbeat_due = true;
        loop {
            let batch = self.rank.take_batch(self.transport.room_for_events());
            let (events, next_event_id) = (batch.next_event_id - batch.first_event_id, batch.next_event_id);
            if events > 0 || heartbeat_due {
                self.deliver(batch, secret).await;
            }
            if events > 0 {
                self.rank.settle(next_event_id);
            }
            heartbeat_due = false;
            if !self.rank.has_unsent() {
                heartbeat_due = tokio::time::timeout(self.heartbeat, self.rank.recorded.notified()).await.is_err();
            }
        }
    }

    /// Sends a batch again until the transport has accepted or refused it.
    async fn deliver(&self, batch: TakenBatch, secret: u64) {
        let payload = bytes::Bytes::from(batch.encoded);
        let head = &self.rank.head;
        let events = batch.next_event_id - batch.first_event_id;
        let message_id = (events > 0)
            .then(|| format!("{secret:x}.{}-{}", batch.first_event_id, batch.next_event_id.saturating_sub(1)));
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        let mut tries = 0;
        let sent = &self.rank.sent;
        loop {
            match self.transport.send(&self.subject, payload.clone(), message_id.as_deref()).await {
                Ok(()) => break,
                Err(SendError::Refused(reason)) => {
                    sent.refused.fetch_add(events, Ordering::Relaxed);
                    let (rank, size) = (head.dp_rank, payload.len());
                    self.log.error(
                        "publish.rejected",
                        format_args!("rank={rank} events={events} bytes={size} error={reason}"),
                    );
                    return;
                }
                Err(SendError::Away(reason)) => {
                    tries += 1;
                    sent.retries.fetch_add(1, Ordering::Relaxed);
                    if tries == TRIES_BEFORE_WARNING {
                        let rank = head.dp_rank;
                        self.log.warning("publish.delayed", format_args!("rank={rank} error={reason}"));
                    }
                    backoff.pause().await;
                }
            }
        }
        if tries >= TRIES_BEFORE_WARNING {
            self.log.info("publish.recovered", format_args!("rank={} retries={tries}", head.dp_rank));
        }
        sent.bytes.fetch_add(payload.len() as u64, Ordering::Relaxed);
        let counter = if events == 0 { &sent.heartbeats } else { &sent.batches };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}
