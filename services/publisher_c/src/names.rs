//! Names of etcd keys, the stream and NATS subjects of a component, as `kvrouter.v1.names` defines them.

use crate::error::{Error, Status};

/// A component's name, and the names derived from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ComponentName {
    pub namespace: String,
    pub name: String,
}

impl ComponentName {
    /// Parses `namespace/component`.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let parts = text.split_once('/').filter(|(namespace, name)| is_name(namespace) && is_name(name));
        let Some((namespace, name)) = parts else {
            return Err(Error::new(
                Status::InvalidArgument,
                format!("component: expected namespace/component of letters, digits, '-' or '_', received {text:?}"),
            ));
        };
        Ok(Self { namespace: namespace.into(), name: name.into() })
    }

    fn prefix(&self) -> String {
        format!("/kvrouter/v1/{}/components/{}/", self.namespace, self.name)
    }

    pub fn descriptor_key(&self) -> String {
        format!("{}descriptor", self.prefix())
    }

    pub fn worker_key(&self, worker_id: u64) -> String {
        format!("{}workers/{worker_id:016x}", self.prefix())
    }

    pub fn incarnation_key(&self, worker_id: u64) -> String {
        format!("{}incarnations/{worker_id:016x}", self.prefix())
    }

    /// Name of the JetStream stream of events.
    pub fn stream(&self) -> String {
        format!("kvrouter-v1={}={}", self.namespace, self.name)
    }

    pub fn events_wildcard(&self) -> String {
        format!("kvrouter.v1.{}.{}.events.>", self.namespace, self.name)
    }

    /// Subject of one rank's messages of a kind: events (durable), live (Core NATS) or load.
    pub fn subject(&self, kind: &str, worker_id: u64, dp_rank: u32) -> String {
        format!("kvrouter.v1.{}.{}.{kind}.{worker_id:016x}.{dp_rank}", self.namespace, self.name)
    }
}

impl std::fmt::Display for ComponentName {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(to, "{}/{}", self.namespace, self.name)
    }
}

fn is_name(text: &str) -> bool {
    (1..=64).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_contract() {
        let name = ComponentName::parse("ns/pool").unwrap();
        assert_eq!(name.worker_key(255), "/kvrouter/v1/ns/components/pool/workers/00000000000000ff");
        assert_eq!(name.subject("events", 1, 2), "kvrouter.v1.ns.pool.events.0000000000000001.2");
        assert_eq!(name.stream(), "kvrouter-v1=ns=pool");
        for text in ["pool", "a b/c", "/c", "a/", "a/b/c"] {
            assert!(ComponentName::parse(text).is_err(), "{text}");
        }
    }
}
