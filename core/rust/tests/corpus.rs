//! The fuzzer's corpus as ordinary tests: see `fuzz/`.

#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

#[path = "../fuzz/harness.rs"]
mod harness;

use std::path::Path;

/// Every file of a corpus, and each of them with bytes changed or cut off.
fn corpus(name: &str, run: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(name);
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 4, "the corpus is missing");
    let mut state = 1u64;
    for file in files {
        let input = std::fs::read(&file).unwrap();
        run(&input);
        for _ in 0..200 {
            let mut changed = input.clone();
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            if changed.is_empty() {
                continue;
            }
            let at = (state >> 33) as usize % changed.len();
            if state & 7 == 0 {
                changed.truncate(at);
            } else {
                changed[at] = (state >> 20) as u8;
            }
            run(&changed);
        }
    }
}

#[test]
fn any_batches() {
    corpus("batches", harness::apply_batches);
}

#[test]
fn any_dumps() {
    corpus("dumps", harness::load_dumps);
}
