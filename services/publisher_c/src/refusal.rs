//! Errors of calls with typed details, as clients of the contract expect them.

use prost::Message;
use tonic::{Code, Status};

use crate::contract::{ErrorInfo, ErrorReason};

/// google.rpc.Status.
#[derive(Clone, PartialEq, Message)]
struct RpcStatus {
    #[prost(int32, tag = "1")]
    code: i32,
    #[prost(string, tag = "2")]
    message: String,
    #[prost(message, repeated, tag = "3")]
    details: Vec<prost_types::Any>,
}

/// Returns the status of a refused call.
pub fn refusal(code: Code, reason: ErrorReason, message: &str, info: ErrorInfo) -> Status {
    let info = ErrorInfo { reason: reason.into(), ..info };
    let detail =
        prost_types::Any { type_url: "type.googleapis.com/kvrouter.v1.ErrorInfo".into(), value: info.encode_to_vec() };
    let status = RpcStatus { code: code.into(), message: message.into(), details: vec![detail] };
    Status::with_details(code, message, status.encode_to_vec().into())
}

/// Returns the status of a call with an invalid field.
pub fn bad_request(field: &str, message: &str, advice: &str) -> Status {
    let info = ErrorInfo { field: field.into(), advice: advice.into(), ..Default::default() };
    refusal(Code::InvalidArgument, ErrorReason::BadRequest, message, info)
}
