//! Buffers that are reused for each batch.

use crate::index::tree::blocks::Slot;

/// Reused buffers.
#[derive(Default)]
pub struct Scratch {
    pub hashes: Vec<u64>,
    /// Hashes of engine hashes, with the slots at which they are inserted or removed.
    pub references: Vec<(u64, Slot)>,
    marks: Vec<u32>,
    generation: u16,
    pub engines: Vec<u64>,
    pub locals: Vec<u64>,
}

/// Maximum size of a buffer that is kept, in words.
const KEPT_WORDS: usize = 1 << 18;

impl Scratch {
    pub fn heap(&self) -> usize {
        8 * (self.hashes.capacity() + self.engines.capacity() + self.locals.capacity())
            + 4 * self.marks.capacity()
            + 16 * self.references.capacity()
    }

    pub fn trim(&mut self) {
        for buffer in [&mut self.hashes, &mut self.engines, &mut self.locals] {
            if buffer.capacity() > KEPT_WORDS {
                *buffer = Vec::new();
            }
        }
        if self.marks.capacity() > KEPT_WORDS {
            self.marks = Vec::new();
        }
    }

    /// Returns whether any of the words occurs twice. `self.hashes` must contain their hashes.
    pub fn repeats(&mut self, words: &[u64]) -> bool {
        if words.len() < 2 {
            return false;
        }
        // A mark is the index of a word and, in its upper bits, the number of the call. Other calls' marks are ignored.
        let size = (words.len() * 8).next_power_of_two().max(64);
        if self.marks.len() < size || self.generation == u16::MAX || words.len() > 1 << 16 {
            self.marks.clear();
            self.marks.resize(size, 0);
            self.generation = 0;
        }
        self.generation += 1;
        let generation = u32::from(self.generation) << 16;
        let Some(marks) = self.marks.get_mut(..size) else { return true };
        for ((word, hash), at) in words.iter().zip(&self.hashes).zip(0u32..) {
            let mut place = *hash as usize & (size - 1);
            while let Some(mark) = marks.get_mut(place) {
                if *mark & 0xFFFF_0000 != generation {
                    *mark = generation | at;
                    break;
                }
                if words.get((*mark & 0xFFFF) as usize) == Some(word) {
                    return true;
                }
                place = (place + 1) & (size - 1);
            }
        }
        false
    }
}
