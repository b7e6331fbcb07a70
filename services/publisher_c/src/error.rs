//! Why a call failed.

use std::fmt;

/// The `kvr_status` of a failed call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Status {
    Ok = 0,
    InvalidArgument = 1,
    InvalidEvent = 2,
    UnknownParent = 3,
    DescriptorMismatch = 4,
    KeyTaken = 5,
    Timeout = 6,
    Stopped = 7,
    Internal = 8,
}

/// A status, and a message that says what was expected, what was received and what to do.
#[derive(Clone, Debug)]
pub struct Error {
    pub status: Status,
    pub message: String,
}

impl Error {
    pub fn new(status: Status, message: impl Into<String>) -> Self {
        Self { status, message: message.into() }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

impl From<kvrouter_core::publisher::Error> for Error {
    fn from(error: kvrouter_core::publisher::Error) -> Self {
        use kvrouter_core::publisher::Error as Refusal;
        let status = match error {
            Refusal::Invalid(_) | Refusal::Gone(_) => Status::InvalidEvent,
            Refusal::UnknownParent(_) => Status::UnknownParent,
        };
        Self::new(status, error.to_string())
    }
}
