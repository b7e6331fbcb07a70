//! Tables, pages and memory that go back to the system: what the index and the load are kept in.

pub(crate) mod memory;
pub(crate) mod pages;
pub(crate) mod slot_set;
pub(crate) mod table;
pub(crate) mod tagline;
pub(crate) mod tagmap;
pub(crate) mod trim_watermark;
