//! Storage of the index and the load: tables and pages whose memory is returned to the system.

pub(crate) mod memory;
pub(crate) mod pages;
pub(crate) mod slot_set;
pub(crate) mod table;
pub(crate) mod tagline;
pub(crate) mod tagmap;
pub(crate) mod trim_watermark;
