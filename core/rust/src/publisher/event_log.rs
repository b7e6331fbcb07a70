//! A bounded log of one rank's events: unsent ones, and sent ones for resyncs.

use std::collections::VecDeque;

use super::blocks::{Error, NumberedEvent};

/// Events with consecutive ids.
///
/// Beyond `max_events` or `max_bytes` (encoded) the oldest events are discarded: sent ones first, then unsent ones, which
/// are counted in `dropped`. Consumers notice dropped events as a gap in the ids.
pub struct EventLog {
    /// Unsent events that were discarded.
    pub dropped: u64,
    pub unsent_bytes: usize,
    max_events: usize,
    max_bytes: usize,
    bytes: usize,
    sent: VecDeque<NumberedEvent>,
    unsent: VecDeque<NumberedEvent>,
}

impl EventLog {
    pub fn new(max_events: usize, max_bytes: usize) -> Self {
        Self {
            dropped: 0,
            unsent_bytes: 0,
            max_events,
            max_bytes,
            bytes: 0,
            sent: VecDeque::new(),
            unsent: VecDeque::new(),
        }
    }

    /// Returns the number of unsent events.
    pub fn unsent(&self) -> usize {
        self.unsent.len()
    }

    /// Appends events in order of their ids.
    pub fn extend(&mut self, events: impl IntoIterator<Item = NumberedEvent>) {
        for event in events {
            self.bytes += event.encoded.len();
            self.unsent_bytes += event.encoded.len();
            self.unsent.push_back(event);
        }
        while self.sent.len() + self.unsent.len() > self.max_events || self.bytes > self.max_bytes {
            let oldest = match self.sent.pop_front() {
                Some(oldest) => oldest,
                None => {
                    let Some(oldest) = self.unsent.pop_front() else { return };
                    self.unsent_bytes -= oldest.encoded.len();
                    self.dropped += 1;
                    oldest
                }
            };
            self.bytes -= oldest.encoded.len();
        }
    }

    /// Returns the next events to send, at most `max_bytes` but at least one; none if all were sent.
    pub fn take(&mut self, max_bytes: usize) -> Vec<NumberedEvent> {
        let mut taken = Vec::new();
        let mut size = 0;
        while self.unsent.front().is_some_and(|event| taken.is_empty() || size + event.encoded.len() <= max_bytes) {
            let Some(event) = self.unsent.pop_front() else { break };
            size += event.encoded.len();
            taken.push(event);
        }
        self.unsent_bytes -= size;
        self.sent.extend(taken.iter().cloned());
        taken
    }

    /// Returns the events from `event_id` to below `until` (0 for all), in groups of at most `max_bytes`.
    pub fn since(&self, event_id: u64, until: u64, max_bytes: usize) -> Result<Vec<Vec<NumberedEvent>>, Error> {
        let events = || self.sent.iter().chain(&self.unsent);
        let ends = events().next().zip(events().next_back());
        if !ends.is_some_and(|(first, last)| (first.id..=last.id).contains(&event_id)) {
            return Err(Error::Gone(format!("event {event_id} is not in the log")));
        }
        let mut runs = Vec::new();
        let (mut run, mut size) = (Vec::new(), 0);
        for event in events().filter(|event| event.id >= event_id && (until == 0 || event.id < until)) {
            if !run.is_empty() && size + event.encoded.len() > max_bytes {
                runs.push(std::mem::take(&mut run));
                size = 0;
            }
            size += event.encoded.len();
            run.push(event.clone());
        }
        if !run.is_empty() {
            runs.push(run);
        }
        Ok(runs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(id: u64, size: usize) -> NumberedEvent {
        NumberedEvent { id, encoded: vec![0; size].into(), digest: id }
    }

    fn ids(events: &[NumberedEvent]) -> Vec<u64> {
        events.iter().map(|event| event.id).collect()
    }

    #[test]
    fn sent_events_are_discarded_before_unsent_ones() {
        let mut log = EventLog::new(4, 1 << 20);
        log.extend((0..3).map(|id| event(id, 10)));
        assert_eq!(ids(&log.take(25)), [0, 1]);
        log.extend((3..6).map(|id| event(id, 10)));
        assert_eq!((log.dropped, log.unsent()), (0, 4));
        log.extend([event(6, 10)]);
        assert_eq!((log.dropped, log.unsent(), log.unsent_bytes), (1, 4, 40));
        assert!(log.since(2, 0, 100).is_err());
        assert_eq!(log.since(3, 6, 20).unwrap().iter().map(|run| ids(run)).collect::<Vec<_>>(), [vec![3, 4], vec![5]]);
    }

    #[test]
    fn an_event_above_the_limit_is_taken_alone() {
        let mut log = EventLog::new(10, 1 << 20);
        log.extend([event(0, 100), event(1, 1)]);
        assert_eq!(ids(&log.take(10)), [0]);
        assert_eq!(ids(&log.take(10)), [1]);
        assert!(log.take(10).is_empty());
    }
}
