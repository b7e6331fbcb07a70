//! Finds token ids that a model does not have.

use crate::hash::TOKEN_BYTES;

/// Position of the first token id, little-endian u32, that is not below the size of the vocabulary.
pub fn first_outside(tokens: &[u8], vocabulary: u32) -> Option<usize> {
    tokens
        .chunks_exact(TOKEN_BYTES)
        .position(|token| token.first_chunk().is_some_and(|token| u32::from_le_bytes(*token) >= vocabulary))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_token_outside_is_found() {
        let tokens: Vec<u8> = [0, 9, 10, 11, u32::MAX].into_iter().flat_map(u32::to_le_bytes).collect();
        assert_eq!(first_outside(&tokens, 10), Some(2));
        assert_eq!(first_outside(&tokens, u32::MAX), Some(4));
        assert_eq!(first_outside(&tokens[..8], 10), None);
        assert_eq!(first_outside(&[], 10), None);
    }
}
