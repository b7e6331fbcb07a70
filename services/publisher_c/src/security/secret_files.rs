//! Reads files with secrets, by the rules of the Python SDK.

use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;

use crate::error::{Error, Status};

/// Permissions that a file with a secret must not have: any of others, and writing by its group.
const EXPOSED: u32 = 0o037;

/// Returns the content of a file with a secret. Errors never quote it.
///
/// The file must have no wider mode than 0640, and content.
pub fn read_secret(path: &str) -> Result<Vec<u8>, Error> {
    let refuse = |message: String| Error::new(Status::InvalidArgument, format!("{path}: {message}"));
    let mut content = Vec::new();
    let mode = fs::File::open(path)
        .and_then(|mut file| {
            file.read_to_end(&mut content)?;
            Ok(file.metadata()?.permissions().mode() & 0o7777)
        })
        .map_err(|error| refuse(format!("{error}: expected a file that this process can read")))?;
    if mode & EXPOSED != 0 {
        return Err(refuse(format!("expected mode 0600 or 0640, received {mode:04o}: run chmod 600 on it")));
    }
    if content.trim_ascii().is_empty() {
        return Err(refuse("expected a secret, received an empty file".into()));
    }
    Ok(content)
}

/// Returns the secret of a file that holds one line, without the line break.
pub fn read_secret_line(path: &str) -> Result<String, Error> {
    let refuse = |message: String| Error::new(Status::InvalidArgument, format!("{path}: {message}"));
    let text = String::from_utf8(read_secret(path)?)
        .map_err(|_| refuse("expected one line of text, received binary data".into()))?;
    match text.lines().collect::<Vec<_>>().as_slice() {
        [line] => Ok(line.trim().to_owned()),
        lines => Err(refuse(format!("expected one line, received {}", lines.len()))),
    }
}
