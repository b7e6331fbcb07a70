//! Generates the messages and the WorkerService of the contract.

use std::path::Path;

fn main() -> std::io::Result<()> {
    let protos = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../protos");
    let files = ["worker", "registry", "events", "errors"].map(|name| protos.join(format!("kvrouter/v1/{name}.proto")));
    println!("cargo:rerun-if-changed={}", protos.join("kvrouter/v1").display());
    tonic_prost_build::configure().build_client(false).compile_protos(&files, &[protos])
}
