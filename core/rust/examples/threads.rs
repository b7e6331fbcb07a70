//! Queries while another thread applies batches, without Python: how long they take, alone and beside it.
//!
//!     cargo run --release --no-default-features --example threads -- [BATCHES_PER_SECOND] [SECONDS]
//!
//! The index holds a million blocks. Batches of 512 blocks store and remove in turn; prompts have 750 blocks.

mod support;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvrouter_core::fair_lock::FairLock;
use kvrouter_core::index::Index;
use support::{Random, removed, stored};

const LIVE: usize = 1_000_000;
const PROMPTS: usize = 64;

fn main() {
    let mut args = std::env::args().skip(1).map(|arg| arg.parse::<usize>().unwrap_or(0));
    let (rate, seconds) = (args.next().unwrap_or(2000), args.next().unwrap_or(5));
    let mut random = Random(1);
    let mut index = Index::new(0, 0, false);
    let mut event_id = 0;
    let mut next = || {
        event_id += 1;
        event_id - 1
    };
    for _ in 0..LIVE / 512 {
        let chain = random.words(512);
        index.apply(&stored(next(), &chain, &chain));
    }
    let prompts: Vec<Vec<u64>> = (0..PROMPTS).map(|_| random.words(750)).collect();
    for prompt in &prompts {
        index.apply(&stored(next(), prompt, prompt));
    }
    let chains: Vec<Vec<u64>> = (0..32 + rate * (seconds + 1) / 2).map(|_| random.words(512)).collect();
    for chain in chains.iter().take(32) {
        index.apply(&stored(next(), chain, chain));
    }
    let mut batches = Vec::new();
    for (old, new) in chains.iter().zip(chains.iter().skip(32)) {
        batches.push(stored(next(), new, new));
        batches.push(removed(next(), &old.iter().rev().copied().collect::<Vec<u64>>()));
    }
    let index = FairLock::new(index);
    query(&index, &prompts, seconds, "alone");
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let start = Instant::now();
            for (number, batch) in batches.iter().enumerate() {
                let due = Duration::from_secs_f64(number as f64 / rate as f64);
                std::thread::sleep(due.saturating_sub(start.elapsed()));
                if stop.load(Ordering::Relaxed) {
                    println!("{:.0} batches/s", number as f64 / start.elapsed().as_secs_f64());
                    return;
                }
                assert_eq!(index.write(|index| index.apply(batch)).applied, 1);
            }
        });
        query(&index, &prompts, seconds, "beside batches");
        stop.store(true, Ordering::Relaxed);
    });
}

fn query(index: &FairLock<Index>, prompts: &[Vec<u64>], seconds: usize, when: &str) {
    let mut taken = Vec::new();
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(seconds as u64) {
        for prompt in prompts {
            let begun = Instant::now();
            let overlaps = index.read(|index| index.overlaps(prompt, 0));
            taken.push(begun.elapsed());
            assert_eq!(overlaps.first().copied(), Some(750));
        }
    }
    taken.sort_unstable();
    let at = |share: f64| taken.get((taken.len() as f64 * share) as usize).copied().unwrap_or_default();
    let last = taken.last().copied().unwrap_or_default();
    println!("queries {when}: p50 {:?}, p99 {:?}, p99.9 {:?}, worst {last:?}", at(0.5), at(0.99), at(0.999));
}
