//! What is done with any bytes: by the fuzzer, and by the tests with all that the fuzzer found worth keeping.

use kvrouter_core::index::Index;

/// Bytes that an index may take more than its input justifies: its smallest tables and pages, a few times over.
const OVERHEAD: usize = 4 << 20;

/// Cuts the input into messages: a length of two bytes each, then the message.
fn messages(mut input: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let (length, rest) = input.split_first_chunk::<2>()?;
        let (message, rest) = rest.split_at(rest.len().min(u16::from_le_bytes(*length).into()));
        input = rest;
        Some(message)
    })
}

fn words(input: &[u8]) -> Vec<u64> {
    input.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect()
}

/// Applies any messages to an index; then its answers, its dumps and its own accounting must agree with each other.
pub fn apply_batches(input: &[u8]) {
    let mut index = Index::new(1 << 20, 0, true);
    for message in messages(input) {
        index.apply(message);
        index.overlaps(&words(message), 0);
        index.find_matches(&words(message));
    }
    assert!(index.memory_bytes() <= OVERHEAD + 2048 * input.len(), "{} bytes", index.memory_bytes());
    let mut copy = Index::new(0, 0, false);
    for name in index.names_by_slot().into_iter().flatten() {
        let loaded = copy.load(&index.dump(name, 3));
        assert_eq!(loaded, Ok(index.entries_of(name)));
        assert_eq!(copy.digest_of(name), index.digest_of(name));
        assert_eq!(copy.cursor(name), index.cursor(name));
    }
    for message in messages(input) {
        for tier in 0..4 {
            assert_eq!(copy.overlaps(&words(message), tier), copied_order(&index, &copy, &words(message), tier));
        }
    }
    for name in index.names_by_slot().into_iter().flatten() {
        let entries = index.entries_of(name);
        assert_eq!(index.remove_rank(name), entries);
    }
    let stats = index.stats();
    assert_eq!((stats.ranks, stats.blocks, stats.distinct_blocks), (0, 0, 0));
}

/// The overlaps of `index`, in the order of `copy`'s slots.
fn copied_order(index: &Index, copy: &Index, locals: &[u64], tier: u32) -> Vec<u32> {
    let (overlaps, names) = (index.overlaps(locals, tier), index.names_by_slot());
    let of = |name| names.iter().position(|other| *other == name).map_or(0, |slot| overlaps[slot]);
    copy.names_by_slot().into_iter().map(of).collect()
}

/// Loads any chunks; a dump that is accepted must come out again as it went in.
pub fn load_dumps(input: &[u8]) {
    let chunks: Vec<Vec<u8>> = messages(input).map(<[u8]>::to_vec).collect();
    let mut index = Index::new(0, 0, false);
    let Ok(entries) = index.load(&chunks) else {
        assert_eq!(index.stats().ranks, 0);
        return;
    };
    let name = index.names_by_slot()[0].unwrap();
    let mut copy = Index::new(0, 0, false);
    assert_eq!(copy.load(&index.dump(name, 2)), Ok(entries));
    assert_eq!(copy.digest_of(name), index.digest_of(name));
    assert_eq!(index.remove_rank(name), entries);
}
