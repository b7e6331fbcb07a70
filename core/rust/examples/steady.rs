//! Steady state without Python: chains are stored and the oldest removed, at a set number of live blocks.
//!
//!     cargo run --release --no-default-features --example steady -- LIVE_BLOCKS CHAIN_BLOCKS [ROUNDS]

use std::collections::VecDeque;
use std::time::Duration;

use kvrouter_core::index::Index;

/// Processor time of this thread: other programs on the machine do not count.
fn now() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a timespec to write to.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn varint(mut value: u64, to: &mut Vec<u8>) {
    while value >= 0x80 {
        to.push(value as u8 | 0x80);
        value >>= 7;
    }
    to.push(value as u8);
}

fn field(number: u64, value: &[u8], to: &mut Vec<u8>) {
    varint(number << 3 | 2, to);
    varint(value.len() as u64, to);
    to.extend_from_slice(value);
}

fn batch(event_id: u64, change: Vec<u8>) -> Vec<u8> {
    let mut event = vec![0x08];
    varint(event_id, &mut event);
    event.extend_from_slice(&[0x10, 0x01]);
    event.extend(change);
    let mut message = vec![0x08, 7, 0x19];
    message.extend(1u64.to_le_bytes());
    field(4, &event, &mut message);
    message
}

fn bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn main() {
    let mut args = std::env::args().skip(1).map(|arg| arg.parse::<usize>().unwrap_or(1));
    let (live, length) = (args.next().unwrap_or(1 << 20), args.next().unwrap_or(512));
    let mut state = 1u64;
    let mut random = move || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut word = state;
        word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        word ^ (word >> 31)
    };
    let mut index = Index::new(0, 0, false);
    let mut chains: VecDeque<(Vec<u64>, Vec<u64>)> = VecDeque::new();
    let mut event_id = 0;
    let (mut stored, mut removed, mut asked) = (Duration::ZERO, Duration::ZERO, Duration::ZERO);
    let mut worst = Duration::ZERO;
    let rounds = args.next().unwrap_or(2000);
    let fill = live / length;
    let start = now();
    for round in 0..fill + rounds {
        if round == fill {
            println!("filled at {:.1} ns/block with the generator", (now() - start).as_nanos() as f64 / live as f64);
            stored = Duration::ZERO;
        }
        let locals: Vec<u64> = (0..length).map(|_| random()).collect();
        let engines: Vec<u64> = (0..length).map(|_| random()).collect();
        let mut change = Vec::new();
        field(2, &bytes(&engines), &mut change);
        field(3, &bytes(&locals), &mut change);
        let mut outer = Vec::new();
        field(3, &change, &mut outer);
        let message = batch(event_id, outer);
        event_id += 1;
        let start = now();
        let summary = index.apply(&message);
        let taken = now() - start;
        stored += taken;
        worst = worst.max(taken);
        assert_eq!(summary.stored_blocks as usize, length);
        chains.push_back((locals, engines));
        if round >= fill {
            let Some((locals, mut engines)) = chains.pop_front() else { return };
            let start = now();
            let overlaps = index.overlaps(&locals, 0);
            asked += now() - start;
            assert_eq!(overlaps.first().copied(), Some(length as u32));
            engines.reverse();
            let mut change = Vec::new();
            field(1, &bytes(&engines), &mut change);
            let mut outer = Vec::new();
            field(4, &change, &mut outer);
            let message = batch(event_id, outer);
            event_id += 1;
            let start = now();
            let summary = index.apply(&message);
            removed += now() - start;
            assert_eq!(summary.removed_blocks as usize, length);
        }
    }
    let blocks = (rounds * length) as f64;
    let start = now();
    for _ in 0..1000 {
        std::hint::black_box(now());
    }
    println!("reading the clock takes {:?}", (now() - start) / 1000);
    println!(
        "{live} live: stored {:.1} removed {:.1} ns/block, query {:.0} ns, worst store {:?}, {:.1} bytes/block, moved {}",
        stored.as_nanos() as f64 / blocks,
        removed.as_nanos() as f64 / blocks,
        asked.as_nanos() as f64 / rounds as f64,
        worst,
        index.memory_bytes() as f64 / live as f64,
        index.most_moved()
    );
}
