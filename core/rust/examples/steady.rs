//! Steady state without Python: chains are stored and the oldest removed, at a set number of live blocks.
//!
//!     cargo run --release --no-default-features --example steady -- LIVE_BLOCKS CHAIN_BLOCKS [ROUNDS]

mod support;

use std::collections::VecDeque;
use std::time::Instant;

use kvrouter_core::index::Index;
use support::{Random, removed, stored};

/// Times of calls, ns.
#[derive(Default)]
struct Times(Vec<f64>);

impl Times {
    fn take<T>(&mut self, call: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = call();
        self.0.push(start.elapsed().as_nanos() as f64);
        result
    }

    /// The time that a share of the calls does not take longer than. What else the machine does spoils a mean, but not a
    /// median.
    fn at(&mut self, share: f64) -> f64 {
        self.0.sort_by(f64::total_cmp);
        let last = self.0.len().saturating_sub(1) as f64;
        self.0.get((last * share) as usize).copied().unwrap_or_default()
    }
}

fn main() {
    let mut args = std::env::args().skip(1).map(|arg| arg.parse::<usize>().unwrap_or(1));
    let (live, length) = (args.next().unwrap_or(1 << 20), args.next().unwrap_or(512));
    let mut random = Random(1);
    let mut index = Index::new(0, 0, false);
    let mut chains: VecDeque<(Vec<u64>, Vec<u64>)> = VecDeque::new();
    let mut event_id = 0;
    let (mut growing, mut storing, mut removing, mut querying) =
        (Times::default(), Times::default(), Times::default(), Times::default());
    let rounds = args.next().unwrap_or(2000);
    let fill = live / length;
    for round in 0..fill + rounds {
        let (locals, engines) = (random.words(length), random.words(length));
        let message = stored(event_id, &engines, &locals);
        event_id += 1;
        let times = if round < fill { &mut growing } else { &mut storing };
        let summary = times.take(|| index.apply(&message));
        assert_eq!(summary.stored_blocks as usize, length);
        chains.push_back((locals, engines));
        if round >= fill {
            let Some((locals, mut engines)) = chains.pop_front() else { return };
            let overlaps = querying.take(|| index.overlaps(&locals, 0));
            assert_eq!(overlaps.first().copied(), Some(length as u32));
            engines.reverse();
            let message = removed(event_id, &engines);
            event_id += 1;
            let summary = removing.take(|| index.apply(&message));
            assert_eq!(summary.removed_blocks as usize, length);
        }
    }
    let per_block = |time: f64| time / length as f64;
    println!(
        "grown to {live}: {:.1} ns/block, p99.9 of a batch {:.0} us, worst {:.0} us, most entries moved {}",
        per_block(growing.at(0.5)),
        growing.at(0.999) / 1e3,
        growing.at(1.0) / 1e3,
        index.most_moved()
    );
    println!(
        "{live} live, medians: stored {:.1} removed {:.1} ns/block, query {:.0} ns, {:.1} bytes/block",
        per_block(storing.at(0.5)),
        per_block(removing.at(0.5)),
        querying.at(0.5),
        index.memory_bytes() as f64 / live as f64,
    );
}
