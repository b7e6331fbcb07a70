//! Answers the challenge of a NATS server. The files are read at each connection, so that they can be replaced.

use async_nats::Auth;
use nkeys::KeyPair;

use super::access::NatsAccess;
use super::secret_files::{read_secret, read_secret_line};
use crate::error::{Error, Status};

/// Returns what the worker shows a server that sent this nonce.
pub fn answer(access: &NatsAccess, nonce: &[u8]) -> Result<Auth, Error> {
    let mut auth = Auth::new();
    if !access.password_file.is_empty() {
        auth.username = Some(access.user.clone());
        auth.password = Some(read_secret_line(&access.password_file)?);
    } else if !access.token_file.is_empty() {
        auth.token = Some(read_secret_line(&access.token_file)?);
    } else if !access.nkey_file.is_empty() {
        let seed = read_secret_line(&access.nkey_file)?;
        let pair = KeyPair::from_seed(&seed).map_err(|_| unusable(&access.nkey_file, "the seed of an NKEY"))?;
        auth.nkey = Some(pair.public_key());
        auth.signature = Some(pair.sign(nonce).map_err(|_| unusable(&access.nkey_file, "the seed of a user"))?);
    } else if !access.credentials_file.is_empty() {
        let path = &access.credentials_file;
        let content = String::from_utf8(read_secret(path)?).unwrap_or_default();
        let expected = || unusable(path, "a credentials file (.creds) with a JWT and a seed");
        let (jwt, seed) = section(&content, "JWT").zip(section(&content, "SEED")).ok_or_else(expected)?;
        let pair = KeyPair::from_seed(seed).map_err(|_| expected())?;
        auth.jwt = Some(jwt.to_owned());
        auth.signature = Some(pair.sign(nonce).map_err(|_| expected())?);
    }
    Ok(auth)
}

/// Returns the line below `-----BEGIN ... <kind>-----`.
fn section<'a>(content: &'a str, kind: &str) -> Option<&'a str> {
    let mut lines = content.lines().map(str::trim);
    lines
        .find(|line| line.starts_with("---") && line.contains("BEGIN") && line.trim_end_matches('-').ends_with(kind))?;
    lines.find(|line| !line.is_empty()).filter(|line| !line.starts_with("---"))
}

fn unusable(path: &str, expected: &str) -> Error {
    Error::new(Status::InvalidArgument, format!("{path}: expected {expected}"))
}
