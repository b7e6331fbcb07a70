//! Accounting of the load of requests in flight.

pub(crate) mod active_blocks;
pub(crate) mod active_sequences;
pub(crate) mod block_users;
pub(crate) mod cache_recency;
pub(crate) mod forecast;
pub(crate) mod rank_loads;
pub(crate) mod recent_blocks;
pub(crate) mod speeds;
pub(crate) mod time_in_flight;
pub(crate) mod tombstones;
