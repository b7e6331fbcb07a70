//! Log events of the library, which go to the engine's function or to standard error.

use std::fmt;

/// How important a log event is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
#[repr(i32)]
pub enum Level {
    Info = 1,
    Warning = 2,
    Error = 3,
}

/// Takes an event's level, name and details.
type Sink = dyn Fn(Level, &str, &str) + Send + Sync;

/// Takes log events.
pub struct Log(Box<Sink>);

impl Log {
    pub fn new(sink: impl Fn(Level, &str, &str) + Send + Sync + 'static) -> Self {
        Self(Box::new(sink))
    }

    /// Writes warnings and errors to standard error.
    pub fn to_stderr() -> Self {
        Self::new(|level, event, details| {
            if level >= Level::Warning {
                eprintln!("kvrouter: {event} {details}");
            }
        })
    }

    pub fn info(&self, event: &str, details: fmt::Arguments<'_>) {
        (self.0)(Level::Info, event, &details.to_string());
    }

    pub fn warning(&self, event: &str, details: fmt::Arguments<'_>) {
        (self.0)(Level::Warning, event, &details.to_string());
    }

    pub fn error(&self, event: &str, details: fmt::Arguments<'_>) {
        (self.0)(Level::Error, event, &details.to_string());
    }
}
