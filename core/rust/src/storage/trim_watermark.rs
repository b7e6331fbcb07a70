//! When memory is given back to the system: once most of much has gone.

/// Below, what the allocator keeps is not worth the time that giving it back takes: some 60 MB, and a tenth of a second
/// for ten times as many.
const MUCH: usize = 1 << 20;

/// Follows how many there are of something.
#[derive(Default)]
pub struct Ebb {
    most: usize,
}

impl Ebb {
    /// Hears how many there are. Returns whether three quarters have gone since it last returned so, if they were many.
    pub fn hear(&mut self, count: usize) -> bool {
        self.most = self.most.max(count);
        let ebbed = self.most >= MUCH && count <= self.most / 4;
        if ebbed {
            self.most = count;
        }
        ebbed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_tells_once_for_each_fall() {
        let mut ebb = Ebb::default();
        let heard: Vec<bool> =
            [0, 10, 0, MUCH, MUCH / 2, MUCH / 4, 5, 0, 2 * MUCH, 0].into_iter().map(|count| ebb.hear(count)).collect();
        assert_eq!(heard, [false, false, false, false, false, true, false, false, false, true]);
    }
}
