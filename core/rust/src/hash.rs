//! Block hashing: XXH3-64 over a block's tokens, and the chain over a prompt's blocks.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher};

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Seed of the base model's blocks, of every chain, and of every digest.
pub const SEED: u64 = 1337;

/// Size of a token in bytes: a little-endian u32.
pub const TOKEN_BYTES: usize = 4;

/// Multimodal content, hashed into a block together with its tokens: (block index, content hash).
pub type Multimodal = (u32, u64);

/// Returns the seed for the local hashes of a scope.
///
/// With an adapter only, the seed is 1337 plus XXH3-64 of the adapter's name (seed 0), as in other publishers. With a
/// salt or a tenant, it is XXH3-64 (seed 1337) of adapter, salt and tenant, each after its length as a u32, so that the
/// hashed bytes of different scopes differ.
pub fn scope_seed(lora_name: &str, cache_salt: &str, tenant: &str) -> u64 {
    if cache_salt.is_empty() && tenant.is_empty() {
        if lora_name.is_empty() {
            return SEED;
        }
        return SEED.wrapping_add(xxh3_64_with_seed(lora_name.as_bytes(), 0));
    }
    let mut spelled = Vec::with_capacity(12 + lora_name.len() + cache_salt.len() + tenant.len());
    for part in [lora_name, cache_salt, tenant] {
        spelled.extend_from_slice(&(part.len() as u32).to_le_bytes());
        spelled.extend_from_slice(part.as_bytes());
    }
    xxh3_64_with_seed(&spelled, SEED)
}

/// Appends the local hashes of the full blocks in `tokens` (little-endian u32) to `out`.
pub fn local_hashes(tokens: &[u8], block_size: usize, seed: u64, multimodal: &[Multimodal], out: &mut Vec<u64>) {
    let block_bytes = block_size.saturating_mul(TOKEN_BYTES);
    if block_bytes == 0 {
        return;
    }
    let blocks = tokens.chunks_exact(block_bytes);
    out.reserve(blocks.len());
    if multimodal.is_empty() {
        out.extend(blocks.map(|block| xxh3_64_with_seed(block, seed)));
        return;
    }
    let mut content = multimodal.to_vec();
    content.sort_by_key(|(at, _)| *at); // stable: keeps the given order within a block
    let mut content = content.into_iter().peekable();
    let mut with_content = Vec::new();
    for (index, block) in blocks.enumerate() {
        with_content.clear();
        with_content.extend_from_slice(block);
        while let Some((_, hash)) = content.next_if(|(at, _)| *at as usize <= index) {
            with_content.extend_from_slice(&hash.to_le_bytes());
        }
        out.push(xxh3_64_with_seed(&with_content, seed));
    }
}

/// Returns the sequence hash of a block from the sequence hash of its parent.
#[inline]
pub fn chain(previous: u64, local: u64) -> u64 {
    let bytes = (previous as u128 | (local as u128) << 64).to_le_bytes();
    xxh3_64_with_seed(&bytes, SEED)
}

/// Returns the sequence hash of the block at `depth` from that of its parent, which is ignored at depth 0.
#[inline]
pub fn sequence_hash(depth: u32, previous: u64, local: u64) -> u64 {
    if depth == 0 { local } else { chain(previous, local) }
}

/// Returns the term of one entry in a rank's digest.
#[inline]
pub fn digest_term(engine_hash: u64, sequence_hash: u64, tier: u32, copies: u32) -> u64 {
    let mut bytes = [0u8; 32];
    for (to, word) in bytes.chunks_exact_mut(8).zip([engine_hash, sequence_hash, tier.into(), copies.into()]) {
        to.copy_from_slice(&word.to_le_bytes());
    }
    xxh3_64_with_seed(&bytes, SEED)
}

/// A random key for hashing engine hashes, so that clients cannot choose engine hashes that collide in a table.
#[derive(Clone, Copy)]
pub struct Secret {
    add: u64,
    multiply: u64,
}

impl Secret {
    /// Creates a secret from the standard library's source of randomness. Each index has its own.
    pub fn random() -> Self {
        use std::hash::{BuildHasher, RandomState};
        let state = RandomState::new();
        Self { add: state.hash_one(1u8), multiply: state.hash_one(2u8) | 1 }
    }

    /// Returns a uniformly distributed hash of `key`.
    ///
    /// It multiplies and folds twice. One fold maps consecutive keys to multiples of the secret, which cluster if the
    /// secret is near a simple fraction of 2^64: one secret in a hundred overfilled a part of a table of a million.
    #[inline]
    pub fn mix(&self, key: u64) -> u64 {
        self.fold(self.fold(key ^ self.add))
    }

    /// Returns a hash of two keys.
    #[inline]
    pub fn mix_pair(&self, one: u64, two: u64) -> u64 {
        self.mix(self.fold(one ^ self.add).rotate_left(29) ^ two)
    }

    #[inline]
    fn fold(&self, key: u64) -> u64 {
        let product = u128::from(key).wrapping_mul(u128::from(self.multiply));
        (product as u64) ^ ((product >> 64) as u64)
    }
}

/// A map by engine hash. Its hasher is several times faster than that of the standard library, with a random secret too.
pub type ByEngineHash<V> = HashMap<u64, V, SecretState>;

/// Makes the hashers of a map, all with its secret.
#[derive(Clone)]
pub struct SecretState(Secret);

impl Default for SecretState {
    fn default() -> Self {
        Self(Secret::random())
    }
}

impl BuildHasher for SecretState {
    type Hasher = SecretHasher;

    fn build_hasher(&self) -> SecretHasher {
        SecretHasher { secret: self.0, hash: 0 }
    }
}

/// Hashes one integer.
pub struct SecretHasher {
    secret: Secret,
    hash: u64,
}

impl Hasher for SecretHasher {
    fn finish(&self) -> u64 {
        self.hash
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, word: u64) {
        self.hash = self.secret.mix(self.hash ^ word);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_count_up_are_spread_by_any_secret() {
        let near_a_third = Secret { add: 0x2545_f491_4f6c_dd1d, multiply: 0x5555_5555_6ecf_9fd3 };
        for (secret, step) in
            [(near_a_third, 1), (near_a_third, 1 << 32), (Secret::random(), 1), (Secret::random(), 16)]
        {
            let mut keys = [[0u32; 256]; 2];
            for key in (0..256_000u64).map(|key| key * step) {
                keys[0][(secret.mix(key) >> 56) as usize] += 1;
                keys[1][(secret.mix_pair(7, key) >> 56) as usize] += 1;
            }
            assert!(keys.as_flattened().iter().all(|count| (800..1200).contains(count)), "{step}: {keys:?}");
        }
    }

    #[test]
    fn scopes_do_not_spell_each_other() {
        let seeds = [
            ("", "", ""),
            ("a", "", ""),
            ("", "a", ""),
            ("", "", "a"),
            ("a", "b", ""),
            ("ab", "", "c"),
            ("a", "bc", ""),
        ]
        .map(|(lora, salt, tenant)| scope_seed(lora, salt, tenant));
        for (at, seed) in seeds.iter().enumerate() {
            assert!(!seeds[..at].contains(seed));
        }
        assert_eq!(seeds[0], 1337);
    }

    #[test]
    fn only_full_blocks_are_hashed() {
        let tokens: Vec<u8> = (0u32..10).flat_map(u32::to_le_bytes).collect();
        let mut out = Vec::new();
        local_hashes(&tokens, 4, SEED, &[], &mut out);
        assert_eq!(out.len(), 2);
        local_hashes(&tokens, 0, SEED, &[], &mut out);
        assert_eq!(out.len(), 2);
    }

    #[test]
    fn content_changes_only_its_block() {
        let tokens = [0u8; 32];
        let (mut plain, mut with_image) = (Vec::new(), Vec::new());
        local_hashes(&tokens, 4, SEED, &[], &mut plain);
        local_hashes(&tokens, 4, SEED, &[(1, 7)], &mut with_image);
        assert_eq!(plain[0], with_image[0]);
        assert_ne!(plain[1], with_image[1]);
    }
}
