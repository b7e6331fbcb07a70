//! A table of records by id. Growth moves no record, and an empty stretch is dropped unless it is the only one.

const STRETCH: u32 = 512;

/// Records by id. Id 0 is never allocated: it means "none" and reads as a default record.
pub struct Table<T> {
    stretches: Vec<Stretch<T>>,
    free: Vec<u32>,
    next: u32,
    null: T,
    live: usize,
    /// Number of records that fit without growth.
    room: usize,
}

struct Stretch<T> {
    records: Vec<T>,
    live: u32,
}

impl<T: Default> Table<T> {
    pub fn new() -> Self {
        Self { stretches: Vec::new(), free: Vec::new(), next: 1, null: T::default(), live: 0, room: 0 }
    }

    /// Returns the record of an id; a default one for a free id.
    #[inline]
    pub fn at(&self, id: u32) -> &T {
        self.stretches
            .get((id / STRETCH) as usize)
            .and_then(|stretch| stretch.records.get((id % STRETCH) as usize))
            .unwrap_or(&self.null)
    }

    /// Returns the record of an id for changes; a scratch one for a free id.
    #[inline]
    pub fn at_mut(&mut self, id: u32) -> &mut T {
        self.stretches
            .get_mut((id / STRETCH) as usize)
            .and_then(|stretch| stretch.records.get_mut((id % STRETCH) as usize))
            .unwrap_or(&mut self.null)
    }

    /// Adds a record and returns its id; None if no id below `limit` is free.
    pub fn add(&mut self, record: T, limit: u32) -> Option<u32> {
        let id = match self.free.pop() {
            Some(id) => id,
            None if self.next < limit => {
                self.next += 1;
                self.next - 1
            }
            None => return None,
        };
        let at = (id / STRETCH) as usize;
        while self.stretches.len() <= at {
            self.stretches.push(Stretch { records: Vec::new(), live: 0 });
        }
        if let Some(stretch) = self.stretches.get_mut(at) {
            if stretch.records.is_empty() {
                stretch.records = (0..STRETCH).map(|_| T::default()).collect();
                self.room += STRETCH as usize;
            }
            stretch.live += 1;
            if let Some(place) = stretch.records.get_mut((id % STRETCH) as usize) {
                *place = record;
            }
        }
        self.live += 1;
        Some(id)
    }

    /// Removes and returns a record.
    pub fn take(&mut self, id: u32) -> T {
        let Some(stretch) = self.stretches.get_mut((id / STRETCH) as usize) else { return T::default() };
        let record = stretch.records.get_mut((id % STRETCH) as usize).map(std::mem::take).unwrap_or_default();
        stretch.live = stretch.live.saturating_sub(1);
        if stretch.live == 0 && self.room > STRETCH as usize {
            stretch.records = Vec::new();
            self.room -= STRETCH as usize;
        }
        self.free.push(id);
        self.live = self.live.saturating_sub(1);
        record
    }

    /// Returns the number of records.
    pub fn len(&self) -> usize {
        self.live
    }

    /// Returns the memory of the table itself, in bytes.
    pub fn bytes(&self) -> usize {
        self.room * size_of::<T>() + self.free.capacity() * 4 + self.stretches.capacity() * size_of::<Stretch<T>>()
    }

    /// Returns all ids that may be in use.
    pub fn ids(&self) -> impl Iterator<Item = u32> + use<T> {
        1..self.next
    }

    /// Drops the ids of an empty table, so that it starts small again.
    pub fn shrink(&mut self) {
        if self.live == 0 {
            *self = Self::new();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_come_and_go() {
        let mut table: Table<Vec<u32>> = Table::new();
        let ids: Vec<u32> = (0..2000).map(|n| table.add(vec![n], u32::MAX).unwrap()).collect();
        assert_eq!(ids[0], 1);
        for (n, &id) in ids.iter().enumerate() {
            assert_eq!(table.at(id), &vec![n as u32]);
        }
        assert!(table.at(0).is_empty() && table.at(99_999).is_empty());
        let full = table.bytes();
        for &id in &ids {
            table.take(id);
        }
        assert_eq!(table.len(), 0);
        assert!(table.bytes() < full);
        assert_eq!(table.room, STRETCH as usize);
        assert!(table.add(Vec::new(), 1).is_some());
        assert!(Table::<u8>::new().add(1, 1).is_none());
    }
}
